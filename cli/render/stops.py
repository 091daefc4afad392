"""What stopped each component from being retained whole, in one sentence each."""

from __future__ import annotations

from typing import assert_never

from rich.table import Table

from ...planner.explanation import ComponentStop, Stop
from ...planner.plan import Plan, Reason, UsePlan
from .sets import fixed, retained_layers, stop_of
from .table import add_row, make_table
from .units import format_bytes
from .words import layers, place, short_by


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
        case Stop.PINNED:
            return f"the user fixed it{_flag(plan, stop)}"
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
    pins = plan.explanation.pins if plan.explanation else ()
    named = " and ".join(pin.pin for pin in pins if pin.component == stop.component)
    return f" with {named}" if named else ""
