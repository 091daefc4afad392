"""The account of a settlement: the plan, with its reasons and evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..offload.cards import Card
from ..phases.headroom import Headroom
from ..phases.use import ComponentUse
from ..phases.warmup import Failure
from .candidates import Candidate, Option
from .plan import (
    Attempt,
    BytesPerRequest,
    ComponentPlan,
    Infeasible,
    PhasePlan,
    Plan,
    Reason,
    ShapePlan,
    Status,
    UsePlan,
    Verdict,
)
from .settle import Settings, Settlement, Try

COPY_EFFICIENCY = 0.8
"""Of the bus's raw rate, what copies from pinned memory usually reach. Not measured here."""


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
    rate = card.pcie_bytes_per_s * COPY_EFFICIENCY
    return Plan(
        card=card.name,
        capacity_bytes=reading.total_bytes,
        others_bytes=reading.others_bytes,
        context_bytes=reading.context_bytes,
        margin_bytes=settings.margin_bytes,
        status=_status(settlement),
        components=tuple(_components(settlement)),
        shapes=tuple(_shapes(settlement, settings)),
        uses=tuple(_uses(settlement, rate)),
        phases=tuple(_phases(settlement, settlement.headrooms or needs)),
        attempts=tuple(_attempt(each) for each in settlement.tries),
        infeasible=_infeasible(settlement, needs),
        h2d_bytes_per_request=_bytes_per_request(settlement),
        copy_bytes_per_s=rate,
        copy_rate_source=(
            f"assumed: {COPY_EFFICIENCY:.0%} of PCIe {card.pcie_generation}.0 x{card.pcie_lanes}, "
            "no copy hidden behind compute"
        ),
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


def _shapes(settlement: Settlement, settings: Settings) -> Iterator[ShapePlan]:
    if settlement.baseline is None:
        for shape in settlement.installation.warmup.shapes:
            yield ShapePlan(asked=str(shape), run=None)
        return
    for run in settlement.baseline.runs:
        yield ShapePlan(asked=str(run.asked), run=run.run.size)


def _uses(settlement: Settlement, rate: float) -> Iterator[UsePlan]:
    if settlement.failure is not None:
        return
    installation = settlement.installation
    options = {option.use: option for option in settlement.options}
    for use, option in _with_options(installation.graph.uses, options):
        placement = installation.placements[use.component]
        reason, shortfall, phase, shape = _reason(settlement, option)
        saved = 0 if option is None else option.saved_bytes
        yield UsePlan(
            phase=use.phase,
            component=use.component,
            retain_resident_layers=use.retain_resident_layers,
            resident_layers=placement.resident_layers,
            total_layers=placement.total_layers,
            retained_bytes=placement.retained_bytes,
            saved_h2d_bytes=saved,
            saved_s=saved / rate,
            reason=reason,
            shortfall_bytes=shortfall,
            limiting_phase=phase,
            limiting_shape=shape,
        )


def _with_options(
    uses: Iterator[ComponentUse], options: dict[ComponentUse, Option]
) -> Iterator[tuple[ComponentUse, Option | None]]:
    by_place = {(use.phase, use.component): option for use, option in options.items()}
    for use in uses:
        yield use, by_place.get((use.phase, use.component))


def _reason(settlement: Settlement, option: Option | None) -> _Stop:
    if option is None:
        return Reason.RESIDENT, *_NOWHERE
    committed, limits = settlement.committed, settlement.limits
    assert limits is not None
    if committed is not None and option in committed.options:
        return Reason.RETAINED, *_NOWHERE
    if not option.saved_bytes:
        return Reason.NOTHING_SAVED, *_NOWHERE
    alone = Candidate((option,))
    for each in settlement.tries:
        if each.candidate == alone and each.judgement.verdict is not Verdict.ACCEPTED:
            at = each.judgement
            return Reason.REFUTED, each.shortfall_bytes, at.phase, at.shape
    shortage = limits.shortage(alone)
    if shortage is not None:
        phase, shape = shortage.place
        return Reason.NO_HEADROOM, shortage.short_bytes, phase, str(shape)
    if limits.is_refuted(alone):
        return Reason.REFUTED, *_NOWHERE
    return Reason.OUTBID, *_NOWHERE


def _phases(settlement: Settlement, headrooms: Sequence[Headroom]) -> Iterator[PhasePlan]:
    binding = _binding(settlement, headrooms)
    committed = settlement.committed
    for headroom in headrooms:
        place = (headroom.phase, headroom.shape)
        yield PhasePlan(
            name=headroom.phase,
            shape=str(headroom.shape),
            peak_bytes=headroom.peak_bytes,
            headroom_bytes=headroom.headroom_bytes,
            retained_bytes=0 if committed is None else committed.demand_bytes(place),
            binding=headroom is binding,
        )


def _binding(settlement: Settlement, headrooms: Sequence[Headroom]) -> Headroom | None:
    """Where all options together would lack the most, or have the least left over."""
    everything = Candidate(settlement.options)

    def left(headroom: Headroom) -> int:
        demand = everything.demand_bytes((headroom.phase, headroom.shape))
        return headroom.headroom_bytes - demand

    return min(headrooms, key=left, default=None)


def _attempt(each: Try) -> Attempt:
    shortage, judgement = each.shortage, each.judgement
    return Attempt(
        retained=each.candidate.components,
        beyond_model=shortage is not None,
        predicted_shortfall_bytes=0 if shortage is None else shortage.short_bytes,
        verdict=judgement.verdict,
        phase=judgement.phase,
        shape=judgement.shape,
        shortfall_bytes=each.shortfall_bytes,
        detail=judgement.detail,
        rolled_back=each.rolled_back,
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
    baseline, planned = settlement.baseline, settlement.planned
    if baseline is None or planned is None:
        return None
    installation = settlement.installation

    def served(runs: Sequence[tuple[int, int]]) -> BytesPerRequest:
        most = max(runs)
        return BytesPerRequest(baseline=most[0], planned=most[1])

    return served(
        [
            (
                installation.h2d_bytes(before.asked, before.h2d_bytes),
                installation.h2d_bytes(after.asked, after.h2d_bytes),
            )
            for before, after in zip(baseline.runs, planned.runs, strict=True)
        ]
    )
