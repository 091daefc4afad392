"""What became of applied plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ...planner.planfile.apply import Applied
from .verdict import verdict
from .words import VERDICTS, place, short_by


def applied_view(applied: Sequence[Applied]) -> RenderableType:
    return Group(*(line for each in applied for line in _lines(each)))


def _lines(applied: Applied) -> Iterator[Text]:
    plan = applied.plan
    yield Text(f"{plan.card} ({plan.device})", "bold")
    if applied.holds:
        yield Text("Holds: one sweep at the largest shapes was accepted.", "bold green")
    else:
        yield Text(f"Doesn't hold: {_why(applied)}.", "bold red")
    yield Text(verdict(plan), "dim")


def _why(applied: Applied) -> str:
    refutation = applied.refutation
    if refutation is None:
        return "the pipeline doesn't run with nothing retained"
    where = f" in {place(refutation.phase, refutation.shape)}" if refutation.phase else ""
    short = short_by(refutation.shortfall_bytes)
    return f"{VERDICTS[refutation.verdict]}{where}{short}, rolled back"
