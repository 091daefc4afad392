"""Planning without a card: a family's pipeline on simulated cards, and the report of it."""

from __future__ import annotations

import gc
from importlib.metadata import version

from ..offload.cards import Card
from ..offload.errors import InputError
from ..offload.simulated.card import CONTEXT_BYTES, SimulatedCard
from ..phases.declaration import declare
from ..phases.diffusers import DiffusersPipeline
from ..phases.family import Family, find_family
from ..phases.shape import Shape
from .account import account
from .plan import Plan
from .report import Report
from .request import Listener, PlanRequest, Progress
from .settle import Settings, settle


def plan(request: PlanRequest, listen: Listener = lambda progress: None) -> Report:
    """The loop on each card in turn, from a fresh pipeline each, all put back afterwards.

    Raises InputError where a name, a shape or a number of the request can't be.
    """
    if not request.cards:
        raise InputError("no card is named", hint="give --card or --capacity")
    if request.margin_bytes < 0 or request.explore < 0:
        raise InputError(
            f"margin is {request.margin_bytes} bytes and explore {request.explore}",
            hint="both are 0 or more",
        )
    family = find_family(request.pipeline, tiny=request.tiny)
    shapes = tuple(shape.completed(family.request) for shape in request.shapes)
    shapes = shapes or (family.request,)
    for shape in shapes:
        family.check(shape)
    plans = [_plan_card(request, family, shapes, card, listen) for card in request.cards]
    return Report(
        residency_version=version("residency"), pipeline=request.pipeline, plans=tuple(plans)
    )


def _plan_card(
    request: PlanRequest, family: Family, shapes: tuple[Shape, ...], card: Card, listen: Listener
) -> Plan:
    def tell(doing: str) -> None:
        listen(Progress(card.name, doing))

    context = CONTEXT_BYTES if request.context_bytes is None else request.context_bytes
    device = SimulatedCard(
        card,
        virtual=not request.tiny,
        allocator="exact" if request.tiny else "caching",
        context_bytes=context,
        others_bytes=request.others_bytes,
    )
    tell(f"building {family.name}")
    pipeline = DiffusersPipeline(family.build(), name=family.name)
    declarations = declare(
        pipeline.components, request.component_residency, request.resident_layers
    )
    settings = Settings(
        shapes, declarations, request.margin_bytes, request.explore, request.prefetch
    )
    with device:
        settlement = settle(pipeline, device, settings, listen=tell)
        made = account(settlement, settings, card)
        if settlement.failure is None:
            settlement.close()
        del settlement
        gc.collect()
        device.check_integrity()
    return made
