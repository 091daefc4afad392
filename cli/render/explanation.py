"""Why a plan is what it is, as a page: what binds, what stopped each component, what more buys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...planner.plan import (
    ComponentStop,
    Explanation,
    FixedCost,
    FrontierPoint,
    HostPlan,
    Plan,
    Reason,
    Report,
    Status,
    Stop,
    UsePlan,
    Worth,
)
from .verdict import fixed, heading, retained_layers, stop_of
from .words import (
    NEGLIGIBLE_S,
    add_row,
    format_bytes,
    format_rate,
    format_seconds,
    layers,
    make_facts,
    make_table,
    place,
    short_by,
    with_units,
)


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


Fact = tuple[str, str]


def facts(plan: Plan, explained: Explanation) -> Iterator[Fact]:
    if explained.unfit is not None:
        yield "nothing fits", with_units(explained.unfit)
    yield "binding phase", _binding(explained)
    yield "one more GiB", _worth(explained.one_more_gib)
    fixed = [_fixed(cost) for cost in explained.fixed] or ["nothing"]
    yield from (("" if i else "what is fixed", text) for i, text in enumerate(fixed))
    yield "host memory", _host(explained.host)
    if explained.unfit is not None:
        yield "copies", "none are counted, since nothing fits"
        return
    yield "copies", _copies(explained)
    yield "copy rate", f"{format_rate(plan.copy_bytes_per_s)}; {plan.copy_rate_source}"
    yield "proof", _proof(explained)


def _binding(explained: Explanation) -> str:
    if explained.binding_phase is None:
        return "no phase is known to bind"
    where = place(explained.binding_phase, explained.binding_shape)
    if explained.left_bytes is None:
        return f"{where}; what the plan leaves there is not known"
    return f"{where}, where the plan leaves {format_bytes(explained.left_bytes)}"


def _worth(worth: Worth | None) -> str:
    if worth is None:
        return "what it would change is not known"
    saves = worth.seconds > NEGLIGIBLE_S
    if not worth.layers and not saves:
        return "would change nothing"
    more = abs(worth.layers)
    held = f"{more} {'more' if worth.layers > 0 else 'fewer'} layer{'' if more == 1 else 's'}"
    saved = f"save {format_seconds(worth.seconds)} a request" if saves else "save no copy"
    return f"would hold {held if more else 'as many layers, but others,'} and {saved}"


def _fixed(cost: FixedCost) -> str:
    name = cost.fixed.partition("=")[0]
    what = cost.fixed if name == cost.component else f"{cost.fixed} (for {cost.component})"
    if cost.seconds < NEGLIGIBLE_S:
        return f"{what} costs nothing"
    seconds = format_seconds(cost.seconds)
    return f"{what} costs {seconds} a request: the best plan without it saves so much more"


def _host(host: HostPlan) -> str:
    told = ["no budget was given"]
    if host.budget_bytes is not None:
        left = format_bytes(host.budget_bytes - host.charged_bytes)
        told = [f"{format_bytes(host.budget_bytes)} budget, {left} left"]
    rounded = f"{format_bytes(host.charged_bytes)} pinned, after rounding to powers of two"
    told.append(f"{rounded}: {', '.join(host.pinned)}" if host.pinned else "nothing pinned")
    slower = "pageable, which copies more slowly"
    told.append(f"{slower}: {', '.join(host.pageable)}" if host.pageable else "nothing pageable")
    if host.pageable:
        told.append(f"pinning all would take {format_bytes(host.wanted_bytes)}")
    return "; ".join(told)


def _copies(explained: Explanation) -> str:
    under, baseline = explained.copy_s, explained.baseline_copy_s
    if abs(under - baseline) < NEGLIGIBLE_S:
        return f"{format_seconds(under)} a request, as in the baseline"
    change = format_seconds(abs(baseline - under))
    return (
        f"{format_seconds(under)} a request, {format_seconds(baseline)} in the baseline: "
        f"{change} {'saved' if under < baseline else 'more'}"
    )


def _proof(explained: Explanation) -> str:
    gap = explained.copy_s - explained.bound_s
    bound = f"no plan that fits copies for less than {format_seconds(explained.bound_s)}"
    share = gap / explained.copy_s if explained.copy_s else 0.0
    above = f"{bound}, {format_seconds(gap)} ({share:.1%}) below this one"
    if not explained.proven:
        return f"not proven best under the model, the solver's time was up: {above}"
    if share < 0.0005:
        return "proven best under the model: no plan that fits copies for less"
    return f"proven under the model: {above}"


def stops_table(plan: Plan, stops: tuple[ComponentStop, ...]) -> Table:
    table = make_table("What stopped each component", "component", "phase", "what stopped it")
    for use in plan.uses:
        stop = stop_of(plan, use)
        told = [_standing(plan, use, stop), _cause(plan, stop, use) if stop else _untold(use)]
        add_row(table, use.component, use.phase, ": ".join(part for part in told if part))
    places = [(use.component, use.phase) for use in plan.uses]
    for stop in stops:
        if (stop.component, stop.phase) not in places:
            add_row(table, stop.component, stop.phase, _cause(plan, stop, None))
    return table


def _untold(use: UsePlan) -> str:
    return "" if use.reason is Reason.RESIDENT else "what stopped it is not known"


def _standing(plan: Plan, use: UsePlan, stop: ComponentStop | None) -> str:
    """What is retained and held as it is."""
    if use.reason is Reason.RESIDENT:
        return "never leaves the card"
    sets = retained_layers(plan, use) if use.retain_resident_layers else "nothing"
    if stop and stop.passes > 1 and stop.resident_layers > stop.retained_layers:
        held = layers(stop.resident_layers, use.total_layers)
        return f"holds {held} across its {stop.passes} passes, retains {sets}"
    return f"retains {sets}"


def _cause(plan: Plan, stop: ComponentStop, use: UsePlan | None) -> str:
    size = "" if stop.step_bytes is None else f" ({format_bytes(stop.step_bytes)})"
    step = _step(plan, stop, use) + size
    match stop.stop:
        case Stop.WHOLE:
            return "all that is declared" if fixed(plan, stop.component) else "nothing stopped it"
        case Stop.ROOM:
            return f"{step} doesn't fit{_there(stop)}"
        case Stop.REFUTED:
            return f"{step} fits by the model, and validation refuted as much{_there(stop)}"
        case Stop.FIXED:
            return f"fixed{_flag(plan, stop)}"
        case Stop.WORTHLESS:
            return f"{step} would save nothing worth its bytes"
        case Stop.OUTBID:
            short = short_by(stop.short_bytes)
            others = f"beside what is held of others{short}; that saves more"
            return f"{step} doesn't fit{_where(stop)} {others}"
        case _:
            assert_never(stop.stop)


def _step(plan: Plan, stop: ComponentStop, use: UsePlan | None) -> str:
    if fixed(plan, stop.component):
        return "what is declared"
    if not stop.running_layers:
        return "the whole"
    if stop.resident_layers or (use and use.retain_resident_layers):
        return "one more layer"
    return "a first layer" if stop.passes > 1 else "a first layer with the weights in no layer"


def _there(stop: ComponentStop) -> str:
    return f"{_where(stop)}{short_by(stop.short_bytes)}"


def _where(stop: ComponentStop) -> str:
    return f" in {place(stop.limiting_phase, stop.limiting_shape)}" if stop.limiting_phase else ""


def _flag(plan: Plan, stop: ComponentStop) -> str:
    costs = plan.explanation.fixed if plan.explanation else ()
    named = " and ".join(cost.fixed for cost in costs if cost.component == stop.component)
    return f" by {named}" if named else " by the user"


def frontier_table(plan: Plan, explained: Explanation) -> Table:
    table = make_table(
        "The best at other capacities, by the model: not validated",
        ("capacity", "right"),
        "card",
        "fits",
        ("retained", "right"),
        ("held in\nuses", "right"),
        ("copied\na request", "right"),
        ("copies", "right"),
        ("against\nthis plan", "right"),
        "",
    )
    own = _own(plan, explained.frontier)
    for point in explained.frontier:
        style = "bold" if point is own else ""
        cells = (
            format_bytes(point.capacity_bytes),
            point.card or "-",
            "yes" if point.fits else "no",
            *(_numbers(point, explained) if point.fits else ["-"] * 5),
            "this card" if point is own else "",
        )
        add_row(table, *(Text(cell, style) for cell in cells))
    return table


def _numbers(point: FrontierPoint, explained: Explanation) -> list[str]:
    change = format_seconds(point.copy_s - explained.copy_s, signed=True)
    return [
        format_bytes(point.retained_bytes),
        format_bytes(point.resident_bytes),
        format_bytes(point.h2d_bytes),
        format_seconds(point.copy_s),
        "-" if explained.unfit else change,
    ]


def _own(plan: Plan, points: Sequence[FrontierPoint]) -> FrontierPoint | None:
    same = [point for point in points if point.capacity_bytes == plan.capacity_bytes]
    named = [point for point in same if point.card == plan.card]
    return next(iter(named + same), None)
