"""The choice as numbers: what could be resident and retained, what it takes, and what it saves.

A component's layers fall into classes that are alike in size and in the uses that they run in, so
a choice is a count for each class and not a set of layers:

    resident[use][class]   held during the use, where it runs several times or retains
    retained[use][class]   of those, also held across the gap behind the use
    retains[use]           whether anything is: then the non-layer weights aren't parked either

The device bytes of a component in one place (a phase at a shape) are then

    used in it    non-layer + the larger of what is held and what came across the gap, each class
                  + window: (1 + prefetch) times the largest class with a running layer not held
    in a gap      what is retained across it, and the non-layer weights if anything is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Place = int
"""Index into `Instance.places`."""


@dataclass(frozen=True, slots=True)
class Room:
    """Device bytes that the weights of all components may take together in one place."""

    phase: str
    shape: str
    room_bytes: int


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Layers of one group that are interchangeable."""

    group: str
    count: int
    layer_bytes: int
    """On the device, one layer."""
    copy_bytes: int
    """Copied to load one layer."""
    runs: tuple[bool, ...]
    """For each use of the component, whether the layers run in it."""


@dataclass(frozen=True, slots=True)
class UseSpan:
    """One use of a component, and the gap behind it."""

    phase: str
    places: tuple[Place, ...]
    """Where the component is in use: its phase, at each shape."""
    passes: tuple[int, ...]
    """In the same order."""
    valued_passes: int
    """In the request whose seconds are counted."""
    gap_places: tuple[Place, ...]
    """What the gap to the next use crosses."""
    exposure: float
    """The share of copy time in this use that isn't hidden behind compute: 0 to 1."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to stream a component."""

    prefetch: int
    pinned: bool
    seconds_per_byte: float
    """Of its copies, before exposure. With prefetch 0 every copy is exposed."""
    host_bytes: int
    """Charged to the host budget: what pinning takes, 0 for pageable masters."""


@dataclass(frozen=True, slots=True)
class Pins:
    """What the user fixed; None is open. Counts are by class, the same in all uses."""

    resident: tuple[int, ...] | None = None
    retained: tuple[int, ...] | None = None
    retains: bool | None = None
    mode: Mode | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One component. Its uses are in the order of a request; the last gap wraps to the first."""

    component: str
    non_layer_bytes: int
    non_layer_copy_bytes: int
    classes: tuple[LayerClass, ...]
    uses: tuple[UseSpan, ...]
    modes: tuple[Mode, ...]
    pins: Pins = Pins()


@dataclass(frozen=True, slots=True)
class PartChoice:
    """Counts for each use and class, whether each use retains, and the mode."""

    resident: tuple[tuple[int, ...], ...]
    retained: tuple[tuple[int, ...], ...]
    retains: tuple[bool, ...]
    mode: Mode


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

    def device_bytes(self, choice: Choice, place: Place) -> int:
        return sum(
            part_bytes(part, chosen, place) for part, chosen in zip(self.parts, choice, strict=True)
        )

    def held_bytes(self, choice: Choice) -> int:
        """What ties are broken by: bytes held in uses and across gaps, added up."""
        return sum(_held(part, each) for part, each in zip(self.parts, choice, strict=True))

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
        return all(
            self.device_bytes(choice, place) <= room.room_bytes
            for place, room in enumerate(self.places)
        )


def nothing_retained(part: Part, mode: Mode) -> PartChoice:
    """Everything streamed: the least that the part can take on the device."""
    none = tuple((0,) * len(part.classes) for _ in part.uses)
    return PartChoice(none, none, (False,) * len(part.uses), mode)


def allows(part: Part, chosen: PartChoice) -> bool:
    """Whether `chosen` is a choice for `part` at all, and keeps to its pins."""
    pins = part.pins
    for use in range(len(part.uses)):
        for c, layers in enumerate(part.classes):
            held, kept = chosen.resident[use][c], chosen.retained[use][c]
            if not 0 <= kept <= held <= layers.count or (kept and not chosen.retains[use]):
                return False
            if pins.resident is not None and held != pins.resident[c]:
                return False
            if pins.retained is not None and chosen.retains[use] and kept != pins.retained[c]:
                return False
        if pins.retains is not None and chosen.retains[use] != pins.retains:
            return False
    return chosen.mode in part.modes and pins.mode in (None, chosen.mode)


def exceeds(choice: Choice, other: Choice) -> bool:
    """Whether `choice` retains at least as much as `other` of each class across each gap, and
    holds as much in each use."""
    for mine, theirs in zip(choice, other, strict=True):
        for table in ("resident", "retained"):
            for here, there in zip(getattr(mine, table), getattr(theirs, table), strict=True):
                if any(a < b for a, b in zip(here, there, strict=True)):
                    return False
        if any(not a and b for a, b in zip(mine.retains, theirs.retains, strict=True)):
            return False
    return True


def part_bytes(part: Part, chosen: PartChoice, place: Place) -> int:
    """Device bytes of one component's weights in one place."""
    for u, use in enumerate(part.uses):
        if place in use.places:
            passes = use.passes[use.places.index(place)]
            return part.non_layer_bytes + _in_use(part, chosen, u, passes)
    for u, use in enumerate(part.uses):
        if place in use.gap_places and chosen.retains[u]:
            return part.non_layer_bytes + _count_bytes(part, chosen.retained[u])
    return 0


