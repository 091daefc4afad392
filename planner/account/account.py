"""The account of an outcome: the plan, with its reasons and evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ...offload.cards import Card
from ...phases.graph import ComponentUse, Headroom
from ...phases.host import ComponentBytes, Failure
from ...phases.schedule import NOTHING
from ..baseline import Baseline, MeasuredPart
from ..choosing.model import Choice, Place, copied_bytes, copy_seconds
from ..fingerprint import Fingerprint
from ..loop import Outcome, Try
from ..plan import (
    Attempt,
    BytesPerRequest,
    ComponentPlan,
    Infeasible,
    PhasePlan,
    Plan,
    Reason,
    SetPlan,
    ShapePlan,
    UsePlan,
)
from ..proof import Settings
from .explain import binding_place, everything, explain

# A reason, and where it applies: bytes short, phase, shape.
_Stop = tuple[Reason, int | None, str | None, str | None]
_NOWHERE = (None, None, None)


def account(
    outcome: Outcome,
    settings: Settings,
    card: Card,
    needs: Sequence[Headroom] = (),
) -> Plan:
    """The plan for an outcome.

    `needs`: the headroom of each phase where the baseline doesn't fit, and it was measured what
    it would take.
    """
    host, baseline = outcome.host, outcome.baseline
    reading = host.read()
    pricing = settings.pricing if baseline is None else baseline.pricing
    components = host.components()
    return Plan(
        card=card.name,
        capacity_bytes=reading.total_bytes,
        others_bytes=reading.others_bytes,
        context_bytes=reading.context_bytes,
        margin_bytes=settings.margin_bytes,
        status=outcome.status,
        components=tuple(map(_component, components)),
        shapes=tuple(_shapes(outcome)),
        schedule=NOTHING if baseline is None else baseline.schedule(_choice(outcome, baseline)),
        uses=() if baseline is None else tuple(_uses(outcome, baseline)),
        phases=tuple(_phases(outcome, outcome.headrooms or needs)),
        attempts=() if baseline is None else tuple(_attempts(outcome, baseline)),
        infeasible=_infeasible(outcome, needs),
        h2d_bytes_per_request=_bytes_per_request(outcome),
        copy_bytes_per_s=pricing.bytes_per_s,
        copy_rate_source=pricing.source,
        sizing="auto" if any(each.sized for each in components) else "declared",
        explanation=explain(outcome, card),
        device="simulated" if host.traits.simulated else host.identity.name,
        fingerprint=Fingerprint.of(
            host,
            margin_bytes=settings.margin_bytes,
            world_size=settings.agreement.world_size,
        ),
    )


def _choice(outcome: Outcome, baseline: Baseline) -> Choice:
    """What is retained, or would be."""
    return baseline.choice if outcome.schedule is None else baseline.choice_of(outcome.schedule)


def _component(each: ComponentBytes) -> ComponentPlan:
    return ComponentPlan(
        name=each.name,
        residency=each.residency,
        resident_layers=each.resident_layers,
        total_layers=each.total_layers,
        weight_bytes=each.weight_bytes,
        non_layer_bytes=each.non_layer_bytes,
    )


def _shapes(outcome: Outcome) -> Iterator[ShapePlan]:
    if outcome.baseline is None:
        for shape in outcome.host.shapes:
            yield ShapePlan(asked=str(shape), run=None)
        return
    for run in outcome.baseline.sweep.runs:
        yield ShapePlan(asked=str(run.asked), run=run.run.size)


def _uses(outcome: Outcome, baseline: Baseline) -> Iterator[UsePlan]:
    by_use = {
        use.at: (number, u)
        for number, part in enumerate(baseline.parts)
        for u, use in enumerate(part.uses)
    }
    for use in outcome.host.graph.uses:
        number, u = by_use[use.at]
        if baseline.parts[number].stays:
            yield _resident_use(baseline.parts[number], use)
        else:
            yield _streamed_use(outcome, baseline, use, number, u)


def _resident_use(part: MeasuredPart, use: ComponentUse) -> UsePlan:
    return UsePlan(
        phase=use.phase,
        component=use.component,
        retain_resident_layers=False,
        resident_layers=part.bytes.resident_layers,
        retained_layers=0,
        total_layers=part.bytes.total_layers,
        retained_bytes=0,
        saved_h2d_bytes=0,
        saved_s=0.0,
        reason=Reason.RESIDENT,
        shortfall_bytes=None,
        limiting_phase=None,
        limiting_shape=None,
    )


def _streamed_use(
    outcome: Outcome, baseline: Baseline, use: ComponentUse, number: int, u: int
) -> UsePlan:
    choice = _choice(outcome, baseline)
    part, numbers, chosen = baseline.parts[number], baseline.instance.parts[number], choice[number]
    nothing = baseline.choice[number]
    told = chosen if chosen.retains[u] else everything(baseline)[number]
    saved = sum(
        copied_bytes(numbers, nothing, each) - copied_bytes(numbers, told, each)
        for each in range(len(part.uses))
    )
    reason, shortfall, phase, shape = _reason(outcome, baseline, use, number, u)
    return UsePlan(
        phase=use.phase,
        component=use.component,
        retain_resident_layers=chosen.retains[u],
        resident_layers=len(part.resident(chosen, u)) if part.sized else part.bytes.resident_layers,
        retained_layers=len(part.retained(chosen, u)) if chosen.retains[u] else 0,
        total_layers=part.bytes.total_layers,
        retained_bytes=numbers.non_layer_bytes
        + sum(c.layer_bytes * n for c, n in zip(part.classes, told.retained[u], strict=True)),
        saved_h2d_bytes=saved,
        saved_s=copy_seconds(numbers, nothing) - copy_seconds(numbers, told),
        reason=reason,
        shortfall_bytes=shortfall,
        limiting_phase=phase,
        limiting_shape=shape,
    )


def _reason(outcome: Outcome, baseline: Baseline, use: ComponentUse, number: int, u: int) -> _Stop:
    choice = _choice(outcome, baseline)
    whole = everything(baseline)[number]
    if choice[number].retains[u]:
        all_of_it = choice[number].retained[u] == whole.retained[u]
        return Reason.RETAINED if all_of_it else Reason.PARTLY_RETAINED, *_NOWHERE
    alone = (*choice[:number], whole, *choice[number + 1 :])
    instance = baseline.instance
    if instance.seconds(alone) >= instance.seconds(choice):
        return Reason.NOTHING_SAVED, *_NOWHERE
    for each in outcome.tries:
        hold = each.schedule.hold(*use.at)
        if each.rolled_back and hold is not None and hold.retain_resident_layers:
            at = each.judgement
            return Reason.REFUTED, each.shortfall_bytes, at.phase, at.shape
    shortage = instance.shortage(alone)
    if shortage is None:
        return Reason.MARGINAL, *_NOWHERE
    room = instance.places[shortage.place]
    others = baseline.choice
    fits_alone = instance.fits((*others[:number], whole, *others[number + 1 :]))
    reason = Reason.OUTBID if fits_alone else Reason.NO_HEADROOM
    return reason, shortage.short_bytes, room.phase, room.shape


def _phases(outcome: Outcome, headrooms: Sequence[Headroom]) -> Iterator[PhasePlan]:
    baseline = outcome.baseline
    if baseline is None:
        binding = min(
            range(len(headrooms)), key=lambda p: headrooms[p].headroom_bytes, default=None
        )
    else:
        retained = None if outcome.schedule is None else _choice(outcome, baseline)
        binding = binding_place(baseline, retained)
    for place, headroom in enumerate(headrooms):
        yield PhasePlan(
            name=headroom.phase,
            shape=str(headroom.shape),
            peak_bytes=headroom.peak_bytes,
            headroom_bytes=headroom.headroom_bytes,
            retained_bytes=_added(outcome, place),
            learnt_bytes=_learnt(outcome, place),
            binding=place == binding,
        )


def _learnt(outcome: Outcome, place: Place) -> int:
    baseline, instance = outcome.baseline, outcome.instance
    if baseline is None or instance is None:
        return 0
    return baseline.instance.places[place].room_bytes - instance.places[place].room_bytes


def _added(outcome: Outcome, place: Place) -> int:
    """Device bytes that the plan has in a place beyond the baseline's."""
    baseline = outcome.baseline
    if baseline is None or outcome.schedule is None:
        return 0
    instance = baseline.instance
    before = instance.device_bytes(baseline.choice, place)
    return instance.device_bytes(_choice(outcome, baseline), place) - before


