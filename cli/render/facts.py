"""What an explanation says in a line each, with a label before it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...planner.explanation import Explanation, HostPlan, PinCost, Worth
from ...planner.plan import Plan
from .units import NEGLIGIBLE_S, format_bytes, format_exact, format_rate, format_seconds
from .words import place

Fact = tuple[str, str]


def facts(plan: Plan, explained: Explanation) -> Iterator[Fact]:
    if explained.unfit is not None:
        yield "nothing fits", with_units(explained.unfit)
    yield "binding phase", _binding(explained)
    yield "one more GiB", _worth(explained.one_more_gib)
    pinned = [_pin(pin) for pin in explained.pins] or ["nothing"]
    yield from (("" if i else "user's pins", text) for i, text in enumerate(pinned))
    yield "host memory", _host(explained.host)
    if explained.unfit is not None:
        yield "copies", "none are counted, since nothing fits"
        return
    yield "copies", _copies(explained)
    yield "copy rate", f"{format_rate(plan.copy_bytes_per_s)}; {plan.copy_rate_source}"
    yield "proof", _proof(explained)


def with_units(text: str) -> str:
    return re.sub(r"\b(\d+) bytes\b", lambda found: format_exact(int(found[1])), text)


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


def _pin(pin: PinCost) -> str:
    name = pin.pin.partition("=")[0]
    what = pin.pin if name == pin.component else f"{pin.pin} (for {pin.component})"
    if pin.seconds < NEGLIGIBLE_S:
        return f"{what} costs nothing"
    seconds = format_seconds(pin.seconds)
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
