"""What happens to a component's weights around one use of it."""

from __future__ import annotations

from typing import Protocol

from .placement import Placement


class Use(Protocol):
    """What a strategy knows of a use. The planner sets it; nothing here does."""

    @property
    def retain_resident_layers(self) -> bool: ...

    @property
    def passes(self) -> int:
        """How often the component's layers run before the use ends."""

    @property
    def resident_layers(self) -> frozenset[int] | None:
        """Layers to hold where the resident set is held; None: those declared."""

    @property
    def retained_layers(self) -> frozenset[int] | None:
        """Of those, the ones to retain where the use retains; None: all."""


class Strategy:
    """Prepares and finishes the uses of one component."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def prepare(self, use: Use) -> None:
        """The resident set is held only where its layers run again before they would be given
        up: later in this use, or after the gap that it is retained across.

        Raises torch.OutOfMemoryError.
        """
        holds = use.passes > 1 or use.retain_resident_layers
        self.placement.begin_use(
            holds_resident_set=holds, passes=use.passes, resident=use.resident_layers
        )

    def finish(self, use: Use) -> None:
        self.placement.release_after_use(
            keep_resident=use.retain_resident_layers, retained=use.retained_layers
        )
