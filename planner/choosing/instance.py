"""The choice as numbers: components (`part.py`), and the rooms that they share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .part import Part, PartChoice, Place, allows, copy_seconds, held_bytes, part_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """Device bytes that the weights of all components may take together in one place."""

    phase: str
    shape: str
    room_bytes: int


Choice = tuple[PartChoice, ...]
"""One for each part of the instance, in its order."""


@dataclass(frozen=True, slots=True)
class Instance:
    places: tuple[Room, ...]
    parts: tuple[Part, ...]
    host_budget_bytes: int | None = None
    """For pinned masters; None is no limit."""
    fixed_seconds: float = 0.0
    """Of a request, besides copies: compute, where it is known."""
    refuted: tuple[Choice, ...] = ()
    """Choices that failed without a place: each excludes itself and all at least as large."""
    pinned_on_card: bool = False
    """Whether what is pinned on the host is charged to the device as well, in every place."""

    def device_bytes(self, choice: Choice, place: Place) -> int:
        weights = sum(
            part_bytes(part, chosen, place) for part, chosen in zip(self.parts, choice, strict=True)
        )
        return weights + self.host_bytes(choice) if self.pinned_on_card else weights

    def held_bytes(self, choice: Choice) -> int:
        """What ties are broken by: bytes held in uses and across gaps, added up."""
        return sum(held_bytes(part, each) for part, each in zip(self.parts, choice, strict=True))

    def host_bytes(self, choice: Choice) -> int:
        return sum(each.mode.host_bytes for each in choice)

    def seconds(self, choice: Choice) -> float:
        """Of a request in the steady state: exposed copies, and what is fixed."""
        return self.fixed_seconds + sum(
            copy_seconds(part, each) for part, each in zip(self.parts, choice, strict=True)
        )

    def fits(self, choice: Choice) -> bool:
        if self.host_budget_bytes is not None and self.host_bytes(choice) > self.host_budget_bytes:
            return False
        if any(exceeds(choice, each) for each in self.refuted):
            return False
        if not all(map(allows, self.parts, choice)):
            return False
        return all(
            self.device_bytes(choice, place) <= room.room_bytes
            for place, room in enumerate(self.places)
        )

    def without(self, choice: Choice) -> Instance:
        """Without `choice` and all that is at least as large in everything."""
        return replace(self, refuted=(*self.refuted, choice))

    def lowered(self, place: Place, room_bytes: int) -> Instance:
        """With no more room in `place` than `room_bytes`, as a refutation there teaches."""
        places = list(self.places)
        room = places[place]
        places[place] = replace(room, room_bytes=min(room.room_bytes, room_bytes))
        return replace(self, places=tuple(places))

    def shifted(self, more_bytes: int) -> Instance:
        """With so many bytes more in every place, or fewer."""
        places = (replace(room, room_bytes=room.room_bytes + more_bytes) for room in self.places)
        return replace(self, places=tuple(places))


def exceeds(choice: Choice, other: Choice) -> bool:
    """Whether `choice` retains at least as much as `other` of each class across each gap, holds as
    much in each use, prefetches as deep and pins as much."""
    for mine, theirs in zip(choice, other, strict=True):
        if mine.mode.prefetch < theirs.mode.prefetch:
            return False
        if mine.mode.host_bytes < theirs.mode.host_bytes:
            return False
        for table in ("resident", "retained"):
            for here, there in zip(getattr(mine, table), getattr(theirs, table), strict=True):
                if any(a < b for a, b in zip(here, there, strict=True)):
                    return False
        if any(not a and b for a, b in zip(mine.retains, theirs.retains, strict=True)):
            return False
    return True
