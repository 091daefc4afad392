"""A whole report: a page for each card, and the comparison where there are several."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from ...planner.report import Report
from .comparison import comparison_view
from .plan import plan_view


def report_view(report: Report) -> RenderableType:
    pages: list[RenderableType] = [plan_view(report.pipeline, plan) for plan in report.plans]
    if len(pages) > 1:
        pages.append(comparison_view(report.plans))
    parts = [part for page in pages for part in (page, Text())]
    return Group(*parts[:-1])
