"""Planning without a card: a family's pipeline on simulated cards, and the report of it."""

from __future__ import annotations

import gc
from dataclasses import replace

from ..offload.cards import Card
from ..offload.errors import InputError
from ..offload.simulated.card import CONTEXT_BYTES, AllocatorKind, SimulatedCard
from ..phases.declaration import declare, left_to_size
from ..phases.diffusers import DiffusersPipeline
from ..phases.family import Family, find_family
from ..phases.headroom import Headroom
from ..phases.shape import Shape
from .account import account
from .event import Event
from .loop import UNLIMITED_BYTES, run_loop
from .plan import Plan
from .planfile.fingerprint import residency_version
from .pricing import Pricing
from .report import Report
from .request import MARGIN_BYTES, Listener, PlanRequest, Progress
from .settings import Settings


def plan(request: PlanRequest, listen: Listener = lambda progress: None) -> Report:
    """The loop on each card in turn, from a fresh pipeline each, all put back afterwards.

    Raises InputError where a name, a shape or a number of the request can't be.
    """
    if not request.cards:
        raise InputError("no card is named", hint="give --card or --capacity")
    for name in ("margin_bytes", "explore", "prefetch"):
        if (getattr(request, name) or 0) < 0:
            raise InputError(f"{name} is {getattr(request, name)}", hint="it is 0 or more")
    family = find_family(request.pipeline, tiny=request.tiny)
    shapes = request.shapes or (family.request,)
    for shape in shapes:
        family.check(shape)
    plans = [_plan_card(request, family, shapes, card, listen) for card in request.cards]
    return Report(
        residency_version=residency_version(), pipeline=request.pipeline, plans=tuple(plans)
    )


def _plan_card(
    request: PlanRequest, family: Family, shapes: tuple[Shape, ...], card: Card, listen: Listener
) -> Plan:
    def tell(doing: Event | str) -> None:
        listen(Progress(card.name, str(doing)))

    device = _device(request, card)
    tell(f"building {family.name}")
    pipeline = DiffusersPipeline(family.build(), name=family.name, request=family.request)
    declarations = declare(
        pipeline.components, request.component_residency, request.resident_layers
    )
    settings = Settings(
        shapes,
        declarations,
        MARGIN_BYTES if request.margin_bytes is None else request.margin_bytes,
        Pricing.assumed(card, request.exposures, request.host_bytes),
        sized=left_to_size(declarations, request.resident_layers)
        if request.size == "auto"
        else frozenset(),
        explore=request.explore,
        prefetch=request.prefetch,
        previous=_previous(request, card),
    )
    with device:
        outcome = run_loop(pipeline, device, settings, listen=tell)
        if outcome.failure is None:
            made = account(outcome, settings, card)
            outcome.close()
        device.check_integrity()
    if outcome.failure is not None:
        tell("measuring what it would take")
        needs = _needs(request, pipeline, settings, card) if outcome.failure.is_oom else ()
        made = account(outcome, settings, card, needs)
    del outcome
    gc.collect()
    return made


def _previous(request: PlanRequest, card: Card) -> Plan | None:
    if request.previous is None or request.previous.pipeline != request.pipeline:
        return None
    return next((made for made in request.previous.plans if made.card == card.name), None)


def _device(request: PlanRequest, card: Card) -> SimulatedCard:
    context = CONTEXT_BYTES if request.context_bytes is None else request.context_bytes
    allocator: AllocatorKind = "expandable" if request.expandable_segments else "caching"
    return SimulatedCard(
        card,
        virtual=not request.tiny,
        allocator="exact" if request.tiny else allocator,
        context_bytes=context,
        others_bytes=request.others_bytes,
    )


def _needs(
    request: PlanRequest, pipeline: DiffusersPipeline, settings: Settings, card: Card
) -> tuple[Headroom, ...]:
    """The headroom of each phase on `card`, measured on a card without a limit."""
    with _device(request, replace(card, total_bytes=UNLIMITED_BYTES)) as device:
        outcome = run_loop(pipeline, device, replace(settings, explore=0, measure_only=True))
        outcome.close()
        return tuple(
            replace(headroom, capacity_bytes=card.total_bytes) for headroom in outcome.headrooms
        )
