"""The decision of one plan in one sentence."""

from __future__ import annotations

from typing import assert_never

from ...planner.plan import Attempt, Infeasible, Plan, Reason, Status, UsePlan, Verdict
from .sets import fixed, holding, retained_layers, retaining, saved_s, tried_sets
from .units import format_bytes, format_exact, format_rate, format_seconds
from .words import VERDICTS, layer_count, place, short_by, would_hold, would_retain


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
