"""What is asked of a pipeline, and the largest that it will be asked."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from ..offload.errors import ShapeError

_SIZE = re.compile(r"(\d{1,9})x(\d{1,9})(?:x(\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class Shape:
    """One request: width and height in pixels, prompt tokens before any template, denoise steps.

    `guidance` above 1 turns classifier-free guidance on: pipelines then encode a second prompt
    and call the denoiser twice a step, or once with twice the batch. None leaves steps to the
    pipeline, and guidance off, unless `completed` fills them in.
    """

    width: int
    height: int
    frames: int = 1
    batch: int = 1
    tokens: int = 512
    steps: int | None = None
    guidance: float | None = None

    def __post_init__(self) -> None:
        for name in ("width", "height", "frames", "batch", "tokens", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ShapeError(f"{name} is {value}", hint=f"{name} starts at 1")
        if self.guidance is not None and not 0 <= self.guidance < 1000:
            raise ShapeError(f"guidance is {self.guidance}", hint="guidance is 0 or more; 1 is off")

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Reads `WIDTHxHEIGHT[xFRAMES][:key=value,…]`, as in `1280x720x81:steps=40,guidance=5`.

        Raises ShapeError.
        """
        size, _, options = text.strip().partition(":")
        matched = _SIZE.fullmatch(size.strip().lower())
        if matched is None:
            raise ShapeError(
                f"{text!r} is no shape",
                hint="write WIDTHxHEIGHT[xFRAMES][:key=value,…], as in 1280x720x81:steps=40",
            )
        width, height, frames = matched.groups()
        values: dict[str, int | float] = {}
        for option in filter(None, (part.strip() for part in options.split(","))):
            key, equals, value = option.partition("=")
            if not equals or key not in _OPTIONS:
                raise ShapeError(
                    f"{option!r} in shape {text!r} is no option",
                    hint=f"options are key=value with a key of {', '.join(_OPTIONS)}",
                )
            if key in values:
                raise ShapeError(f"{key} stands twice in shape {text!r}", hint="give it once")
            try:
                values[key] = float(value) if key == "guidance" else int(value)
            except ValueError:
                kind = "a number" if key == "guidance" else "a whole number"
                raise ShapeError(
                    f"{key} in shape {text!r} is {value!r}", hint=f"{key} is {kind}"
                ) from None
        shape = cls(int(width), int(height), int(frames or 1))
        return replace(shape, **values)  # type: ignore[arg-type]

    @property
    def size(self) -> str:
        """WIDTHxHEIGHT, and xFRAMES for a video."""
        return f"{self.width}x{self.height}" + (f"x{self.frames}" if self.frames > 1 else "")

    def __str__(self) -> str:
        default = Shape(self.width, self.height, self.frames)
        options = [
            f"{name}={str(getattr(self, name)).removesuffix('.0')}"
            for name in _OPTIONS
            if getattr(self, name) != getattr(default, name)
        ]
        return self.size + (":" + ",".join(options) if options else "")

    def completed(self, default: Shape) -> Shape:
        """This shape with the steps and guidance of `default` where it leaves them open."""
        return replace(
            self,
            steps=default.steps if self.steps is None else self.steps,
            guidance=default.guidance if self.guidance is None else self.guidance,
        )

    def covers(self, other: Shape) -> bool:
        """Whether this shape is at least as large in every dimension that takes memory.

        Denoise steps follow one another and take none, but for one step alone, in which no
        resident set is held. Guidance counts as off or on.
        """
        return (
            all(getattr(self, name) >= getattr(other, name) for name in _EXTENTS)
            and self.guided >= other.guided
            and (self.steps != 1 or other.steps == 1)
        )

    @property
    def cfg_scale(self) -> float:
        """The scale of classifier-free guidance; 1 is off."""
        return 1.0 if self.guidance is None else self.guidance

    @property
    def guided(self) -> bool:
        return self.cfg_scale > 1


_OPTIONS = tuple(f.name for f in fields(Shape) if f.name not in ("width", "height", "frames"))
_EXTENTS = ("width", "height", "frames", "batch", "tokens")


def largest_shapes(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """The shapes that no other shape covers, in the order given; of equal ones the first."""
    kept: list[Shape] = []
    for shape in shapes:
        if any(other.covers(shape) for other in kept):
            continue
        kept = [other for other in kept if not shape.covers(other)] + [shape]
    return tuple(kept)
