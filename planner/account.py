"""The account of an outcome: the plan, with its reasons and evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from ..offload.cards import Card
from ..phases.headroom import Headroom
from ..phases.use import ComponentUse
from ..phases.warmup import Failure
from .candidate import Candidate
from .choosing.instance import Choice
from .choosing.part import Place, copied_bytes, copy_seconds
from .explain import binding_place, everything, explain
from .measured import Measured
from .outcome import Outcome, Try
from .plan import (
    Attempt,
    BytesPerRequest,
    ComponentPlan,
    Infeasible,
    PhasePlan,
    Plan,
    Reason,
    SetPlan,
    ShapePlan,
    Status,
    UsePlan,
)
from .planfile.fingerprint import Fingerprint
from .settings import Settings

# A reason, and where it applies: bytes short, phase, shape.
_Stop = tuple[Reason, int | None, str | None, str | None]
_NOWHERE = (None, None, None)


def account(
    outcome: Outcome,
    settings: Settings,
    card: Card,
    needs: Sequence[Headroom] = (),
) -> Plan:
    """The plan for a outcome on a simulated card.

    `needs`: the headroom of each phase where the baseline doesn't fit, and it was measured what
    it would take.
    """
    device = outcome.installation.device
    reading = device.read()
    pricing = settings.pricing if outcome.measured is None else outcome.measured.pricing
    return Plan(
        card=card.name,
        capacity_bytes=reading.total_bytes,
        others_bytes=reading.others_bytes,
        context_bytes=reading.context_bytes,
        margin_bytes=settings.margin_bytes,
        status=_status(outcome),
        components=tuple(_components(outcome)),
        shapes=tuple(_shapes(outcome)),
        uses=tuple(_uses(outcome)),
        phases=tuple(_phases(outcome, outcome.headrooms or needs)),
        attempts=tuple(_attempt(outcome, each) for each in outcome.tries),
        infeasible=_infeasible(outcome, needs),
        h2d_bytes_per_request=_bytes_per_request(outcome),
        copy_bytes_per_s=pricing.bytes_per_s,
        copy_rate_source=pricing.source,
        sizing="auto" if settings.sized else "declared",
        explanation=explain(outcome, card),
        device="simulated" if device.traits.simulated else device.identity.name,
        fingerprint=Fingerprint.of(
            outcome.installation.pipeline,
            device,
            settings.declarations,
            settings.shapes,
            margin_bytes=settings.margin_bytes,
            prefetch=settings.prefetch,
            sized=settings.sized,
            world_size=settings.agreement.world_size,
        ),
    )


def _status(outcome: Outcome) -> Status:
    if outcome.failure is not None:
        return Status.INFEASIBLE
    if outcome.proposed is not None:
        return Status.PROPOSED
    return Status.BASELINE_ONLY if outcome.committed is None else Status.COMMITTED


def _components(outcome: Outcome) -> Iterator[ComponentPlan]:
    installation = outcome.installation
    for name, placement in installation.placements.items():
        yield ComponentPlan(
            name=name,
            residency=installation.declarations[name].mode,
            resident_layers=placement.resident_layers,
            total_layers=placement.total_layers,
            weight_bytes=placement.weight_bytes,
            non_layer_bytes=placement.non_layer_bytes,
        )


def _shapes(outcome: Outcome) -> Iterator[ShapePlan]:
    if outcome.baseline is None:
        for shape in outcome.installation.warmup.shapes:
            yield ShapePlan(asked=str(shape), run=None)
        return
    for run in outcome.baseline.runs:
        yield ShapePlan(asked=str(run.asked), run=run.run.size)


def _uses(outcome: Outcome) -> Iterator[UsePlan]:
    measured = outcome.measured
    if measured is None:
        return
    streamed = {
        (use.phase, use.component): (number, u)
        for number, part in enumerate(measured.parts)
        if not part.stays
        for u, use in enumerate(part.uses)
    }
    for use in outcome.installation.graph.uses:
        at = streamed.get((use.phase, use.component))
        if at is None:
            yield _resident_use(outcome, use)
        else:
            yield _streamed_use(outcome, measured, use, *at)


def _resident_use(outcome: Outcome, use: ComponentUse) -> UsePlan:
    placement = outcome.installation.placements[use.component]
    return UsePlan(
        phase=use.phase,
        component=use.component,
        retain_resident_layers=False,
        resident_layers=placement.resident_layers,
        retained_layers=0,
        total_layers=placement.total_layers,
        resident_set=tuple(sorted(placement.resident_set)),
        retained_set=(),
        prefetch=0,
        pinned=False,
        retained_bytes=0,
        saved_h2d_bytes=0,
        saved_s=0.0,
        reason=Reason.RESIDENT,
        shortfall_bytes=None,
        limiting_phase=None,
        limiting_shape=None,
    )


def _streamed_use(
    outcome: Outcome,
    measured: Measured,
    use: ComponentUse,
    number: int,
    u: int,
) -> UsePlan:
    choice = measured.baseline if outcome.candidate is None else outcome.candidate.choice
    part, numbers, chosen = measured.parts[number], measured.instance.parts[number], choice[number]
    told = chosen if chosen.retains[u] else everything(measured)[number]
    saved = sum(
        copied_bytes(numbers, measured.baseline[number], each) - copied_bytes(numbers, told, each)
        for each in range(len(part.uses))
    )
    reason, shortfall, phase, shape = _reason(outcome, measured, use, number, u)
    return UsePlan(
        phase=use.phase,
        component=use.component,
        retain_resident_layers=use.retain_resident_layers,
        resident_layers=len(part.resident(chosen, u))
        if part.sized
        else part.placement.resident_layers,
        retained_layers=len(part.retained(chosen, u)) if chosen.retains[u] else 0,
        total_layers=part.placement.total_layers,
        resident_set=tuple(sorted(part.resident(chosen, u))) if any(chosen.resident[u]) else (),
        retained_set=tuple(sorted(part.retained(chosen, u))) if chosen.retains[u] else (),
        prefetch=chosen.mode.prefetch,
        pinned=chosen.mode.pinned,
        retained_bytes=numbers.non_layer_bytes
        + sum(c.layer_bytes * n for c, n in zip(part.classes, told.retained[u], strict=True)),
        saved_h2d_bytes=saved,
        saved_s=copy_seconds(numbers, measured.baseline[number]) - copy_seconds(numbers, told),
        reason=reason,
        shortfall_bytes=shortfall,
        limiting_phase=phase,
        limiting_shape=shape,
    )


def _reason(outcome: Outcome, measured: Measured, use: ComponentUse, number: int, u: int) -> _Stop:
    choice = measured.baseline if outcome.candidate is None else outcome.candidate.choice
    whole = everything(measured)[number]
    if choice[number].retains[u]:
        all_of_it = choice[number].retained[u] == whole.retained[u]
        return Reason.RETAINED if all_of_it else Reason.PARTLY_RETAINED, *_NOWHERE
    alone = (*choice[:number], whole, *choice[number + 1 :])
    instance = measured.instance
    if instance.seconds(alone) >= instance.seconds(choice):
        return Reason.NOTHING_SAVED, *_NOWHERE
    at_use = (use.phase, use.component)
    for each in outcome.tries:
        retaining = (t for t in each.candidate.uses if t.retain_resident_layers)
        if each.rolled_back and at_use in [(t.phase, t.component) for t in retaining]:
            at = each.judgement
            return Reason.REFUTED, each.shortfall_bytes, at.phase, at.shape
    shortage = Candidate(alone, ()).shortage(instance)
    if shortage is None:
        return Reason.MARGINAL, *_NOWHERE
    room = instance.places[shortage.place]
    others = measured.baseline
    fits_alone = instance.fits((*others[:number], whole, *others[number + 1 :]))
    reason = Reason.OUTBID if fits_alone else Reason.NO_HEADROOM
    return reason, shortage.short_bytes, room.phase, room.shape


def _phases(outcome: Outcome, headrooms: Sequence[Headroom]) -> Iterator[PhasePlan]:
    measured = outcome.measured
    binding = None if measured is None else binding_place(measured, outcome.candidate)
    if measured is None:
        binding = min(
            range(len(headrooms)), key=lambda p: headrooms[p].headroom_bytes, default=None
        )
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
    measured, instance = outcome.measured, outcome.instance
    if measured is None or instance is None:
        return 0
    return measured.instance.places[place].room_bytes - instance.places[place].room_bytes


def _added(outcome: Outcome, place: Place) -> int:
    """Device bytes that the plan has in a place beyond the baseline's."""
    measured, candidate = outcome.measured, outcome.candidate
    if measured is None or candidate is None:
        return 0
    instance = measured.instance
    before = instance.device_bytes(measured.baseline, place)
    return instance.device_bytes(candidate.choice, place) - before


