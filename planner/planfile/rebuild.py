"""The fingerprint that a simulated plan would have if it were planned now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...offload.cards import Card, custom_card
from ...offload.errors import InputError
from ...offload.simulated.card import SimulatedCard
from ...phases.declaration import Declaration, ResidencyMode
from ...phases.diffusers import DiffusersPipeline
from ...phases.family import find_family
from ...phases.shape import Shape
from ..plan import Plan
from ..report import Report
from .check import Check, compared
from .fingerprint import Fingerprint


def check_pipeline(report: Report, family: str, cards: Sequence[Card], *, tiny: bool) -> Check:
    """Compare with the family's pipeline, built anew; what the user declared is taken from the
    plan. Each of `cards` is compared with the plan for it, or with the first plan where there is
    none; without cards each plan is compared on its own card.

    Raises InputError where a plan was made on a real card, or there is no plan.
    """
    found = find_family(family, tiny=tiny)
    pairs = [(_plan_for(card, report), card) for card in cards] or [
        (plan, _own_card(plan)) for plan in report.plans
    ]
    for plan, _ in pairs:
        if plan.device != "simulated":
            raise InputError(
                f"the plan for {plan.card} was validated on {plan.device}, not simulated",
                hint="leave --pipeline and --card out: what they build is for simulated cards",
            )
    pipeline = DiffusersPipeline(found.build(), name=found.name, request=found.request)
    checked = tuple(compared(plan, _anew(plan, pipeline, card)) for plan, card in pairs)
    return Check(pipeline=report.pipeline, compared="pipeline", plans=checked)


def _plan_for(card: Card, report: Report) -> Plan:
    if not report.plans:
        raise InputError("the file has no plan", hint="plan again with --out")
    return next((plan for plan in report.plans if plan.card == card.name), report.plans[0])


def _own_card(plan: Plan) -> Card:
    return replace(custom_card(plan.capacity_bytes), name=plan.card)


def _anew(plan: Plan, pipeline: DiffusersPipeline, card: Card) -> Fingerprint | None:
    known = plan.fingerprint
    if known is None:
        return None
    return Fingerprint.of(
        pipeline,
        SimulatedCard(card),
        {
            each.component: Declaration(ResidencyMode(each.mode), each.resident_layers)
            for each in known.declarations
        },
        [Shape.parse(text) for text in known.envelope],
        margin_bytes=known.margin_bytes,
        prefetch=known.prefetch,
        sized=[each.component for each in known.declarations if each.sized],
        world_size=known.world_size,
    )
