"""One part in one mode, as columns of a mixed-integer program.

All columns are 0 unless the mode is taken, so all is linear and without big numbers. With m for the
mode's binary, n for a class's layers:

    retains[use] <= m, retained[use][class] <= n retains[use], retained <= resident <= n m
    held       a use's resident set in a place of several passes; where it runs once, the same if
               the use retains, else 0
    arriving   >= held, >= retained[use before]: the larger of both
    full[k]    the largest k sizes are all held: <= full[k - 1], n full[k] <= held of their classes
    largest    size[0] m - sum over k of (size[k - 1] - size[k]) full[k]: the largest streamed layer
    few        no more layers are streamed than the window has buffers, which is b
    window     >= b (largest - size[0] few)
               >= size[k] (streamed - b full[k + 1] - (layers - b) (m - few)) for each k

Seconds are linear in the columns of one mode, so they need no products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import highspy
import numpy as np
import numpy.typing as npt

from .model import Mode, Part, PartChoice, Place

Terms = dict[int, float]
"""A linear expression: factors by column."""

INFINITY = highspy.kHighsInf


class Unit:
    """A measure in which amounts are exact floats, the largest of them about a thousand."""

    def __init__(self, amounts: Iterable[int]) -> None:
        found = [abs(amount) for amount in amounts if amount]
        self.step = math.gcd(*found) if found else 1
        """What all amounts are multiples of."""
        bits = (max(found, default=1) // self.step).bit_length()
        self.size = self.step << max(bits - 10, 0)

    @property
    def half_step(self) -> float:
        return self.step / (2 * self.size)

    def of(self, amount: int) -> float:
        return amount / self.size

    def limit(self, amount: int, *, slack: float = 0.0) -> float:
        """Between the largest sum that `amount` admits and the next, or more by `slack` of it."""
        least = (amount // self.step * self.step) / self.size
        return least + max(self.half_step, slack * abs(least))


class Columns:
    """Columns and rows, as HiGHS takes them."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.lower: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[tuple[Terms, float, float]] = []

    def add(self, upper: float, *, lower: float = 0.0, integer: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.upper) - 1

    def row(self, terms: Terms, *, lower: float = -INFINITY, upper: float = INFINITY) -> None:
        self.rows.append((terms, lower, upper))

    def most(self, column: int, times: float, other: int) -> None:
        """column <= times * other."""
        self.row({column: 1.0, other: -times}, upper=0.0)


def added(*expressions: Terms) -> Terms:
    total: Terms = {}
    for terms in expressions:
        for column, factor in terms.items():
            total[column] = total.get(column, 0.0) + factor
    return total


def times(factor: float, terms: Terms) -> Terms:
    return {column: factor * each for column, each in terms.items()}