def _attempt(outcome: Outcome, each: Try) -> Attempt:
    shortage, judgement, measured = each.shortage, each.judgement, outcome.measured
    assert measured is not None
    least = max(each.comparisons, key=lambda found: found.slower_s, default=None)
    return Attempt(
        retained=each.candidate.components,
        sets=tuple(_sets(measured, each.candidate)),
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


def _sets(measured: Measured, candidate: Candidate) -> Iterator[SetPlan]:
    for part, chosen in zip(measured.parts, candidate.choice, strict=True):
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
    baseline, planned, measured = outcome.baseline, outcome.planned, outcome.measured
    if baseline is None or planned is None or measured is None:
        return None
    served = outcome.installation.h2d_bytes
    committed = outcome.committed
    before = [*measured.uses(measured.baseline)]
    after = before if committed is None else committed.uses
    pairs = [
        (served(old.asked, old.h2d_bytes, before), served(new.asked, new.h2d_bytes, after))
        for old, new in zip(baseline.runs, planned.runs, strict=True)
    ]
    before_bytes, after_bytes = max(pairs)
    if outcome.proposed is not None:
        after_bytes = before_bytes - _saved_bytes(measured, outcome.proposed.choice)
    return BytesPerRequest(baseline=before_bytes, planned=after_bytes)


def _saved_bytes(measured: Measured, choice: Choice) -> int:
    """By the model, of the request whose seconds are counted."""
    return sum(
        copied_bytes(part, old, use) - copied_bytes(part, new, use)
        for part, old, new in zip(measured.instance.parts, measured.baseline, choice, strict=True)
        for use in range(len(part.uses))
    )
