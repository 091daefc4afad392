"""Columns and rows of a mixed-integer program."""

from __future__ import annotations

import math
from collections.abc import Iterable

import highspy

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
