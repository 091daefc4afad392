"""Why a plan is what it is, as a page: what binds, what stopped each component, what more buys."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ...planner.plan import Plan, Status
from ...planner.report import Report
from .facts import facts
from .frontier import frontier_table
from .heading import heading
from .stops import stops_table
from .table import make_facts


def explanation_view(report: Report) -> RenderableType:
    pages = [_page(report.pipeline, plan) for plan in report.plans]
    parts = [part for page in pages for part in (page, Text())]
    return Group(*parts[:-1])


def _page(pipeline: str, plan: Plan) -> RenderableType:
    parts: list[RenderableType] = [*heading(pipeline, plan), Text()]
    explained = plan.explanation
    if explained is None:
        return Group(*parts, Text(_nothing(plan)))
    parts.append(make_facts(facts(plan, explained)))
    tables = {
        "What stopped each component": stops_table(plan, explained.stops),
        "What is best at other capacities": frontier_table(plan, explained),
    }
    for name, table in tables.items():
        parts += [Text(), table if table.row_count else Text(f"{name} is not known.")]
    return Group(*parts)


def _nothing(plan: Plan) -> str:
    if plan.status is Status.INFEASIBLE:
        return "The baseline doesn't run, so nothing was chosen and there is nothing to explain."
    return "The file has no explanation of this plan."
