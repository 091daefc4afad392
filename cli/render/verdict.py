"""What every page on a plan begins with: what was planned for what, and the decision in one
sentence, with the sets that it speaks of."""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from rich.text import Text

from ...planner.plan import (
    Attempt,
    ComponentStop,
    Infeasible,
    Plan,
    Reason,
    SetPlan,
    Status,
    Stop,
    UsePlan,
)
from ...planner.verdict import Verdict
from .words import (
    VERDICTS,
    format_bytes,
    format_exact,
    format_rate,
    format_seconds,
    layer_count,
    layers,
    place,
    short_by,
    would_hold,
    would_retain,
)

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


def verdict(plan: Plan) -> str:
    match plan.status:
        case Status.COMMITTED:
            return f"{_capitalised(_sets(plan))}; {_gains(plan)}"
        case Status.PROPOSED:
            return f"{_capitalised(_sets(plan))}, by the model and not tried; {_gains(plan)}"
        case Status.BASELINE_ONLY:
            return f"{_capitalised(would_retain(plan))} nothing: {_obstacles(plan)}"
        case Status.INFEASIBLE:
            return f"Does not fit: {shortage(plan.infeasible)}"
        case _:
            assert_never(plan.status)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def shortage(found: Infeasible | None) -> str:
    """Which phase at which shape lacks how many bytes, with nothing retained."""
    if found is None:
        return "the pipeline doesn't run with nothing retained"
    by = (
        "fails"
        if found.shortfall_bytes is None
        else f"is short by {format_exact(found.shortfall_bytes)}"
    )
    where = place(found.phase, found.shape)
    if found.phase == "load":
        where = "loading the resident components"
    return f"{where} {by} with nothing retained"


def _sets(plan: Plan) -> str:
    retained = "; ".join(
        f"{use.component}: {retained_layers(plan, use)}, "
        f"{format_bytes(use.retained_bytes)} across the gap"
        for use in retaining(plan)
    )
    held = " and ".join(
        f"{layer_count(use.resident_layers, use.total_layers)} {use.component} layers"
        for use in holding(plan)
    )
    told = {would_retain(plan): retained, would_hold(plan): held and f"{held} across the steps"}
    return "; ".join(f"{verb} {sets}" for verb, sets in told.items() if sets)


def _gains(plan: Plan) -> str:
    rate = f"{format_rate(plan.copy_bytes_per_s)}; {plan.copy_rate_source}"
    copied = plan.h2d_bytes_per_request
    change = (
        f"{format_bytes(copied.baseline)} -> {format_bytes(copied.planned)} copied a request, "
        if copied
        else ""
    )
    return f"{change}about {format_seconds(saved_s(plan))} saved (at {rate})"


def _obstacles(plan: Plan) -> str:
    told = [_obstacle(plan, use) for use in plan.uses]
    # One attempt may have refuted several uses.
    obstacles = [text for text in dict.fromkeys(told) if text]
    if not obstacles:
        stays = all(use.reason is Reason.RESIDENT for use in plan.uses)
        obstacles = ["every component stays on the card" if stays else "it would save no copy"]
    if copied := plan.h2d_bytes_per_request:
        obstacles.append(f"{format_bytes(copied.planned)} copied a request")
    return "; ".join(obstacles)


def _obstacle(plan: Plan, use: UsePlan) -> str | None:
    if use.reason is Reason.MARGINAL:
        seconds = format_seconds(use.saved_s)
        return f"{use.component} fits and would save {seconds}, less than 1 % of a request's copies"
    if use.reason is Reason.NO_HEADROOM:
        return _lack(plan, use)
    if use.reason is Reason.REFUTED:
        return _refutation(plan, use)
    return None


def _lack(plan: Plan, use: UsePlan) -> str:
    limit = (use.limiting_phase, use.limiting_shape)
    tightest = next((p for p in plan.phases if (p.name, p.shape) == limit), None)
    short_bytes = use.shortfall_bytes
    if tightest is None or short_bytes is None:
        return f"{use.component} needs {format_bytes(use.retained_bytes)}{short_by(short_bytes)}"
    headroom_bytes = tightest.headroom_bytes
    # Less than the whole set in a phase whose peak has a part of it already.
    least = "" if fixed(plan, use.component) else "at least "
    needs = f"{use.component} needs {least}{format_bytes(headroom_bytes + short_bytes)}"
    has = f"{place(tightest.name, tightest.shape)} has {format_bytes(headroom_bytes)} headroom"
    return f"{has}, {needs}{short_by(short_bytes)}"


def _refutation(plan: Plan, use: UsePlan) -> str:
    attempt = _last_refuted(plan, use.component)
    what = f"{use.component} ({format_bytes(use.retained_bytes)})"
    if attempt is not None and not fixed(plan, use.component):
        what = tried_sets(plan, attempt)
    if attempt is None:
        return f"{what} was tried and refuted{short_by(use.shortfall_bytes)}"
    beyond = " beyond the model" if attempt.beyond_model else ""
    if predicted := attempt.predicted_shortfall_bytes:
        beyond += f", which had it short by {format_bytes(predicted)}"
    where = f" in {place(attempt.phase, attempt.shape)}" if attempt.phase else ""
    undone = "rolled back" if attempt.rolled_back else "not rolled back"
    return (
        f"{what} was tried{beyond}: {VERDICTS[attempt.verdict]}{where}{_missing(attempt)}"
        f"{_meanwhile(attempt)}, {undone}"
    )


def _meanwhile(attempt: Attempt) -> str:
    taken = attempt.neighbour_bytes
    return f", while another process took {format_bytes(taken)}" if taken else ""


def _missing(attempt: Attempt) -> str:
    if attempt.verdict is Verdict.OOM or attempt.shortfall_bytes is None:
        return short_by(attempt.shortfall_bytes)
    return f", the margin short by {format_bytes(attempt.shortfall_bytes)}"


def _last_refuted(plan: Plan, component: str) -> Attempt | None:
    for attempt in reversed(plan.attempts):
        if component in attempt.retained and attempt.verdict is not Verdict.ACCEPTED:
            return attempt
    return None


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
    stopped = any(s.component == component and s.stop is Stop.FIXED for s in found.stops)
    return stopped or any(cost.component == component for cost in found.fixed)


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
