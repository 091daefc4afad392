"""The shapes that were validated, and where a request stands to them."""

from __future__ import annotations

from collections.abc import Sequence

from ...offload.errors import OutsideEnvelopeError
from ...phases.diffusers import DiffusersPipeline
from ...phases.shape import Shape


class Envelope:
    """`shapes` are the largest ones, as they were asked for."""

    def __init__(self, pipeline: DiffusersPipeline, shapes: Sequence[Shape]) -> None:
        self._completed = {shape: pipeline.completed(shape) for shape in shapes}

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(self._completed)

    def covering(self, asked: Shape) -> tuple[Shape, ...]:
        """Those that are at least as large as `asked`, which is completed.

        With guidance they cover what is asked without: that runs the same phases, in fewer passes.
        """
        return tuple(each for each, full in self._completed.items() if full.covers(asked))

    def like(self, asked: Shape) -> Shape:
        """The one that a request at `asked` is most like: if any covers it, one that does, and with
        or without guidance as it is, if there is such a one."""
        candidates = self.covering(asked) or self.shapes
        return min(candidates, key=lambda each: self._completed[each].guided != asked.guided)

    def refusal(self, asked: Shape) -> OutsideEnvelopeError:
        envelope = [*map(str, self._completed.values())]
        return OutsideEnvelopeError(
            f"{asked} is outside the validated envelope: {', '.join(envelope)}",
            hint="ask for less, settle again with this shape, or choose what becomes of such "
            "requests: outside=release or outside=warn",
            shape=str(asked),
            envelope=envelope,
        )
