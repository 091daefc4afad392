"""What was found of a plan file: whether it holds, and what became of applying it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from .verdict import verdict
from .words import VERDICTS, place, short_by, with_units

if TYPE_CHECKING:
    from ...planner.dry_run import Applied
    from ...planner.planfile import Check, CheckedPlan


def check_view(check: Check) -> RenderableType:
    pages = [[*_page(check, plan)] for plan in check.plans] or [[Text("The file has no plan.")]]
    lines = [line for page in pages for line in (*page, Text())]
    return Group(*lines[:-1])


def _page(check: Check, plan: CheckedPlan) -> Iterator[Text]:
    yield Text(f"{check.pipeline} on {plan.card} ({plan.device})", "bold")
    if plan.holds:
        yield Text(f"Holds: {_compared(check, plan)}.", "bold green")
    elif plan.difference is None:
        yield Text("Stale: the file doesn't say what the plan holds for.", "bold red")
    else:
        yield Text(f"Stale: {with_units(str(plan.difference))}.", "bold red")
    if plan.fingerprint is not None:
        yield Text(f"fingerprint {plan.fingerprint}", "dim")
    if check.compared == "machine" and plan.holds:
        yield Text(_not_compared(plan), "dim")


def _compared(check: Check, plan: CheckedPlan) -> str:
    if check.compared == "pipeline":
        return "the software, the pipeline and what was declared for it are as they were"
    if plan.device == "simulated":
        return "the software is as it was"
    return "the card is in this machine, and driver and software are as they were"


def _not_compared(plan: CheckedPlan) -> str:
    left = "Not compared: the pipeline's structure and adapters, which "
    if plan.device == "simulated":
        return f"{left}--pipeline builds anew."
    return f"{left}the server compares when it starts."


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
