"""A candidate: a choice, and what it says of each use."""

from __future__ import annotations

from dataclasses import dataclass

from ..phases.use import ComponentUse
from .choosing.instance import Choice, Instance
from .choosing.part import Place


@dataclass(frozen=True, slots=True)
class Candidate:
    choice: Choice
    uses: tuple[ComponentUse, ...]
    """Every use of a component that leaves the device, as the choice has it."""

    @property
    def components(self) -> tuple[str, ...]:
        """Those that retain something across a gap."""
        retaining = (use.component for use in self.uses if use.retain_resident_layers)
        return tuple(dict.fromkeys(retaining))

    def shortage(self, instance: Instance) -> Shortage | None:
        """Where it lacks the most by the model; None if it fits."""
        worst: Shortage | None = None
        for place, room in enumerate(instance.places):
            short = instance.device_bytes(self.choice, place) - room.room_bytes
            if short > 0 and (worst is None or short > worst.short_bytes):
                worst = Shortage(place, short)
        return worst


@dataclass(frozen=True, slots=True)
class Shortage:
    place: Place
    short_bytes: int
