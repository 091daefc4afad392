"""The best plans at other capacities, beside this one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ...planner.explanation import Explanation, FrontierPoint
from ...planner.plan import Plan
from .table import add_row, make_table
from .units import format_bytes, format_seconds


def frontier_table(plan: Plan, explained: Explanation) -> Table:
    table = make_table(
        "The best at other capacities, by the model: not validated",
        ("capacity", "right"),
        "card",
        "fits",
        ("retained", "right"),
        ("held in\nuses", "right"),
        ("copied\na request", "right"),
        ("copies", "right"),
        ("against\nthis plan", "right"),
        "",
    )
    own = _own(plan, explained.frontier)
    for point in explained.frontier:
        style = "bold" if point is own else ""
        cells = (
            format_bytes(point.capacity_bytes),
            point.card or "-",
            "yes" if point.fits else "no",
            *(_numbers(point, explained) if point.fits else ["-"] * 5),
            "this card" if point is own else "",
        )
        add_row(table, *(Text(cell, style) for cell in cells))
    return table


def _numbers(point: FrontierPoint, explained: Explanation) -> list[str]:
    change = format_seconds(point.copy_s - explained.copy_s, signed=True)
    return [
        format_bytes(point.retained_bytes),
        format_bytes(point.resident_bytes),
        format_bytes(point.h2d_bytes),
        format_seconds(point.copy_s),
        "-" if explained.unfit else change,
    ]


def _own(plan: Plan, points: Sequence[FrontierPoint]) -> FrontierPoint | None:
    same = [point for point in points if point.capacity_bytes == plan.capacity_bytes]
    named = [point for point in same if point.card == plan.card]
    return next(iter(named + same), None)
