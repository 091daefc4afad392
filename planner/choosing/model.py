"""The choice as numbers: components, what could be resident and retained of each, what it takes and
saves, and the rooms that they share.

Its layers fall into classes that are alike in size and in the uses that they run in, so
a choice is a count for each class and not a set of layers:

    resident[use][class]   held during the use, where it runs several times or retains
    retained[use][class]   of those, also held across the gap behind the use
    retains[use]           whether anything is: then the non-layer weights aren't parked either

Its device bytes in one place (a phase at a shape) are then

    used in it    non-layer + the larger of what is held and what came across the gap, each class
                  + window: 1 + prefetch buffers, or fewer where fewer layers are streamed, of the
                  largest streamed layer; layers that run in no use aren't streamed, those that
                  run in another use are, as layerwise offload sizes its buffers for both
    in a gap      what is retained across it, and the non-layer weights if anything is

and the copies of a class of n layers in a use of P passes, h of them held and a arriving

    running       n P - h (P - 1) - a
    not running   what is held and didn't arrive
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Place = int
"""Index into `Instance.places`."""


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
    """In the same order; at least 1."""
    valued_passes: int
    """In the request whose seconds are counted; at least 1."""
    gap_places: tuple[Place, ...]
    """What the gap to the next use crosses."""
    exposure: float
    """The share of copy time in this use that isn't hidden behind compute: 0 to 1."""

    @property
    def most_passes(self) -> int:
        return max((self.valued_passes, *self.passes))


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
class Fixed:
    """What the user fixed; None is open. Counts are by class, the same in all uses: `resident`
    wherever a set is held, `retained` wherever a use retains."""

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
    fixed: Fixed = Fixed()
    holds_always: bool = False
    """The resident set is held in every use; else where it runs several times or retains."""

    def holds(self, passes: int, *, retains: bool = False) -> bool:
        """Whether a use of so many passes holds its resident set."""
        return passes > 1 or retains or self.holds_always


@dataclass(frozen=True, slots=True)
class PartChoice:
    """Counts for each use and class, whether each use retains, and the mode. `resident` is 0 in a
    use that holds nothing, which runs once and doesn't retain."""

    resident: tuple[tuple[int, ...], ...]
    retained: tuple[tuple[int, ...], ...]
    retains: tuple[bool, ...]
    mode: Mode


def nothing_retained(part: Part, mode: Mode) -> PartChoice:
    """Everything streamed but what is fixed.

    Not always the least on the device: to hold the one layer that is far larger than the others
    can take less than a window for it.
    """
    none = (0,) * len(part.classes)
    fixed = part.fixed
    retains = bool(fixed.retains)
    kept = fixed.retained or none if retains else none
    held = [
        fixed.resident or kept if part.holds(span.most_passes, retains=retains) else none
        for span in part.uses
    ]
    uses = len(part.uses)
    return PartChoice(tuple(held), (kept,) * uses, (retains,) * uses, mode)


def allows(part: Part, chosen: PartChoice) -> bool:
    """Whether `chosen` is a choice for `part` at all, and keeps to what is fixed."""
    fixed = part.fixed
    if not len(part.uses) == len(chosen.resident) == len(chosen.retained) == len(chosen.retains):
        return False
    for use, span in enumerate(part.uses):
        retains = chosen.retains[use]
        if not len(part.classes) == len(chosen.resident[use]) == len(chosen.retained[use]):
            return False
        if fixed.retains is not None and retains != fixed.retains:
            return False
        holds = part.holds(span.most_passes, retains=retains)
        for c, layers in enumerate(part.classes):
            held, kept = chosen.resident[use][c], chosen.retained[use][c]
            if not 0 <= kept <= held <= layers.count:
                return False
            if (kept and not retains) or (held and not holds):
                return False
            if fixed.resident is not None and holds and held != fixed.resident[c]:
                return False
            if fixed.retained is not None and retains and kept != fixed.retained[c]:
                return False
    return chosen.mode in part.modes and fixed.mode in (None, chosen.mode)


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
    held = held_in_use(part, chosen, use, passes)
    arrived = chosen.retained[use - 1]
    both = tuple(max(a, b) for a, b in zip(held, arrived, strict=True))
    return _count_bytes(part, both) + window_bytes(part, held, chosen.mode)


def window_bytes(part: Part, held: Sequence[int], mode: Mode) -> int:
    streamed = [
        (layers.layer_bytes, layers.count - count)
        for layers, count in zip(part.classes, held, strict=True)
        if any(layers.runs) and count < layers.count
    ]
    buffers = min(1 + mode.prefetch, sum(count for _, count in streamed))
    return buffers * max((layer_bytes for layer_bytes, _ in streamed), default=0)


def held_in_use(part: Part, chosen: PartChoice, use: int, passes: int) -> tuple[int, ...]:
    """The resident set earns its memory in several passes, or where it is retained."""
    if part.holds(passes, retains=chosen.retains[use]):
        return chosen.resident[use]
    return (0,) * len(chosen.resident[use])


def _count_bytes(part: Part, counts: Sequence[int]) -> int:
    return sum(
        layers.layer_bytes * count for layers, count in zip(part.classes, counts, strict=True)
    )


def held_bytes(part: Part, chosen: PartChoice) -> int:
    total = 0
    for use, span in enumerate(part.uses):
        held = held_in_use(part, chosen, use, span.most_passes)
        total += _count_bytes(part, held) + _count_bytes(part, chosen.retained[use])
        total += part.non_layer_bytes * chosen.retains[use]
    return total


def copied_bytes(part: Part, chosen: PartChoice, use: int) -> int:
    """Bytes copied for one use of the valued request.

    Layers that are held are copied unless they arrive across the gap before; the others in each
    pass, the first one aside where they arrive.
    """
    passes = part.uses[use].valued_passes
    held = held_in_use(part, chosen, use, passes)
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


@dataclass(frozen=True, slots=True)
class Room:
    """Device bytes that the weights of all components may take together in one place."""

    phase: str
    shape: str
    room_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    place: Place
    short_bytes: int


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

    def shortage(self, choice: Choice) -> Shortage | None:
        """Where `choice` lacks the most; None if it fits every place."""
        worst: Shortage | None = None
        for place, room in enumerate(self.places):
            short = self.device_bytes(choice, place) - room.room_bytes
            if short > 0 and (worst is None or short > worst.short_bytes):
                worst = Shortage(place, short)
        return worst

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
