"""One part in one mode, as columns of a mixed-integer program.

All columns are 0 unless the mode is taken, so all is linear and without big numbers. With m for the
mode's binary, n for a class's layers:

    retains[use] <= m, retained[use][class] <= n retains[use], retained <= resident <= n m
    held       a use's resident set in a place of several passes; where it runs once, the same if
               the use retains, else 0
    arriving   >= held, >= retained[use before]: the larger of both
    full[k]    the largest k sizes are all held: <= full[k - 1], n full[k] <= held of their classes
    largest    size[0] m - sum over k of (size[k - 1] - size[k]) full[k]: the largest streamed layer
    few[q]     no more than q layers are streamed: then the window has a buffer less
    spared[q]  largest if few[q], else 0
    window     (1 + prefetch) largest - sum over q of spared[q]

Seconds are linear in the columns of one mode, so they need no products.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from .columns import Columns, Terms, Unit, added, times
from .instance import LayerClass, Mode, Part, PartChoice, Place


class Block:
    """Bytes are in `unit`."""

    def __init__(self, columns: Columns, unit: Unit, part: Part, mode: Mode) -> None:
        self.unit = unit
        self.part = part
        self.mode = mode
        self.columns = columns
        self.active = columns.add(1, integer=True)
        useful = [
            layers.count if any(layers.runs) or pinned else 0
            for layers, pinned in zip(part.classes, _pinned(part), strict=True)
        ]
        self.retains = [columns.add(1, integer=True) for _ in part.uses]
        self.resident = [[columns.add(n, integer=True) for n in useful] for _ in part.uses]
        self.retained = [[columns.add(n, integer=True) for n in useful] for _ in part.uses]
        self._held: dict[tuple[int, bool], list[int]] = {}
        self._arriving: dict[tuple[int, bool], list[int]] = {}
        self._windows: dict[tuple[int, bool], Terms] = {}
        for use, span in enumerate(part.uses):
            self._relate(use, span.most_passes > 1)

    def _relate(self, use: int, several: bool) -> None:
        columns, pins = self.columns, self.part.pins
        retains = self.retains[use]
        columns.most(retains, 1, self.active)
        if pins.retains is not None:
            columns.row({retains: 1.0, self.active: -float(pins.retains)}, lower=0, upper=0)
        holds = self.active if several else retains
        for c, layers in enumerate(self.part.classes):
            resident, retained = self.resident[use][c], self.retained[use][c]
            columns.most(resident, layers.count, holds)
            columns.most(retained, layers.count, retains)
            columns.most(retained, 1, resident)
            if pins.resident is not None:
                columns.row({resident: 1.0, holds: -float(pins.resident[c])}, lower=0, upper=0)
            if pins.retained is not None:
                columns.row({retained: 1.0, retains: -float(pins.retained[c])}, lower=0, upper=0)

    def held(self, use: int, several: bool) -> list[int]:
        """Layers held in the use, in a place where it has several passes or one."""
        if several or self.part.uses[use].most_passes == 1:
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
        largest = self._largest(held, running)
        count = sum(layers.count for _, layers in running)
        most = max(layers.layer_bytes for _, layers in running)
        total = times(1 + self.mode.prefetch, largest)
        for q in range(1, 1 + self.mode.prefetch):
            spared = columns.add(self.unit.of(most))
            columns.row(added({spared: 1.0}, times(-1, largest)), upper=0)
            if q < count:
                few = columns.add(1, integer=True)
                columns.most(spared, self.unit.of(most), few)
                # streamed = count m - held <= count m - (count - q) few
                columns.row(
                    added({few: float(count - q)}, {held[c]: -1.0 for c, _ in running}), upper=0
                )
            total = added(total, {spared: -1.0})
        return total

    def _largest(self, held: Sequence[int], running: Sequence[tuple[int, LayerClass]]) -> Terms:
        columns = self.columns
        sizes = sorted({layers.layer_bytes for _, layers in running}, reverse=True)
        largest: Terms = {self.active: self.unit.of(sizes[0])}
        before = self.active
        for size, smaller in zip(sizes, [*sizes[1:], 0], strict=True):
            full = columns.add(1, integer=True)
            columns.most(full, 1, before)
            for c, layers in running:
                if layers.layer_bytes == size:
                    columns.row({full: float(layers.count), held[c]: -1.0}, upper=0)
            largest[full] = -self.unit.of(size - smaller)
            before = full
        return largest

    def device_bytes(self, place: Place) -> Terms:
        part = self.part
        for use, span in enumerate(part.uses):
            if place in span.places:
                several = span.passes[span.places.index(place)] > 1
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
            held = self.held(use, passes > 1)
            for c, layers in enumerate(self.part.classes):
                if layers.runs[use]:
                    copies = {self.active: float(layers.count * passes), held[c]: 1.0 - passes}
                else:
                    copies = {self.arriving(use, passes > 1)[c]: 1.0}
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
        for column, value in zip(self.counts(), (v for row in tables for v in row), strict=True):
            yield column, float(value) if mine else 0.0


def seconds_per_byte(part: Part, mode: Mode, use: int) -> float:
    return mode.seconds_per_byte * (part.uses[use].exposure if mode.prefetch else 1.0)


def modes(part: Part) -> list[Mode]:
    """Those that can be best, in the order in which ties are broken.

    One that prefetches no less, pins no less and is no faster than another takes no less in any
    place with the same counts, so it is never chosen.
    """
    found: list[Mode] = []
    for mode in _in_order(part):
        is_open = part.pins.mode in (None, mode)
        if is_open and not any(_covers(part, other, mode) for other in found):
            found.append(mode)
    return found


def mode_rank(part: Part, mode: Mode) -> int:
    """Its position in the order that breaks ties."""
    return _in_order(part).index(mode)


def _in_order(part: Part) -> list[Mode]:
    return sorted(
        part.modes,
        key=lambda mode: (mode.prefetch, mode.host_bytes, mode.seconds_per_byte, mode.pinned),
    )


def _covers(part: Part, mode: Mode, other: Mode) -> bool:
    return (
        mode.prefetch <= other.prefetch
        and mode.host_bytes <= other.host_bytes
        and all(
            seconds_per_byte(part, mode, use) <= seconds_per_byte(part, other, use)
            for use in range(len(part.uses))
        )
    )


def _pinned(part: Part) -> list[bool]:
    pins = [each for each in (part.pins.resident, part.pins.retained) if each is not None]
    return [any(counts[c] for counts in pins) for c in range(len(part.classes))]
