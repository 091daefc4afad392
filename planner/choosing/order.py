"""The order in which ties are broken in the end: the same every time."""

from __future__ import annotations

from collections.abc import Iterator

from .block import mode_rank
from .instance import Choice, Instance
from .part import Part, PartChoice, copy_seconds, nothing_retained

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

    def penalty_s(self, choice: Choice) -> float:
        total = 0
        for part, chosen, weights in zip(self.instance.parts, choice, self.weights(), strict=True):
            total += MODE_WEIGHT * mode_rank(part, chosen.mode)
            total += sum(w * count for w, count in zip(weights, counts(chosen), strict=True))
        return total * self.unit_s


def counts(chosen: PartChoice) -> tuple[int, ...]:
    """What is chosen besides the mode: whether uses retain, and resident and retained layers."""
    tables = (chosen.retains, *chosen.resident, *chosen.retained)
    return tuple(int(each) for table in tables for each in table)


def streamed_seconds(part: Part) -> float:
    """Of a request's copies, in the slowest mode."""
    return max(copy_seconds(part, nothing_retained(part, mode)) for mode in part.modes)


def _most(part: Part) -> list[int]:
    layers = [each.count for each in part.classes]
    uses = len(part.uses)
    return [1] * uses + layers * (2 * uses)
