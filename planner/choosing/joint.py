"""All ranks as one instance: what is chosen for it is one candidate, and each rank's share of it.

    parts      ranks whose component is alike share a part, and so a choice for it; where layers,
               uses, modes or what is fixed differ, as between the stages of a pipeline or with
               uneven shards, each kind is a part of its own: counts of other layers say nothing
    places     ranks that have the same parts in the same places share these, with the least room;
               others have places of their own, in which only their parts take bytes
    refuted    what one rank has refuted is, whatever there is on ranks with other parts

So a choice fits the joint instance where each rank's share fits that rank's own. That is exact but
for these, which are upper bounds where ranks differ:

    host       all parts together are held to the least budget of a rank, and where pinned bytes
               are charged to the card, to each card; a rank without some of them pins less
    seconds    of the slowest rank for each part; kinds of a component that work at the same time
               are added up
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from ...offload.errors import DeviceError
from .model import Choice, Instance, Mode, Part, PartChoice, Room


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank says before all choose."""

    instance: Instance
    """What is left for it to choose from, on its card as it is now."""
    baseline: Choice
    start: Choice
    """Where the search may begin."""
    is_over: bool
    """Its time is used up."""


@dataclass(frozen=True, slots=True)
class Joint:
    instance: Instance
    tightest: tuple[int, ...]
    """For each of its places, the rank that has the least room there."""
    ranks: tuple[Instance, ...]
    members: tuple[tuple[int, ...], ...]
    """For each rank, where its parts are among those of `instance`."""

    def share(self, choice: Choice, rank: int) -> Choice:
        """What a choice for all is for one rank, in that rank's own modes."""
        return tuple(
            replace(choice[at], mode=part.modes[self._modes(at).index(choice[at].mode)])
            for at, part in zip(self.members[rank], self.ranks[rank].parts, strict=True)
        )

    def together(self, shares: Sequence[Choice]) -> Choice | None:
        """The choice for all that has these shares, one of each rank; None where ranks that share
        a part differ in it."""
        found: dict[int, PartChoice] = {}
        for rank, share in enumerate(shares):
            for at, chosen in self._mapped(share, rank).items():
                if found.setdefault(at, chosen) != chosen:
                    return None
        return tuple(found[at] for at in range(len(self.instance.parts)))

    def at_least(self, share: Choice, rank: int) -> Choice:
        """What all choices are at least as large as whose share for `rank` is as large as this."""
        mapped = self._mapped(share, rank)
        return tuple(
            mapped.get(at) or _nothing(part) for at, part in enumerate(self.instance.parts)
        )

    def _mapped(self, share: Choice, rank: int) -> dict[int, PartChoice]:
        return {
            at: replace(chosen, mode=self._modes(at)[part.modes.index(chosen.mode)])
            for at, part, chosen in zip(
                self.members[rank], self.ranks[rank].parts, share, strict=True
            )
        }

    def _modes(self, at: int) -> tuple[Mode, ...]:
        return self.instance.parts[at].modes


def joined(ranks: Sequence[Instance]) -> Joint:
    """The host budget of each instance is that rank's own, and not its node's."""
    kinds: dict[Hashable, int] = {}
    members = tuple(
        tuple(kinds.setdefault(_kind(part), len(kinds)) for part in rank.parts) for rank in ranks
    )
    rooms, tightest, starts = _places(ranks, members)
    parts = [
        _part(
            [
                (part, starts.get(number))
                for number, rank in enumerate(ranks)
                for mine, part in zip(members[number], rank.parts, strict=True)
                if mine == at
            ]
        )
        for at in range(len(kinds))
    ]
    budgets = [rank.host_budget_bytes for rank in ranks if rank.host_budget_bytes is not None]
    instance = Instance(
        rooms,
        tuple(parts),
        min(budgets, default=None),
        max(rank.fixed_seconds for rank in ranks),
        pinned_on_card=any(rank.pinned_on_card for rank in ranks),
    )
    joint = Joint(instance, tightest, tuple(ranks), members)
    refuted = (
        joint.at_least(choice, number)
        for number, rank in enumerate(ranks)
        for choice in rank.refuted
    )
    return replace(joint, instance=replace(instance, refuted=tuple(dict.fromkeys(refuted))))