def _in_use(part: Part, chosen: PartChoice, use: int, passes: int) -> int:
    held = held_in_use(chosen, use, passes)
    arrived = chosen.retained[use - 1]
    both = tuple(max(a, b) for a, b in zip(held, arrived, strict=True))
    streamed = [
        layers.layer_bytes
        for layers, count in zip(part.classes, held, strict=True)
        if layers.runs[use] and count < layers.count
    ]
    window = (1 + chosen.mode.prefetch) * max(streamed, default=0)
    return _count_bytes(part, both) + window


def held_in_use(chosen: PartChoice, use: int, passes: int) -> tuple[int, ...]:
    """The resident set earns its memory in several passes, or where it is retained."""
    if passes > 1 or chosen.retains[use]:
        return chosen.resident[use]
    return (0,) * len(chosen.resident[use])


def _count_bytes(part: Part, counts: Sequence[int]) -> int:
    return sum(
        layers.layer_bytes * count for layers, count in zip(part.classes, counts, strict=True)
    )


def _held(part: Part, chosen: PartChoice) -> int:
    total = 0
    for use, span in enumerate(part.uses):
        held = held_in_use(chosen, use, max(span.passes))
        total += _count_bytes(part, held) + _count_bytes(part, chosen.retained[use])
        total += part.non_layer_bytes * chosen.retains[use]
    return total


def copied_bytes(part: Part, chosen: PartChoice, use: int) -> int:
    """Bytes copied for one use of the valued request.

    Layers that are held are copied unless they arrive across the gap before; the others in each
    pass, the first one aside where they arrive.
    """
    passes = part.uses[use].valued_passes
    held = held_in_use(chosen, use, passes)
    total = 0 if chosen.retains[use - 1] else part.non_layer_copy_bytes
    for c, layers in enumerate(part.classes):
        arrived = chosen.retained[use - 1][c]
        loaded = max(held[c] - arrived, 0)
        copies = loaded
        if layers.runs[use]:
            streamed = layers.count - held[c]
            copies += streamed * passes - max(arrived - held[c], 0)
        total += copies * layers.copy_bytes
    return total


def copy_seconds(part: Part, chosen: PartChoice) -> float:
    """Exposed seconds of a request's copies for one component."""
    return sum(
        copied_bytes(part, chosen, use)
        * chosen.mode.seconds_per_byte
        * (span.exposure if chosen.mode.prefetch else 1.0)
        for use, span in enumerate(part.uses)
    )
