"""One component as numbers: what could be resident and retained, what it takes, what it saves.

Its layers fall into classes that are alike in size and in the uses that they run in, so
a choice is a count for each class and not a set of layers:

    resident[use][class]   held during the use, where it runs several times or retains
    retained[use][class]   of those, also held across the gap behind the use
    retains[use]           whether anything is: then the non-layer weights aren't parked either

Its device bytes in one place (a phase at a shape) are then

    used in it    non-layer + the larger of what is held and what came across the gap, each class
                  + window: 1 + prefetch buffers, or fewer where fewer layers are streamed, of the
                  largest streamed layer; layers that run in no use aren't streamed, those that
                  run in another use are, as `LayerwiseOffload` sizes its buffers for both
    in a gap      what is retained across it, and the non-layer weights if anything is

and the copies of a class of n layers in a use of P passes, h of them held and a arriving

    running       n P - h (P - 1) - a
    not running   what is held and didn't arrive
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
class Pins:
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
    pins: Pins = Pins()


@dataclass(frozen=True, slots=True)
class PartChoice:
    """Counts for each use and class, whether each use retains, and the mode. `resident` is 0 in a
    use that holds nothing, which runs once and doesn't retain."""

    resident: tuple[tuple[int, ...], ...]
    retained: tuple[tuple[int, ...], ...]
    retains: tuple[bool, ...]
    mode: Mode


def nothing_retained(part: Part, mode: Mode) -> PartChoice:
    """Everything streamed but what the pins hold.

    Not always the least on the device: to hold the one layer that is far larger than the others
    can take less than a window for it.
    """
    none = (0,) * len(part.classes)
    pins = part.pins
    retains = bool(pins.retains)
    kept = pins.retained or none if retains else none
    held = [
        pins.resident or kept if retains or span.most_passes > 1 else none for span in part.uses
    ]
    uses = len(part.uses)
    return PartChoice(tuple(held), (kept,) * uses, (retains,) * uses, mode)


def allows(part: Part, chosen: PartChoice) -> bool:
    """Whether `chosen` is a choice for `part` at all, and keeps to its pins."""
    pins = part.pins
    if not len(part.uses) == len(chosen.resident) == len(chosen.retained) == len(chosen.retains):
        return False
    for use, span in enumerate(part.uses):
        retains = chosen.retains[use]
        if not len(part.classes) == len(chosen.resident[use]) == len(chosen.retained[use]):
            return False
        if pins.retains is not None and retains != pins.retains:
            return False
        holds = span.most_passes > 1 or retains
        for c, layers in enumerate(part.classes):
            held, kept = chosen.resident[use][c], chosen.retained[use][c]
            if not 0 <= kept <= held <= layers.count:
                return False
            if (kept and not retains) or (held and not holds):
                return False
            if pins.resident is not None and holds and held != pins.resident[c]:
                return False
            if pins.retained is not None and retains and kept != pins.retained[c]:
                return False
    return chosen.mode in part.modes and pins.mode in (None, chosen.mode)


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
    return _count_bytes(part, both) + window_bytes(part, held, chosen.mode)


def window_bytes(part: Part, held: Sequence[int], mode: Mode) -> int:
    streamed = [
        (layers.layer_bytes, layers.count - count)
        for layers, count in zip(part.classes, held, strict=True)
        if any(layers.runs) and count < layers.count
    ]
    buffers = min(1 + mode.prefetch, sum(count for _, count in streamed))
    return buffers * max((layer_bytes for layer_bytes, _ in streamed), default=0)


def held_in_use(chosen: PartChoice, use: int, passes: int) -> tuple[int, ...]:
    """The resident set earns its memory in several passes, or where it is retained."""
    if passes > 1 or chosen.retains[use]:
        return chosen.resident[use]
    return (0,) * len(chosen.resident[use])


def _count_bytes(part: Part, counts: Sequence[int]) -> int:
    return sum(
        layers.layer_bytes * count for layers, count in zip(part.classes, counts, strict=True)
    )


def held_bytes(part: Part, chosen: PartChoice) -> int:
    total = 0
    for use, span in enumerate(part.uses):
        held = held_in_use(chosen, use, span.most_passes)
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
