"""What all pages share: figures as people read them, tables, and a plan's enums in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, assert_never

from rich import box
from rich.table import Table
from rich.text import Text

from ...planner.plan import Plan, Reason, Status, UsePlan
from ...planner.verdict import Verdict

NEGLIGIBLE_S = 5e-7
"""Seconds below this are what sums of floats are apart."""

_BINARY = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))


def format_bytes(size: int, *, signed: bool = False) -> str:
    """`12.94 GiB`, `376 MiB`, `-4.5 MiB`; `signed` puts a plus before what is above 0."""
    sign = "-" if size < 0 else "+" if signed and size > 0 else ""
    return sign + _magnitude(abs(size))


def format_exact(size: int) -> str:
    """With every byte: `1.20 GiB (1,288,490,189 bytes)`."""
    return f"{format_bytes(size)} ({size:,} bytes)"


def with_units(text: str) -> str:
    """The planner's `N bytes` in a text, with units."""
    return re.sub(r"\b(\d+) bytes\b", lambda found: format_exact(int(found[1])), text)


def format_seconds(seconds: float, *, signed: bool = False) -> str:
    """`1.50 s`, `31 ms`; `signed` puts a plus before what is above 0."""
    if abs(seconds) < NEGLIGIBLE_S:
        return "0.00 s"
    sign = "+" if signed and seconds > 0 else ""
    # What would round to 100 ms is given as 0.10 s.
    if abs(seconds) < 0.0995:
        return f"{sign}{seconds * 1000:.2g} ms"
    return f"{sign}{seconds:.2f} s"


def format_rate(bytes_per_s: float) -> str:
    """In 1000^3 bytes a second, as data sheets give it."""
    return f"{bytes_per_s / 10**9:.1f} GB/s"


def _magnitude(size: int) -> str:
    for shift, unit in _BINARY:
        # A size that would round to 1024 of a unit is given as 1 of the next.
        if size < (1 << shift) - (1 << shift) // 2048:
            continue
        value = size / (1 << shift)
        if unit in ("GiB", "TiB"):
            return f"{value:.2f} {unit}"
        return (
            f"{value:.0f} {unit}" if value >= 100 or value.is_integer() else f"{value:.1f} {unit}"
        )
    return f"{size} B"


Align = Literal["left", "right"]


def make_table(title: str, *headings: str | tuple[str, Align]) -> Table:
    """A heading with "right" is a column of numbers. What is too wide is folded, never cut."""
    table = Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="",
    )
    for heading in headings:
        text = heading if isinstance(heading, str) else heading[0]
        align: Align = "left" if isinstance(heading, str) else heading[1]
        table.add_column(Text(text, "dim"), justify=align, overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Strings are shown as they are, whatever brackets are in them."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def make_facts(facts: Iterable[tuple[str, str]]) -> Table:
    """A line a fact, with its label before it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for fact in facts:
        add_row(table, *fact)
    return table


VERDICTS = {
    Verdict.ACCEPTED: "accepted",
    Verdict.OOM: "out of memory",
    Verdict.HEADROOM: "ran, margin not kept",
    Verdict.SLOWER: "slower than the baseline",
    Verdict.OUTPUT: "output differs from the baseline's",
    Verdict.CRASH: "failed with an error",
    Verdict.HOST_MEMORY: "the host couldn't lock what it pins",
}


def place(phase: str | None, shape: str | None) -> str:
    return " at ".join(part for part in (phase, shape) if part) or "-"


def layers(resident: int, total: int) -> str:
    if total and not resident:
        return "its weights in no layer"
    return f"{layer_count(resident, total)} layers" if total else "all its weights"


def layer_count(resident: int, total: int) -> str:
    return f"{resident} of {total}" if total else "-"


def would_retain(plan: Plan) -> str:
    return "retains" if plan.in_effect else "would retain"


def would_hold(plan: Plan) -> str:
    return "holds" if plan.in_effect else "would hold"


def reason(plan: Plan, use: UsePlan) -> str:
    proof = "not tried" if plan.status is Status.PROPOSED else "validated"
    match use.reason:
        case Reason.RETAINED:
            return f"fits every phase, {proof}"
        case Reason.RESIDENT:
            return "never leaves the card"
        case Reason.NOTHING_SAVED:
            return "retaining it would save no copy"
        case Reason.MARGINAL:
            return "fits, and saves less than 1 % of a request"
        case Reason.NO_HEADROOM:
            return f"too little headroom{_where(use)}{short_by(use.shortfall_bytes)}"
        case Reason.REFUTED:
            return f"tried and refuted{_where(use)}{short_by(use.shortfall_bytes)}"
        case Reason.PARTLY_RETAINED if use.limiting_phase:
            return f"as many layers as fit{_where(use)}, {proof}"
        case Reason.PARTLY_RETAINED:
            return f"as many layers as fit or are worth their bytes, {proof}"
        case Reason.OUTBID:
            return "fits alone, what is retained instead saves more"
        case _:
            assert_never(use.reason)


def _where(use: UsePlan) -> str:
    return f" in {use.limiting_phase}" if use.limiting_phase else ""


def short_by(shortfall_bytes: int | None) -> str:
    return "" if shortfall_bytes is None else f", short by {format_bytes(shortfall_bytes)}"
