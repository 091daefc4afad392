"""The explanation of a outcome: what stopped each component, and what other sizes would buy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...offload.cards import CARDS, Card
from ...offload.device import GIB
from ..baseline import Baseline, MeasuredPart
from ..choosing.choose import Chosen, choose
from ..choosing.model import (
    Choice,
    Fixed,
    Instance,
    Part,
    PartChoice,
    Place,
    copied_bytes,
    held_in_use,
)
from ..choosing.unfit import Unfit
from ..loop import Outcome
from ..plan import ComponentStop, Explanation, FixedCost, FrontierPoint, HostPlan, Stop, Worth

_FRONTIER_STEPS = 3
"""Card sizes below and above the card's own."""


def explain(outcome: Outcome, card: Card) -> Explanation | None:
    """None where the baseline doesn't run, so that there was nothing to choose from."""
    baseline, instance, chosen = outcome.baseline, outcome.instance, outcome.chosen
    if baseline is None or instance is None:
        return None
    schedule = outcome.schedule
    choice = baseline.choice if schedule is None else baseline.choice_of(schedule)
    binding = binding_place(baseline, None if schedule is None else choice)
    left = None
    if binding is not None:
        left = instance.places[binding].room_bytes - instance.device_bytes(choice, binding)
    seconds = instance.seconds(choice)
    return Explanation(
        binding_phase=None if binding is None else instance.places[binding].phase,
        binding_shape=None if binding is None else instance.places[binding].shape,
        left_bytes=left,
        stops=tuple(_stops(baseline, instance, choice)),
        one_more_gib=_worth(instance, choice),
        frontier=tuple(_frontier(baseline, instance, choice, card)),
        fixed=tuple(_fixed_costs(baseline, instance, seconds)),
        host=_host(baseline, choice),
        copy_s=seconds,
        baseline_copy_s=instance.seconds(baseline.choice),
        bound_s=seconds if chosen is None else min(chosen.bound_s, seconds),
        proven=chosen is not None and chosen.proven,
        unfit=_unfit(instance) if schedule is None else None,
    )


def everything(baseline: Baseline) -> Choice:
    """All that could be held is held: layers that run in a use, or what was declared."""
    return tuple(
        _whole(part, numbers, chosen)
        for part, numbers, chosen in zip(
            baseline.parts, baseline.instance.parts, baseline.choice, strict=True
        )
    )


def _whole(part: MeasuredPart, numbers: Part, chosen: PartChoice) -> PartChoice:
    uses = range(len(part.uses))
    if numbers.fixed.retained is not None:
        counts = tuple(numbers.fixed.retained for _ in uses)
    else:
        counts = tuple(
            tuple(each.count if each.runs[u] else 0 for each in part.classes) for u in uses
        )
    return PartChoice(counts, counts, (True,) * len(part.uses), chosen.mode)


def binding_place(baseline: Baseline, chosen: Choice | None) -> Place | None:
    """Where the plan leaves the least; with nothing retained, where everything together would
    lack the most."""
    instance = baseline.instance
    choice = everything(baseline) if chosen is None else chosen
    return min(
        range(len(instance.places)),
        key=lambda p: instance.places[p].room_bytes - instance.device_bytes(choice, p),
        default=None,
    )


def _stops(baseline: Baseline, instance: Instance, choice: Choice) -> Iterator[ComponentStop]:
    for number, part in enumerate(baseline.parts):
        if part.stays and part.bytes.fixed is None:
            continue
        chosen = choice[number]
        for u, use in enumerate(part.uses):
            running = [each.count if each.runs[u] else 0 for each in part.classes]
            held = held_in_use(
                instance.parts[number], chosen, u, instance.parts[number].uses[u].most_passes
            )
            step = _step(part, instance.parts[number], chosen, u)
            told = _why(baseline, instance, choice, number, step)
            yield ComponentStop(
                component=part.component,
                phase=use.phase,
                retained_layers=sum(chosen.retained[u]),
                running_layers=sum(running),
                resident_layers=sum(held),
                passes=instance.parts[number].uses[u].valued_passes,
                stop=told[0],
                limiting_phase=None if told[1] is None else instance.places[told[1]].phase,
                limiting_shape=None if told[1] is None else instance.places[told[1]].shape,
                step_bytes=told[2],
                short_bytes=told[3],
            )