def _attempts(outcome: Outcome, baseline: Baseline) -> Iterator[Attempt]:
    return (_attempt(baseline, each) for each in outcome.tries)


def _attempt(baseline: Baseline, each: Try) -> Attempt:
    shortage, judgement = each.shortage, each.judgement
    least = max(each.comparisons, key=lambda found: found.slower_s, default=None)
    return Attempt(
        retained=each.schedule.retaining,
        sets=tuple(_sets(baseline, baseline.choice_of(each.schedule))),
        beyond_model=shortage is not None,
        predicted_shortfall_bytes=0 if shortage is None else shortage.short_bytes,
        verdict=judgement.verdict,
        phase=judgement.phase,
        shape=judgement.shape,
        shortfall_bytes=each.shortfall_bytes,
        detail=judgement.detail,
        neighbour_bytes=judgement.neighbour_bytes,
        seconds=None if least is None else median(least.candidate_s),
        baseline_seconds=None if least is None else median(least.baseline_s),
        rolled_back=each.rolled_back,
    )


def _sets(baseline: Baseline, choice: Choice) -> Iterator[SetPlan]:
    for part, chosen in zip(baseline.parts, choice, strict=True):
        if part.stays:
            continue
        for u, use in enumerate(part.uses):
            yield SetPlan(
                component=part.component,
                phase=use.phase,
                resident_layers=len(part.resident(chosen, u)),
                retained_layers=len(part.retained(chosen, u)) if chosen.retains[u] else 0,
            )


