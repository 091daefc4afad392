"""The sets of a plan: which components retain how much, and which hold it during a use only."""

from __future__ import annotations

from collections import Counter

from ...planner.explanation import ComponentStop, Stop
from ...planner.plan import Attempt, Plan, Reason, SetPlan, UsePlan
from .words import layers


def retaining(plan: Plan) -> list[UsePlan]:
    return [use for use in plan.uses if use.retain_resident_layers]


def holding(plan: Plan) -> list[UsePlan]:
    """Uses of several passes for which more was sized than is retained."""
    return [use for use in plan.uses if plan.sizing == "auto" and _holds(use, stop_of(plan, use))]


def _holds(use: UsePlan, stop: ComponentStop | None) -> bool:
    more = use.resident_layers > use.retained_layers
    several = stop is None or stop.passes > 1
    return more and several and use.reason is not Reason.RESIDENT


def stop_of(plan: Plan, use: UsePlan) -> ComponentStop | None:
    if plan.explanation is None:
        return None
    place = (use.component, use.phase)
    return next(
        (stop for stop in plan.explanation.stops if (stop.component, stop.phase) == place), None
    )


def retained_layers(plan: Plan, use: UsePlan) -> str:
    """`21 of 36 layers that run` where it was sized, `43 of 66 layers` where the user fixed it."""
    stop, retained, total = stop_of(plan, use), use.retained_layers, use.total_layers
    # Layers that the user fixed are any, and needn't run.
    if not retained or stop is None or fixed(plan, use.component):
        return layers(retained, total)
    running = stop.running_layers
    told = f"all {running} layers" if retained == running else layers(retained, running)
    return told if running == total else f"{told} that run"


def fixed(plan: Plan, component: str) -> bool:
    """Whether the user fixed how much is resident."""
    if plan.sizing == "declared" or plan.explanation is None:
        return plan.sizing == "declared"
    found = plan.explanation
    stopped = any(s.component == component and s.stop is Stop.PINNED for s in found.stops)
    return stopped or any(pin.component == component for pin in found.pins)


def saved_s(plan: Plan) -> float:
    """Seconds of copies a request that the plan saves."""
    if plan.sizing == "auto" and (found := plan.explanation):
        return found.baseline_copy_s - found.copy_s
    return sum(use.saved_s for use in retaining(plan))


def tried_sets(plan: Plan, attempt: Attempt) -> str:
    """`text_encoder 24, transformer 30/57`: retained, and held of all in a use of many passes."""
    times = Counter(each.component for each in attempt.sets)
    totals = {component.name: component.total_layers for component in plan.components}
    told = [
        (f"{each.component} " if times[each.component] == 1 else f"{each.component} {each.phase} ")
        + count
        for each in attempt.sets
        if (count := _tried(each, totals.get(each.component), attempt.retained))
    ]
    return ", ".join(told) or "nothing"


def _tried(each: SetPlan, total: int | None, retained: tuple[str, ...]) -> str:
    counts = []
    if each.retained_layers or each.component in retained:
        counts.append(str(each.retained_layers) if total else "whole")
    if each.resident_layers > each.retained_layers:
        counts.append(f"{each.resident_layers}/{total or '?'}")
    return " of ".join(counts)