_Told = tuple[Stop, Place | None, int | None, int | None]


def _why(
    baseline: Baseline, instance: Instance, choice: Choice, number: int, step: PartChoice | None
) -> _Told:
    part = baseline.parts[number]
    if step is None:
        whole = not part.stays and (part.sized or not part.left_out)
        return Stop.WHOLE if whole else Stop.FIXED, None, None, None
    grown = (*choice[:number], step, *choice[number + 1 :])
    taken = [
        instance.device_bytes(grown, place) - instance.device_bytes(choice, place)
        for place in range(len(instance.places))
    ]
    shorts = [
        instance.device_bytes(grown, place) - room.room_bytes
        for place, room in enumerate(instance.places)
    ]
    worst = max(range(len(shorts)), key=shorts.__getitem__)
    if shorts[worst] > 0:
        alone = (*baseline.choice[:number], step, *baseline.choice[number + 1 :])
        if instance.device_bytes(grown, worst) <= baseline.instance.places[worst].room_bytes:
            stop = Stop.REFUTED
        else:
            stop = Stop.OUTBID if instance.fits(alone) else Stop.ROOM
        return stop, worst, taken[worst], shorts[worst]
    if instance.seconds(grown) >= instance.seconds(choice):
        return Stop.WORTHLESS, None, None, None
    if not instance.fits(grown):
        return Stop.REFUTED, None, None, None
    # It fits, and saves less than the 1 % that is given up for fewer bytes.
    return Stop.WORTHLESS, None, None, None


def _step(part: MeasuredPart, numbers: Part, chosen: PartChoice, use: int) -> PartChoice | None:
    """One more: the smallest running layer that isn't retained, or what is declared."""
    if not part.sized:
        if chosen.retains[use]:
            return None
        counts = numbers.fixed.retained or ()
        return _with(chosen, use, counts, counts)
    left = [
        c
        for c, each in enumerate(part.classes)
        if each.runs[use] and chosen.retained[use][c] < each.count
    ]
    if not left:
        return None if chosen.retains[use] else _with(chosen, use, (), ())
    smallest = min(left, key=lambda c: part.classes[c].layer_bytes)
    retained = list(chosen.retained[use])
    retained[smallest] += 1
    resident = [max(a, b) for a, b in zip(chosen.resident[use], retained, strict=True)]
    return _with(chosen, use, resident, retained)


def _with(
    chosen: PartChoice, use: int, resident: Sequence[int], retained: Sequence[int]
) -> PartChoice:
    def put(table: tuple[tuple[int, ...], ...], counts: Sequence[int]) -> Sequence[tuple[int, ...]]:
        return [tuple(counts) if u == use else each for u, each in enumerate(table)]

    return replace(
        chosen,
        resident=tuple(put(chosen.resident, resident)),
        retained=tuple(put(chosen.retained, retained)),
        retains=tuple(u == use or each for u, each in enumerate(chosen.retains)),
    )


def _layers(instance: Instance, choice: Choice) -> int:
    """Layers held across gaps, and those held in uses besides."""
    return sum(
        sum(max(a, b) for a, b in zip(chosen.retained[u], _held(part, chosen, u), strict=True))
        for part, chosen in zip(instance.parts, choice, strict=True)
        for u in range(len(part.uses))
    )


def _held(part: Part, chosen: PartChoice, use: int) -> tuple[int, ...]:
    return held_in_use(part, chosen, use, part.uses[use].most_passes)