class Block:
    """Bytes are in `unit`."""

    def __init__(self, columns: Columns, unit: Unit, part: Part, mode: Mode) -> None:
        self.unit = unit
        self.part = part
        self.mode = mode
        self.columns = columns
        self.active = columns.add(1, integer=True)
        useful = [
            layers.count if any(layers.runs) or fixed else 0
            for layers, fixed in zip(part.classes, _fixed(part), strict=True)
        ]
        self.retains = [columns.add(1, integer=True) for _ in part.uses]
        self.resident = [[columns.add(n, integer=True) for n in useful] for _ in part.uses]
        self.retained = [[columns.add(n, integer=True) for n in useful] for _ in part.uses]
        self._held: dict[tuple[int, bool], list[int]] = {}
        self._arriving: dict[tuple[int, bool], list[int]] = {}
        self._windows: dict[tuple[int, bool], Terms] = {}
        for use, span in enumerate(part.uses):
            self._relate(use, part.holds(span.most_passes))

    def _relate(self, use: int, several: bool) -> None:
        columns, fixed = self.columns, self.part.fixed
        retains = self.retains[use]
        columns.most(retains, 1, self.active)
        if fixed.retains is not None:
            columns.row({retains: 1.0, self.active: -float(fixed.retains)}, lower=0, upper=0)
        holds = self.active if several else retains
        for c, layers in enumerate(self.part.classes):
            resident, retained = self.resident[use][c], self.retained[use][c]
            columns.most(resident, layers.count, holds)
            columns.most(retained, layers.count, retains)
            columns.most(retained, 1, resident)
            if fixed.resident is not None:
                columns.row({resident: 1.0, holds: -float(fixed.resident[c])}, lower=0, upper=0)
            if fixed.retained is not None:
                columns.row({retained: 1.0, retains: -float(fixed.retained[c])}, lower=0, upper=0)

    def held(self, use: int, several: bool) -> list[int]:
        """Layers held in the use, in a place where it has several passes or one."""
        if several or not self.part.holds(self.part.uses[use].most_passes):
            return self.resident[use]
        if (use, several) not in self._held:
            self._held[use, several] = [
                self._if_retained(use, c) for c in range(len(self.part.classes))
            ]
        return self._held[use, several]

    def _if_retained(self, use: int, c: int) -> int:
        columns, count = self.columns, self.part.classes[c].count
        resident, retains = self.resident[use][c], self.retains[use]
        held = columns.add(count)
        columns.most(held, 1, resident)
        columns.most(held, count, retains)
        columns.row(
            {held: 1.0, resident: -1.0, self.active: float(count), retains: -float(count)}, lower=0
        )
        return held

    def arriving(self, use: int, several: bool) -> list[int]:
        """The larger of what is held and what came across the gap, or more."""
        held = self.held(use, several)
        if len(self.part.uses) == 1:
            return held  # what came is part of it
        if (use, several) not in self._arriving:
            both = []
            for c, layers in enumerate(self.part.classes):
                column = self.columns.add(layers.count)
                self.columns.most(held[c], 1, column)
                self.columns.most(self.retained[use - 1][c], 1, column)
                both.append(column)
            self._arriving[use, several] = both
        return self._arriving[use, several]

    def window(self, use: int, several: bool) -> Terms:
        if (use, several) not in self._windows:
            self._windows[use, several] = self._window(self.held(use, several))
        return self._windows[use, several]

    def _window(self, held: Sequence[int]) -> Terms:
        columns = self.columns
        running = [(c, layers) for c, layers in enumerate(self.part.classes) if any(layers.runs)]
        if not running:
            return {}
        sizes = sorted({layers.layer_bytes for _, layers in running}, reverse=True)
        count = sum(layers.count for _, layers in running)
        buffers = min(1 + self.mode.prefetch, count)
        window = columns.add(self.unit.of(buffers * sizes[0]))
        few = columns.add(1, integer=True) if buffers < count else self.active
        columns.most(few, 1, self.active)
        streamed: Terms = {self.active: float(count)} | {held[c]: -1.0 for c, _ in running}
        largest: Terms = {self.active: self.unit.of(sizes[0])}
        before = self.active
        for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
            full: Terms = {}
            if smaller:
                column = columns.add(1, integer=True)
                columns.most(column, 1, before)
                for c, layers in running:
                    if layers.layer_bytes == size:
                        columns.row({column: float(layers.count), held[c]: -1.0}, upper=0)
                largest[column] = -self.unit.of(size - smaller)
                full, before = {column: 1.0}, column
            if_few = added(streamed, times(-buffers, full))
            many: Terms = added({self.active: 1.0}, {few: -1.0})
            bound = added(if_few, times(buffers - count, many))
            columns.row(added({window: 1.0}, times(-self.unit.of(size), bound)), lower=0)
        if few != self.active:
            # The largest is no less than this if `few`, and no more than sizes[0].
            if_many = added(largest, {few: -self.unit.of(sizes[0])})
            columns.row(added({window: 1.0}, times(-buffers, if_many)), lower=0)
            # Not needed, but tight: where all layers together are too large, `few` can't be.
            total = sum(layers.count * layers.layer_bytes for _, layers in running)
            layers_held = {held[c]: self.unit.of(layers.layer_bytes) for c, layers in running}
            columns.row(added({window: 1.0, few: -self.unit.of(total)}, layers_held), lower=0)
        return {window: 1.0}

    def device_bytes(self, place: Place) -> Terms:
        part = self.part
        for use, span in enumerate(part.uses):
            if place in span.places:
                several = part.holds(span.passes[span.places.index(place)])
                return added(
                    {self.active: self.unit.of(part.non_layer_bytes)},
                    self._layer_bytes(self.arriving(use, several)),
                    self.window(use, several),
                )
        for use, span in enumerate(part.uses):
            if place in span.gap_places:
                return added(
                    {self.retains[use]: self.unit.of(part.non_layer_bytes)},
                    self._layer_bytes(self.retained[use]),
                )
        return {}

    def _layer_bytes(self, counts: Iterable[int]) -> Terms:
        return {
            column: self.unit.of(layers.layer_bytes)
            for column, layers in zip(counts, self.part.classes, strict=True)
        }

    def held_bytes(self) -> Terms:
        part = self.part
        total: Terms = {}
        for use in range(len(part.uses)):
            total = added(
                total,
                self._layer_bytes(self.resident[use]),
                self._layer_bytes(self.retained[use]),
                {self.retains[use]: self.unit.of(part.non_layer_bytes)},
            )
        return total

    def seconds(self) -> Terms:
        total: Terms = {}
        for use, span in enumerate(self.part.uses):
            copied: Terms = {
                self.active: float(self.part.non_layer_copy_bytes),
                self.retains[use - 1]: -float(self.part.non_layer_copy_bytes),
            }
            passes = span.valued_passes
            several = self.part.holds(passes)
            held = self.held(use, several)
            for c, layers in enumerate(self.part.classes):
                if layers.runs[use]:
                    copies = {self.active: float(layers.count * passes), held[c]: 1.0 - passes}
                else:
                    copies = {self.arriving(use, several)[c]: 1.0}
                copies = added(copies, {self.retained[use - 1][c]: -1.0})
                copied = added(copied, times(layers.copy_bytes, copies))
            total = added(total, times(seconds_per_byte(self.part, self.mode, use), copied))
        return total

    def counts(self) -> Iterable[int]:
        """The columns that say what is chosen, in the order in which ties are broken."""
        yield from self.retains
        for table in (self.resident, self.retained):
            for row in table:
                yield from row

    def read(self, values: npt.NDArray[np.float64]) -> PartChoice:
        return PartChoice(
            tuple(tuple(round(values[each]) for each in row) for row in self.resident),
            tuple(tuple(round(values[each]) for each in row) for row in self.retained),
            tuple(round(values[each]) == 1 for each in self.retains),
            self.mode,
        )

    def write(self, chosen: PartChoice) -> Iterable[tuple[int, float]]:
        """Values of the columns that say what is chosen."""
        mine = chosen.mode == self.mode
        yield self.active, float(mine)
        tables = (chosen.retains, *chosen.resident, *chosen.retained)
        values = (value for row in tables for value in row)
        for column, value in zip(self.counts(), values, strict=True):
            yield column, float(value) if mine else 0.0


