"""Several plans side by side: a row a card."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ...planner.plan import Plan, Status
from .heading import STATUS_STYLES
from .sets import holding, retained_layers, retaining, saved_s
from .table import add_row, make_table
from .units import format_bytes, format_seconds
from .words import layers, place, would_hold, would_retain


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
