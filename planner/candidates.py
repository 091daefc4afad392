"""Candidates: which uses retain, what each costs in every phase, and the best first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..phases.headroom import Headroom
from ..phases.shape import Shape
from ..phases.use import ComponentUse

Place = tuple[str, Shape]
"""A phase at a shape."""


@dataclass(frozen=True, slots=True)
class Option:
    """One use that could retain."""

    use: ComponentUse
    retained_bytes: int
    saved_bytes: int
    """Copied less in a request."""
    demands: Mapping[Place, int]
    """Device bytes more than the baseline's, wherever the set stands."""


@dataclass(frozen=True, slots=True)
class Candidate:
    options: tuple[Option, ...]

    @property
    def saved_bytes(self) -> int:
        return sum(option.saved_bytes for option in self.options)

    @property
    def components(self) -> tuple[str, ...]:
        return tuple(option.use.component for option in self.options)

    def demand_bytes(self, place: Place) -> int:
        return sum(option.demands.get(place, 0) for option in self.options)

    def retains(self, use: ComponentUse) -> bool:
        return any(option.use == use for option in self.options)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Where a candidate lacks the most."""

    place: Place
    short_bytes: int


@dataclass(slots=True)
class Limits:
    """What the phases have room for: their headroom, and what refutations have taught.

    `refuted` are demands that were tried in a place and refuted there: whatever demands as much in
    that place is excluded. `excluded` are sets of uses that were refuted without a place.
    """

    headrooms: Sequence[Headroom]
    refuted: dict[Place, int] = field(default_factory=dict)
    excluded: list[frozenset[ComponentUse]] = field(default_factory=list)

    def shortage(self, candidate: Candidate) -> Shortage | None:
        """None if the model says that the candidate fits."""
        worst: Shortage | None = None
        for headroom in self.headrooms:
            place = (headroom.phase, headroom.shape)
            demand = candidate.demand_bytes(place)
            short = demand - headroom.headroom_bytes
            if demand and short > 0 and (worst is None or short > worst.short_bytes):
                worst = Shortage(place, short)
        return worst

    def missing_bytes(self, candidate: Candidate, place: Place) -> int:
        """What `candidate` needs in a place beyond what the card has, the margin aside."""
        for headroom in self.headrooms:
            if (headroom.phase, headroom.shape) == place:
                room = headroom.headroom_bytes + headroom.margin_bytes
                return max(candidate.demand_bytes(place) - room, 0)
        return 0

    def is_refuted(self, candidate: Candidate) -> bool:
        uses = {option.use for option in candidate.options}
        return any(excluded <= uses for excluded in self.excluded) or any(
            candidate.demand_bytes(place) >= demand for place, demand in self.refuted.items()
        )

    def refute(self, candidate: Candidate, place: Place | None) -> None:
        """Exclude `candidate` and all that is at least as large where it failed."""
        demand = candidate.demand_bytes(place) if place is not None else 0
        if place is not None and demand:
            known = self.refuted.get(place)
            self.refuted[place] = demand if known is None else min(known, demand)
        else:
            self.excluded.append(frozenset(option.use for option in candidate.options))


def candidates(options: Iterable[Option]) -> Iterator[Candidate]:
    """Every non-empty set of options, those that save more first; ties by fewer bytes, then in the
    order of the request."""
    ordered = sorted(options, key=lambda option: -option.saved_bytes)
    # The sets that leave out the least come first: grow what is left out from the smallest up.
    queue: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
    last = len(ordered) - 1
    while queue:
        _, _, left_out = heapq.heappop(queue)
        kept = tuple(option for i, option in enumerate(ordered) if i not in left_out)
        if kept:
            yield Candidate(kept)
        lowest = last if not left_out else left_out[-1] - 1
        for replaced in (False, True):
            if replaced and not left_out:
                continue
            base = left_out[:-1] if replaced else left_out
            if lowest < 0:
                continue
            grown = (*base, lowest)
            cost = sum(ordered[i].saved_bytes for i in grown)
            size = -sum(ordered[i].retained_bytes for i in grown)
            heapq.heappush(queue, (cost, size, grown))