def check_cards(cards: Sequence[str]) -> None:
    """`cards` are the UUIDs of each rank's card. Raises DeviceError where two are the same: neither
    rank sees what the other takes at its peak, so no room that one reads is its own."""
    for card, count in Counter(cards).items():
        if count > 1:
            sharing = [str(rank) for rank, each in enumerate(cards) if each == card]
            raise DeviceError(
                f"ranks {' and '.join(sharing)} are on one card, {card}",
                hint="give each rank a card of its own, or plan them apart and one after the other",
            )


def _places(
    ranks: Sequence[Instance], members: Sequence[tuple[int, ...]]
) -> tuple[tuple[Room, ...], tuple[int, ...], dict[int, int]]:
    """Rooms, the rank that each is of, and where those begin that the first of alike ranks has."""
    alike: dict[Hashable, list[int]] = {}
    for number, rank in enumerate(ranks):
        spans = tuple(
            (use.places, use.passes, use.gap_places) for part in rank.parts for use in part.uses
        )
        names = tuple((room.phase, room.shape) for room in rank.places)
        alike.setdefault((members[number], names, spans), []).append(number)
    rooms: list[Room] = []
    tightest: list[int] = []
    starts: dict[int, int] = {}
    for group in alike.values():
        starts[group[0]] = len(rooms)
        for choices in zip(*(ranks[number].places for number in group), strict=True):
            room, number = min(
                zip(choices, group, strict=True), key=lambda each: each[0].room_bytes
            )
            rooms.append(room)
            tightest.append(number)
    return tuple(rooms), tuple(tightest), starts


def _part(having: Sequence[tuple[Part, int | None]]) -> Part:
    """The part that ranks share. `having` is each rank's, and where its places begin if it is the
    first of those that share them."""
    parts = [part for part, _ in having]
    placed = [(part, start) for part, start in having if start is not None]
    first = parts[0]
    uses = tuple(
        replace(
            use,
            places=tuple(start + p for part, start in placed for p in part.uses[u].places),
            passes=tuple(passes for part, _ in placed for passes in part.uses[u].passes),
            gap_places=tuple(start + p for part, start in placed for p in part.uses[u].gap_places),
            exposure=max(part.uses[u].exposure for part in parts),
        )
        for u, use in enumerate(first.uses)
    )
    modes = tuple(
        replace(mode, seconds_per_byte=max(part.modes[m].seconds_per_byte for part in parts))
        for m, mode in enumerate(first.modes)
    )
    fixed = first.fixed
    if fixed.mode in first.modes:
        fixed = replace(fixed, mode=modes[first.modes.index(fixed.mode)])
    return replace(first, uses=uses, modes=modes, fixed=fixed)


def _kind(part: Part) -> Hashable:
    """What ranks have to have alike for one choice to mean the same on all of them."""
    return (
        part.component,
        part.non_layer_bytes,
        part.non_layer_copy_bytes,
        part.classes,
        tuple((use.phase, use.valued_passes, use.most_passes > 1) for use in part.uses),
        part.holds_always,
        tuple(map(_mode, part.modes)),
        replace(part.fixed, mode=None),
        None if part.fixed.mode is None else _mode(part.fixed.mode),
    )


def _mode(mode: Mode) -> Hashable:
    return mode.prefetch, mode.pinned, mode.host_bytes


def _nothing(part: Part) -> PartChoice:
    """What every choice for `part` is at least as large as."""
    none = ((0,) * len(part.classes),) * len(part.uses)
    return PartChoice(none, none, (False,) * len(part.uses), Mode(0, False, 0.0, 0))
