"""The account of a settlement: the plan, with its reasons and evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..offload.cards import Card
from ..phases.headroom import Headroom
from ..phases.use import ComponentUse
from ..phases.warmup import Failure
from .candidate import Candidate
from .explain import binding_place, everything, explain
from .measured import Measured
from .part import Place, copied_bytes, copy_seconds
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
from .settle import Settings, Settlement, Try

# A reason, and where it applies: bytes short, phase, shape.
_Stop = tuple[Reason, int | None, str | None, str | None]
_NOWHERE = (None, None, None)


def account(
    settlement: Settlement, settings: Settings, card: Card, needs: Sequence[Headroom] = ()
) -> Plan:
    """The plan for a settlement on a simulated card.

    `needs`: the headroom of each phase where the baseline doesn't fit, and it was measured what
    it would take.
    """
    installation = settlement.installation
    reading = installation.device.read()
    return Plan(
        card=card.name,
        capacity_bytes=reading.total_bytes,
        others_bytes=reading.others_bytes,
        context_bytes=reading.context_bytes,
        margin_bytes=settings.margin_bytes,
        status=_status(settlement),
        components=tuple(_components(settlement)),
        shapes=tuple(_shapes(settlement)),
        uses=tuple(_uses(settlement)),
        phases=tuple(_phases(settlement, settlement.headrooms or needs)),
        attempts=tuple(_attempt(settlement, each) for each in settlement.tries),
        infeasible=_infeasible(settlement, needs),
        h2d_bytes_per_request=_bytes_per_request(settlement),
        copy_bytes_per_s=settings.pricing.bytes_per_s,
        copy_rate_source=settings.pricing.source,
        sizing="auto" if settings.sized else "declared",
        explanation=explain(settlement, card),
        device="simulated",
    )


def _status(settlement: Settlement) -> Status:
    if settlement.failure is not None:
        return Status.INFEASIBLE
    return Status.BASELINE_ONLY if settlement.committed is None else Status.COMMITTED


def _components(settlement: Settlement) -> Iterator[ComponentPlan]:
    installation = settlement.installation
    for name, placement in installation.placements.items():
        yield ComponentPlan(
            name=name,
            residency=installation.declarations[name].mode,
            resident_layers=placement.resident_layers,
            total_layers=placement.total_layers,
            weight_bytes=placement.weight_bytes,
            non_layer_bytes=placement.non_layer_bytes,
        )


def _shapes(settlement: Settlement) -> Iterator[ShapePlan]:
    if settlement.baseline is None:
        for shape in settlement.installation.warmup.shapes:
            yield ShapePlan(asked=str(shape), run=None)
        return
    for run in settlement.baseline.runs:
        yield ShapePlan(asked=str(run.asked), run=run.run.size)


def _uses(settlement: Settlement) -> Iterator[UsePlan]:
    measured = settlement.measured
    if measured is None:
        return
    streamed = {
        (use.phase, use.component): (number, u)
        for number, part in enumerate(measured.parts)
        if not part.stays
        for u, use in enumerate(part.uses)
    }
    for use in settlement.installation.graph.uses:
        at = streamed.get((use.phase, use.component))
        if at is None:
            yield _resident_use(settlement, use)
        else:
            yield _streamed_use(settlement, measured, use, *at)


def _resident_use(settlement: Settlement, use: ComponentUse) -> UsePlan:
    placement = settlement.installation.placements[use.component]
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
    settlement: Settlement,
    measured: Measured,
    use: ComponentUse,
    number: int,
    u: int,
) -> UsePlan:
    choice = measured.baseline if settlement.committed is None else settlement.committed.choice
    part, numbers, chosen = measured.parts[number], measured.instance.parts[number], choice[number]
    told = chosen if chosen.retains[u] else everything(measured)[number]
    saved = sum(
        copied_bytes(numbers, measured.baseline[number], each) - copied_bytes(numbers, told, each)
        for each in range(len(part.uses))
    )
    reason, shortfall, phase, shape = _reason(settlement, measured, use, number, u)
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


def _reason(
    settlement: Settlement, measured: Measured, use: ComponentUse, number: int, u: int
) -> _Stop:
    choice = measured.baseline if settlement.committed is None else settlement.committed.choice
    whole = everything(measured)[number]
    if choice[number].retains[u]:
        all_of_it = choice[number].retained[u] == whole.retained[u]
        return Reason.RETAINED if all_of_it else Reason.PARTLY_RETAINED, *_NOWHERE
    alone = (*choice[:number], whole, *choice[number + 1 :])
    instance = measured.instance
    if instance.seconds(alone) >= instance.seconds(choice):
        return Reason.NOTHING_SAVED, *_NOWHERE
    at_use = (use.phase, use.component)
    for each in settlement.tries:
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


def _phases(settlement: Settlement, headrooms: Sequence[Headroom]) -> Iterator[PhasePlan]:
    measured = settlement.measured
    binding = None if measured is None else binding_place(measured, settlement.committed)
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
            retained_bytes=_added(settlement, place),
            learnt_bytes=_learnt(settlement, place),
            binding=place == binding,
        )


def _learnt(settlement: Settlement, place: Place) -> int:
    measured, instance = settlement.measured, settlement.instance
    if measured is None or instance is None:
        return 0
    return measured.instance.places[place].room_bytes - instance.places[place].room_bytes


def _added(settlement: Settlement, place: Place) -> int:
    """Device bytes that the plan has in a place beyond the baseline's."""
    measured, committed = settlement.measured, settlement.committed
    if measured is None or committed is None:
        return 0
    instance = measured.instance
    before = instance.device_bytes(measured.baseline, place)
    return instance.device_bytes(committed.choice, place) - before


def _attempt(settlement: Settlement, each: Try) -> Attempt:
    shortage, judgement, measured = each.shortage, each.judgement, settlement.measured
    assert measured is not None
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


def _infeasible(settlement: Settlement, needs: Sequence[Headroom]) -> Infeasible | None:
    failure = settlement.failure
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


def _bytes_per_request(settlement: Settlement) -> BytesPerRequest | None:
    """Of the shape whose baseline copies the most."""
    baseline, planned, measured = settlement.baseline, settlement.planned, settlement.measured
    if baseline is None or planned is None or measured is None:
        return None
    served = settlement.installation.h2d_bytes
    committed = settlement.committed
    before = [*measured.uses(measured.baseline)]
    after = before if committed is None else committed.uses
    pairs = [
        (served(old.asked, old.h2d_bytes, before), served(new.asked, new.h2d_bytes, after))
        for old, new in zip(baseline.runs, planned.runs, strict=True)
    ]
    most = max(pairs)
    return BytesPerRequest(baseline=most[0], planned=most[1])