def seconds_per_byte(part: Part, mode: Mode, use: int) -> float:
    return mode.seconds_per_byte * (part.uses[use].exposure if mode.prefetch else 1.0)


def modes(part: Part, *, refuted: bool = False) -> list[Mode]:
    """Those that can be best, in the order in which ties are broken.

    One that prefetches no less, pins no less and is no faster than another takes no less in any
    place with the same counts, so it is never chosen. Where no layer streams the depth of the
    prefetch is no matter, unless choices were refuted, which tells them apart by it.
    """
    found: list[Mode] = []
    for mode in _in_order(part):
        is_open = part.fixed.mode in (None, mode)
        better = (other for other in found if _covers(part, other, mode))
        if is_open and not any(not refuted or o.prefetch <= mode.prefetch for o in better):
            found.append(mode)
    return found


def mode_rank(part: Part, mode: Mode) -> int:
    """Its position in the order that breaks ties."""
    return _in_order(part).index(mode)


def _in_order(part: Part) -> list[Mode]:
    return sorted(part.modes, key=lambda mode: (*_costs(part, mode), mode.prefetch, mode.pinned))


def _covers(part: Part, mode: Mode, other: Mode) -> bool:
    depth, host, _, *seconds = _costs(part, mode)
    other_depth, other_host, _, *other_seconds = _costs(part, other)
    is_fast = all(a <= b for a, b in zip(seconds, other_seconds, strict=True))
    return depth <= other_depth and host <= other_host and is_fast


def _costs(part: Part, mode: Mode) -> tuple[float, ...]:
    """The window's depth where there is one, what is pinned, and seconds for a byte: added up over
    the uses, and of each."""
    streams = any(any(layers.runs) for layers in part.classes)
    seconds = [seconds_per_byte(part, mode, use) for use in range(len(part.uses))]
    return (mode.prefetch if streams else 0), mode.host_bytes, sum(seconds), *seconds


def _fixed(part: Part) -> list[bool]:
    fixed = [each for each in (part.fixed.resident, part.fixed.retained) if each is not None]
    return [any(counts[c] for counts in fixed) for c in range(len(part.classes))]
