"""What every page on a plan begins with: what was planned for what, and the verdict."""

from __future__ import annotations

from rich.text import Text

from ...planner.plan import Plan, Status
from .units import format_bytes
from .verdict import verdict

STATUS_STYLES = {
    Status.COMMITTED: "bold green",
    Status.PROPOSED: "bold cyan",
    Status.BASELINE_ONLY: "bold yellow",
    Status.INFEASIBLE: "bold red",
}


def heading(pipeline: str, plan: Plan) -> list[Text]:
    takers = {
        "others": plan.others_bytes,
        "context": plan.context_bytes,
        "margin": plan.margin_bytes,
    }
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in takers.items())
    shapes = "; ".join(
        f"{shape.asked} -> {shape.run or 'nothing came out'}" for shape in plan.shapes
    )
    return [
        Text(f"{pipeline} on {plan.card} ({plan.device})", "bold"),
        Text(f"capacity {format_bytes(plan.capacity_bytes)}, {sizes}"),
        Text(f"shapes asked -> run: {shapes or '-'}"),
        Text(),
        Text(verdict(plan), STATUS_STYLES[plan.status]),
    ]
