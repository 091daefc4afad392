"""Several plans side by side: a row a card."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from ...planner.plan import Plan, Status
from .plan import STATUS_STYLES
from .table import add_row, make_table
from .units import format_bytes, format_seconds
from .words import layers, place, would_retain


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
        saved_s = sum(use.saved_s for use in plan.uses if use.retain_resident_layers)
        add_row(
            table,
            plan.card,
            format_bytes(plan.capacity_bytes),
            Text(_decision(plan), STATUS_STYLES[plan.status]),
            *_binding(plan),
            format_bytes(copied.baseline) if copied else "-",
            format_bytes(copied.planned) if copied else "-",
            format_seconds(saved_s) if saved_s else "-",
        )
    return table


def _decision(plan: Plan) -> str:
    if plan.status is Status.INFEASIBLE:
        return "does not fit"
    retained = "\n".join(
        f"{use.component}\n({layers(use.resident_layers, use.total_layers)})"
        for use in plan.uses
        if use.retain_resident_layers
    )
    return f"{would_retain(plan)} {retained or 'nothing'}"


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