def _worth(instance: Instance, choice: Choice) -> Worth | None:
    more = choose(instance.shifted(GIB), start=choice)
    if isinstance(more, Unfit):
        return None
    return Worth(
        layers=_layers(instance, more.choice) - _layers(instance, choice),
        seconds=max(instance.seconds(choice) - more.seconds, 0.0),
    )


def _frontier(
    baseline: Baseline, instance: Instance, choice: Choice, card: Card
) -> Iterator[FrontierPoint]:
    """The next sizes of real cards, down and up; what was refuted here says nothing of them."""
    sizes = {each.total_bytes: each.name for each in reversed([*CARDS.values()])}
    smaller = sorted(size for size in sizes if size < card.total_bytes)[-_FRONTIER_STEPS:]
    larger = sorted(size for size in sizes if size > card.total_bytes)[:_FRONTIER_STEPS]
    for size in smaller:
        yield _point(baseline, size, sizes[size], size - card.total_bytes)
    yield _at(baseline, instance, choice, card.total_bytes, card.name, fits=True)
    for size in larger:
        yield _point(baseline, size, sizes[size], size - card.total_bytes)


def _point(baseline: Baseline, size: int, name: str, more_bytes: int) -> FrontierPoint:
    rooms = baseline.rooms(more_bytes)
    fits = all(
        rooms.device_bytes(baseline.choice, place) <= room.room_bytes
        for place, room in enumerate(rooms.places)
    )
    chosen = choose(rooms) if fits else None
    choice = chosen.choice if isinstance(chosen, Chosen) else baseline.choice
    return _at(baseline, rooms, choice, size, name, fits=fits)


def _at(
    baseline: Baseline,
    instance: Instance,
    choice: Choice,
    size: int,
    name: str | None,
    *,
    fits: bool,
) -> FrontierPoint:
    retained = resident = copied = 0
    for number, (part, chosen) in enumerate(zip(instance.parts, choice, strict=True)):
        if baseline.parts[number].stays:
            continue
        for u in range(len(part.uses)):
            kept = chosen.retained[u]
            held = _held(part, chosen, u)
            retained += part.non_layer_bytes * chosen.retains[u]
            for layers, k, h in zip(part.classes, kept, held, strict=True):
                retained += layers.layer_bytes * k
                resident += layers.layer_bytes * max(h - k, 0)
            copied += copied_bytes(part, chosen, u)
    return FrontierPoint(
        capacity_bytes=size,
        card=name,
        fits=fits,
        retained_bytes=retained,
        resident_bytes=resident,
        copy_s=instance.seconds(choice),
        h2d_bytes=copied,
    )


def _fixed_costs(baseline: Baseline, instance: Instance, seconds: float) -> Iterator[FixedCost]:
    for number, part in enumerate(baseline.parts):
        fixed = part.bytes.fixed
        if fixed is None or not part.classes:
            continue
        parts = list(instance.parts)
        parts[number] = replace(instance.parts[number], fixed=Fixed())
        free = choose(replace(instance, parts=tuple(parts)))
        if isinstance(free, Chosen):
            saved = max(seconds - free.seconds, 0.0)
            yield FixedCost(component=part.component, fixed=fixed, seconds=saved)


def _host(baseline: Baseline, choice: Choice) -> HostPlan:
    instance = baseline.instance
    moved = [
        (part, chosen)
        for part, chosen in zip(baseline.parts, choice, strict=True)
        if not part.stays
    ]
    pinned = {part.component: chosen.mode.pinned for part, chosen in moved}
    return HostPlan(
        budget_bytes=instance.host_budget_bytes,
        charged_bytes=sum(
            part.bytes.pinned_charge_bytes for part, chosen in moved if chosen.mode.pinned
        ),
        wanted_bytes=sum(part.bytes.pinned_charge_bytes for part, _ in moved),
        pinned=tuple(name for name, is_pinned in pinned.items() if is_pinned),
        pageable=tuple(name for name, is_pinned in pinned.items() if not is_pinned),
    )


def _unfit(instance: Instance) -> str | None:
    found = choose(instance)
    return str(found) if isinstance(found, Unfit) else None
