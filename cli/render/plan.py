"""One plan as a page: what is decided, and the evidence."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...planner.plan import Attempt, Plan, UsePlan, Verdict
from .heading import heading
from .sets import stop_of, tried_sets
from .table import Align, add_row, make_table
from .units import format_bytes, format_seconds
from .words import VERDICTS, layer_count, reason


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
