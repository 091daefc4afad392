"""The choice as a mixed-integer program: the blocks of all parts, joined, and HiGHS.

modes      each part takes one
places     what the parts take, and what is pinned where the card is charged for it, <= room;
           places with the same sum keep the least room
host       what the modes pin <= budget
refuted    something is below what was refuted: below[entry] for a count

Ties are broken in the end by a fixed order: `Order`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import highspy
import numpy as np
import numpy.typing as npt

from .block import Block, Columns, Terms, Unit, added, mode_rank, modes, times
from .model import Choice, Instance, Part, PartChoice, Place, copy_seconds, nothing_retained

SHARE = 1e-4
"""Of the seconds of a request's copies with everything streamed: the most that the order weighs."""
MODE_WEIGHT = 101
PRIMES = (17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
"""Weights of counts by their position, so that sums are rarely the same."""


class Order:
    """A penalty in seconds for each layer that is held or retained, each use that retains, and each
    step down in the order of a component's modes."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.streamed_s = sum(map(streamed_seconds, instance.parts)) or 1.0
        most = sum(
            sum(weight * most for weight, most in zip(weights, _most(part), strict=True))
            + MODE_WEIGHT * len(part.modes)
            for part, weights in zip(instance.parts, self.weights(), strict=True)
        )
        self.unit_s = SHARE * self.streamed_s / max(most, 1)

    def weights(self) -> Iterator[tuple[int, ...]]:
        """For each part, of its counts in the order of `counts`."""
        at = 0
        for part in self.instance.parts:
            size = len(_most(part))
            yield tuple(PRIMES[i % len(PRIMES)] for i in range(at, at + size))
            at += size


def streamed_seconds(part: Part) -> float:
    """Of a request's copies, in the slowest mode."""
    return max(copy_seconds(part, nothing_retained(part, mode)) for mode in part.modes)


def _most(part: Part) -> list[int]:
    layers = [each.count for each in part.classes]
    uses = len(part.uses)
    return [1] * uses + layers * (2 * uses)


TOLERANCE = 1e-9
"""Of HiGHS, for columns and rows whose numbers are about a thousand."""
FINE = 1e-8
"""How exact seconds are minimised: of 1000 for a request that streams everything."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The best found, if any; `bound` is no more than the objective of any choice."""

    choice: Choice | None
    bound: float
    optimal: bool
    is_done: bool
    """Whether the search came to its end."""
    infeasible: bool


class Program:
    """With `elastic`, rooms may be exceeded by `shortage`, and nothing is refuted. With `slack`, by
    that share of them. `is_slippery` once too much was found that does."""

    def __init__(self, instance: Instance, *, elastic: bool = False, slack: float = 0.0) -> None:
        self.instance = instance
        self.slack = slack
        self.is_slippery = False
        self.columns = Columns()
        self.bytes = Unit(_sizes(instance))
        self.ties = Order(instance)
        self.per_second = 1000 / self.ties.streamed_s
        self.hosts = Unit(mode.host_bytes for part in instance.parts for mode in part.modes)
        self.parts = [
            [
                Block(self.columns, self.bytes, part, mode)
                for mode in modes(part, refuted=bool(instance.refuted))
            ]
            for part in instance.parts
        ]
        for blocks in self.parts:
            self.columns.row({block.active: 1.0 for block in blocks}, lower=1, upper=1)
        self.shortage: Terms = {}
        if elastic:
            self.shortage = {self.columns.add(float("inf")): 1.0}
        else:
            for choice in instance.refuted:
                self._refute(choice)
        self._limit_rooms()
        if instance.host_budget_bytes is not None:
            self.columns.row(self.host_bytes(), upper=self.hosts.limit(instance.host_budget_bytes))
        self._highs: highspy.Highs | None = None
        self._ended: npt.NDArray[np.float64] | None = None

    @property
    def blocks(self) -> Iterator[Block]:
        return (block for blocks in self.parts for block in blocks)

    def _limit_rooms(self) -> None:
        least: dict[tuple[tuple[int, float], ...], float] = {}
        for place, room in enumerate(self.instance.places):
            terms = added(*(self._taken(block, place) for block in self.blocks))
            terms = added(terms, times(-1, self.shortage))
            upper = self.bytes.limit(room.room_bytes, slack=self.slack)
            if self.shortage:
                upper = self.bytes.of(room.room_bytes)
            key = tuple(terms.items())
            least[key] = min(least.get(key, upper), upper)
        for key, upper in least.items():
            self.columns.row(dict(key), upper=upper)

    def _taken(self, block: Block, place: Place) -> Terms:
        taken = block.device_bytes(place)
        if self.instance.pinned_on_card:
            taken = added(taken, {block.active: self.bytes.of(block.mode.host_bytes)})
        return taken

    def _refute(self, choice: Choice) -> None:
        below: Terms = {}
        certain = 0
        for blocks, chosen in zip(self.parts, choice, strict=True):
            for block in blocks:
                if (
                    block.mode.prefetch < chosen.mode.prefetch
                    or block.mode.host_bytes < chosen.mode.host_bytes
                ):
                    below[block.active] = 1.0
            for use, retains in enumerate(chosen.retains):
                if retains:
                    certain += 1
                    below = added(below, {block.retains[use]: -1.0 for block in blocks})
                for c, layers in enumerate(blocks[0].part.classes):
                    for table, count in (
                        ([block.resident[use][c] for block in blocks], chosen.resident[use][c]),
                        ([block.retained[use][c] for block in blocks], chosen.retained[use][c]),
                    ):
                        if count:
                            column = self.columns.add(1, integer=True)
                            below[column] = 1.0
                            self.columns.row(
                                {column: layers.count - count + 1.0} | dict.fromkeys(table, 1.0),
                                upper=layers.count,
                            )
        self.columns.row(below, lower=1 - certain)

    def seconds(self) -> Terms:
        """Besides the fixed ones, times `per_second`."""
        return times(self.per_second, added(*(block.seconds() for block in self.blocks)))

    def held_bytes(self) -> Terms:
        return added(*(block.held_bytes() for block in self.blocks))

    def host_bytes(self) -> Terms:
        return {block.active: self.hosts.of(block.mode.host_bytes) for block in self.blocks}

    def order(self) -> Terms:
        """What ties are broken by in the end, in the unit of `seconds`."""
        terms: Terms = {}
        for blocks, weights in zip(self.parts, self.ties.weights(), strict=True):
            for block in blocks:
                terms[block.active] = float(MODE_WEIGHT * mode_rank(block.part, block.mode))
                for column, weight in zip(block.counts(), weights, strict=True):
                    terms[column] = float(weight)
        return times(self.ties.unit_s * self.per_second, terms)

    def limit(self, terms: Terms, upper: float) -> None:
        self.columns.row(terms, upper=upper)
        if self._highs is not None:
            self._highs.addRow(-highspy.kHighsInf, upper, *_entries(terms))

    def minimise(
        self,
        objective: Terms,
        *,
        within: float,
        deadline: float,
        start: Choice | None = None,
    ) -> Answer:
        """`within` is how far from the least `Answer.choice` may be; HiGHS begins from `start`, or
        else from where it ended. `deadline` is a time of `time.perf_counter`."""
        highs = self._highs = self._highs or self._passed()
        count = len(self.columns.upper)
        cost = np.zeros(count)
        for column, factor in objective.items():
            cost[column] = factor
        highs.changeColsCost(count, np.arange(count, dtype=np.int32), cost)
        highs.setOptionValue("mip_abs_gap", within)
        highs.setOptionValue("time_limit", max(deadline - time.perf_counter(), 0.0))
        if start is not None:
            highs.setSolution(*_entries(dict(self._written(start))))
        elif self._ended is not None:
            highs.setSolution(count, np.arange(count, dtype=np.int32), self._ended)
        answer = self._run(highs, cost, within)
        if not answer.optimal and answer.is_done:
            # HiGHS can return what it began from though it found better, but not without a start.
            highs.clearSolver()
            again = self._run(highs, cost, within)
            answer = again if again.choice is not None else answer
        return answer

    def _run(self, highs: highspy.Highs, cost: npt.NDArray[np.float64], within: float) -> Answer:
        highs.run()
        info, status = highs.getInfo(), highs.getModelStatus()
        is_done = status == highspy.HighsModelStatus.kOptimal
        found, value = None, math.inf
        if info.primal_solution_status == int(highspy.SolutionStatus.kSolutionStatusFeasible):
            values = np.array(highs.getSolution().col_value)
            found, value = self._read(values), float(cost @ values)
            self._ended = values
        near = max(within, TOLERANCE * abs(value))
        return Answer(
            found,
            info.mip_dual_bound,
            is_done and value <= info.mip_dual_bound + 2 * near,
            is_done,
            status == highspy.HighsModelStatus.kInfeasible,
        )

    def exclude(self, choice: Choice, place: Place) -> None:
        """Exclude all that is the same as `choice` in a place, where it doesn't fit."""
        differs: Terms = {}
        for blocks, chosen in zip(self.parts, choice, strict=True):
            uses = blocks[0].part.uses
            if self.instance.pinned_on_card or any(place in span.places for span in uses):
                others = (block.active for block in blocks if block.mode != chosen.mode)
                differs |= dict.fromkeys(others, 1.0)
            for use, span in enumerate(uses):
                if place not in span.places and place not in span.gap_places:
                    continue
                tables = [("retains", use), ("retained", use)]
                if place in span.places:
                    tables += [("resident", use), ("retained", use - 1)]
                for name, at in dict.fromkeys(tables):
                    differs |= self._differs(blocks, chosen, name, at)
        self.columns.row(differs, lower=1)
        self._highs = self._ended = None  # columns were added

    def _differs(self, blocks: list[Block], chosen: PartChoice, name: str, use: int) -> Terms:
        """Columns that can be 1 where a count of a table is less, or is more, than chosen."""
        values = getattr(chosen, name)[use]
        rows = [getattr(block, name)[use] for block in blocks]
        if name == "retains":
            values, rows = (int(values),), [[row] for row in rows]
        found: Terms = {}
        for c, value in enumerate(values):
            counts = dict.fromkeys((row[c] for row in rows), 1.0)
            most = 1 if name == "retains" else blocks[0].part.classes[c].count
            if value > 0:
                less = self.columns.add(1, integer=True)
                self.columns.row({less: most - value + 1.0} | counts, upper=most)
                found[less] = 1.0
            if value < most:
                more = self.columns.add(1, integer=True)
                self.columns.row({more: -value - 1.0} | counts, lower=0)
                found[more] = 1.0
        return found

    def _passed(self) -> highspy.Highs:
        highs = _Silent()
        for option, value in _OPTIONS.items():
            highs.setOptionValue(option, value)
        columns = self.columns
        count, rows = len(columns.upper), columns.rows
        sparse = [_entries(terms) for terms, _, _ in rows]
        starts = np.cumsum([0, *(entries for entries, _, _ in sparse)])
        highs.passModel(
            count,
            len(rows),
            int(starts[-1]),
            int(highspy.MatrixFormat.kRowwise),
            int(highspy.ObjSense.kMinimize),
            0.0,
            np.zeros(count),
            np.array(columns.lower),
            np.array(columns.upper),
            np.array([lower for _, lower, _ in rows]),
            np.array([upper for _, _, upper in rows]),
            starts[:-1].astype(np.int32),
            np.concatenate([index for _, index, _ in sparse]),
            np.concatenate([factors for _, _, factors in sparse]),
            np.array(columns.integer, dtype=np.int32),
        )
        return highs

    def _read(self, values: npt.NDArray[np.float64]) -> Choice:
        return tuple(
            max(blocks, key=lambda block: values[block.active]).read(values)
            for blocks in self.parts
        )

    def _written(self, choice: Choice) -> Iterator[tuple[int, float]]:
        for blocks, chosen in zip(self.parts, choice, strict=True):
            for block in blocks:
                yield from block.write(chosen)


class _Silent(highspy.Highs):
    """Without the banner that HiGHS prints to stdout when callbacks are enabled."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


_OPTIONS: dict[str, bool | int | float | str] = {
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    # With it, HiGHS 1.16 calls some of these programs infeasible that have solutions.
    "presolve": "off",
    "mip_rel_gap": 0.0,
    "mip_feasibility_tolerance": TOLERANCE,
    "primal_feasibility_tolerance": TOLERANCE,
    "dual_feasibility_tolerance": TOLERANCE,
}


def _entries(
    terms: Terms,
) -> tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    index = np.array([*terms], dtype=np.int32)
    return len(index), index, np.array([*terms.values()], dtype=np.float64)


def _sizes(instance: Instance) -> Iterator[int]:
    for part in instance.parts:
        yield part.non_layer_bytes
        yield from (layers.layer_bytes for layers in part.classes)
        if instance.pinned_on_card:
            yield from (mode.host_bytes for mode in part.modes)
