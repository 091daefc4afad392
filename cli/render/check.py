"""A check of a plan file: a page for each plan."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from ...planner.planfile.check import Check, CheckedPlan
from .facts import with_units


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
