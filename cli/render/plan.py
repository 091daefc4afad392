"""A report: a page for each plan with its evidence, the cards compared, and all of it as HTML."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from ...planner.plan import Attempt, Plan, Report, Status, UsePlan
from ...planner.verdict import Verdict
from .verdict import (
    STATUS_STYLES,
    heading,
    holding,
    retained_layers,
    retaining,
    saved_s,
    stop_of,
    tried_sets,
)
from .words import (
    VERDICTS,
    Align,
    add_row,
    format_bytes,
    format_seconds,
    layer_count,
    layers,
    make_table,
    place,
    reason,
    would_hold,
    would_retain,
)


def report_view(report: Report) -> RenderableType:
    pages: list[RenderableType] = [plan_view(report.pipeline, plan) for plan in report.plans]
    if len(pages) > 1:
        pages.append(comparison_view(report.plans))
    parts = [part for page in pages for part in (page, Text())]
    return Group(*parts[:-1])


def plan_view(pipeline: str, plan: Plan) -> RenderableType:
    parts: list[RenderableType] = [*heading(pipeline, plan)]
    if plan.infeasible:
        parts.append(Text(plan.infeasible.detail.strip()))
    tables = (_components(plan), _phases(plan), _uses(plan), _attempts(plan))
    parts += [part for table in tables if table.row_count for part in (Text(), table)]
    parts += _details(plan)
    return Group(*parts)


def _components(plan: Plan) -> Table:
    table = make_table(
        "Components",
        "component",
        "residency",
        ("resident layers", "right"),
        ("weights", "right"),
        ("of which in no layer", "right"),
    )
    for component in plan.components:
        add_row(
            table,
            component.name,
            component.residency,
            layer_count(component.resident_layers, component.total_layers),
            format_bytes(component.weight_bytes),
            format_bytes(component.non_layer_bytes),
        )
    return table


def _phases(plan: Plan) -> Table:
    table = make_table(
        "Phases, with nothing retained",
        "phase",
        "shape",
        ("peak", "right"),
        ("headroom", "right"),
        ("the plan adds", "right"),
        ("left", "right"),
        "",
    )
    for phase in plan.phases:
        add_row(
            table,
            phase.name,
            phase.shape,
            format_bytes(phase.peak_bytes),
            format_bytes(phase.headroom_bytes),
            format_bytes(phase.retained_bytes, signed=True),
            format_bytes(phase.headroom_bytes - phase.retained_bytes),
            Text("binds" if phase.binding else "", "bold"),
        )
    return table


def _uses(plan: Plan) -> Table:
    sized = plan.sizing == "auto"
    counts: list[str | tuple[str, Align]] = [("layers", "right"), "retain"]
    if sized:
        counts = [(heading, "right") for heading in ("layers\nthat run", "held", "retained")]
    table = make_table(
        "Uses",
        "phase",
        "component",
        *counts,
        ("takes", "right"),
        ("saves\na request" if sized else "saves a request", "right"),
        ("about", "right"),
        "why",
    )
    for use in plan.uses:
        add_row(
            table,
            use.phase,
            use.component,
            *(_sized(plan, use) if sized else _declared(use)),
            format_bytes(use.retained_bytes) if use.retained_bytes else "-",
            format_bytes(use.saved_h2d_bytes) if use.saved_h2d_bytes else "-",
            format_seconds(use.saved_s) if use.saved_h2d_bytes else "-",
            reason(plan, use),
        )
    return table


def _declared(use: UsePlan) -> Iterator[str | Text]:
    yield layer_count(use.resident_layers, use.total_layers)
    yield Text("yes", "bold green") if use.retain_resident_layers else "no"


def _sized(plan: Plan, use: UsePlan) -> Iterator[str | Text]:
    stop, layered = stop_of(plan, use), use.total_layers > 0
    yield layer_count(stop.running_layers, use.total_layers) if stop else "-"
    yield str(use.resident_layers) if layered else "-"
    retained = str(use.retained_layers) if layered else "whole"
    yield Text(retained, "bold green") if use.retain_resident_layers else "no"


def _attempts(plan: Plan) -> Table:
    sized = plan.sizing == "auto"
    table = make_table(
        "Attempts",
        ("#", "right"),
        "retained, held/all" if sized else "retained",
        "the model said",
        "verdict",
        "phase",
        "shape",
        ("short there", "right"),
        "rolled back",
    )
    for number, attempt in enumerate(plan.attempts, start=1):
        accepted = attempt.verdict is Verdict.ACCEPTED
        add_row(
            table,
            str(number),
            tried_sets(plan, attempt) if sized else " + ".join(attempt.retained) or "nothing",
            _predicted(attempt),
            Text(VERDICTS[attempt.verdict], "green" if accepted else "red"),
            attempt.phase or "-",
            attempt.shape or "-",
            "-" if attempt.shortfall_bytes is None else format_bytes(attempt.shortfall_bytes),
            "yes" if attempt.rolled_back else "no",
        )
    return table


def _predicted(attempt: Attempt) -> str:
    short = attempt.predicted_shortfall_bytes
    said = f"short by {format_bytes(short)}" if short else "fits"
    return f"{said} (beyond the model)" if attempt.beyond_model else said


def _details(plan: Plan) -> list[Text]:
    return [
        Text(f"attempt {number}: {attempt.detail.strip()}", "dim")
        for number, attempt in enumerate(plan.attempts, start=1)
        if attempt.detail
    ]


def comparison_view(plans: Sequence[Plan]) -> Table:
    table = make_table(
        "Cards compared",
        "card",
        ("capacity", "right"),
        "decision",
        "binding phase",
        ("headroom\nthere", "right"),
        ("copied\na request", "right"),
        ("with\nthe plan", "right"),
        ("saved,\nabout", "right"),
    )
    for plan in plans:
        copied = plan.h2d_bytes_per_request
        saved = saved_s(plan) if plan.status in (Status.COMMITTED, Status.PROPOSED) else 0
        add_row(
            table,
            plan.card,
            format_bytes(plan.capacity_bytes),
            Text(_decision(plan), STATUS_STYLES[plan.status]),
            *_binding(plan),
            format_bytes(copied.baseline) if copied else "-",
            format_bytes(copied.planned) if copied else "-",
            format_seconds(saved) if saved else "-",
        )
    return table


def _decision(plan: Plan) -> str:
    if plan.status is Status.INFEASIBLE:
        return "does not fit"
    retained = "\n".join(
        f"{use.component}\n({retained_layers(plan, use)})" for use in retaining(plan)
    )
    held = "\n".join(
        f"{use.component}\n({layers(use.resident_layers, use.total_layers)})"
        for use in holding(plan)
    )
    told = {would_retain(plan): retained, would_hold(plan): held}
    said = "\n".join(f"{verb} {sets}" for verb, sets in told.items() if sets)
    return said or f"{would_retain(plan)} nothing"


def _binding(plan: Plan) -> tuple[str, str]:
    """Where it is decided, and the headroom there; where it fails, how much is short."""
    if found := plan.infeasible:
        short = found.shortfall_bytes
        return place(found.phase, found.shape), (
            "-" if short is None else f"short by {format_bytes(short)}"
        )
    for phase in plan.phases:
        if phase.binding:
            return place(phase.name, phase.shape), format_bytes(phase.headroom_bytes)
    return "-", "-"


_WIDTH = 140
"""Columns; tables that need more scroll."""

_THEME = TerminalTheme(
    (255, 255, 255),
    (28, 30, 33),
    [
        (28, 30, 33),
        (176, 32, 32),
        (20, 110, 60),
        (140, 90, 0),
        (30, 80, 160),
        (120, 50, 130),
        (0, 105, 115),
        (90, 95, 100),
    ],
)

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{{stylesheet}}
body {{{{ color: {{foreground}}; background: {{background}}; margin: 2rem; }}}}
pre {{{{ font: 14px/1.35 ui-monospace, monospace; overflow-x: auto; margin: 0; }}}}
</style>
</head>
<body><pre>{{code}}</pre></body>
</html>
"""


def report_page(report: Report) -> str:
    """What `residency show` prints, in one file that needs nothing else."""
    console = Console(
        file=io.StringIO(),
        width=_WIDTH,
        record=True,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(report_view(report))
    names = ", ".join(dict.fromkeys(plan.card for plan in report.plans))
    title = _escaped(f"residency: {report.pipeline} on {names}")
    return console.export_html(theme=_THEME, code_format=_FRAME.format(title=title))


def _escaped(text: str) -> str:
    """For HTML, and for the format that it becomes a part of."""
    return html.escape(text).replace("{", "{{").replace("}", "}}")