def _infeasible(outcome: Outcome, needs: Sequence[Headroom]) -> Infeasible | None:
    failure = outcome.failure
    if failure is None:
        return None
    seen = None if failure.shortfall is None else failure.shortfall.short_bytes
    return Infeasible(
        phase=failure.phase or "start",
        shape=None if failure.shape is None else str(failure.shape),
        shortfall_bytes=max([*_short_at(failure, needs), *([] if seen is None else [seen])]),
        detail=failure.detail,
    )


def _short_at(failure: Failure, needs: Sequence[Headroom]) -> Iterator[int]:
    """What each place lacks that the failure may be of; before any phase, each may be."""
    yield 0
    for need in needs:
        if failure.shape is None or (need.phase, need.shape) == (failure.phase, failure.shape):
            yield -(need.headroom_bytes + need.margin_bytes)


def _bytes_per_request(outcome: Outcome) -> BytesPerRequest | None:
    """Of the shape whose baseline copies the most."""
    baseline, planned = outcome.baseline, outcome.planned
    if baseline is None or planned is None:
        return None
    before = baseline.schedule(baseline.choice)
    after = outcome.committed or before
    before_bytes, after_bytes = max(
        (
            baseline.h2d_bytes(old.asked, old.h2d_bytes, before),
            baseline.h2d_bytes(new.asked, new.h2d_bytes, after),
        )
        for old, new in zip(baseline.sweep.runs, planned.runs, strict=True)
    )
    if outcome.proposed is not None:
        after_bytes = before_bytes - _saved_bytes(baseline, _choice(outcome, baseline))
    return BytesPerRequest(baseline=before_bytes, planned=after_bytes)


def _saved_bytes(baseline: Baseline, choice: Choice) -> int:
    """By the model, of the request whose seconds are counted."""
    return sum(
        copied_bytes(part, old, use) - copied_bytes(part, new, use)
        for part, old, new in zip(baseline.instance.parts, baseline.choice, choice, strict=True)
        for use in range(len(part.uses))
    )
