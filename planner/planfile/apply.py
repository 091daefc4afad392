"""Verifying a plan file: each plan is applied, swept once, and put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ...offload.cards import custom_card
from ...offload.device import Device
from ...offload.errors import InputError, StalePlanError
from ...offload.simulated.card import SimulatedCard
from ...phases.declaration import Declaration, ResidencyMode
from ...phases.diffusers import DiffusersPipeline
from ...phases.family import find_family
from ...phases.limit import Limit
from ...phases.pretrained import is_pretrained, load_pretrained
from ...phases.shape import Shape
from ..event import Event
from ..hardware import Hardware
from ..options import Mode, Options
from ..plan import Attempt, Plan, Status, Verdict
from ..ranks.agreement import Solo
from ..report import Report
from ..request import Listener, Progress
from ..startup import Startup
from .fingerprint import Fingerprint


@dataclass(frozen=True, slots=True)
class Applied:
    plan: Plan
    holds: bool
    refutation: Attempt | None
    """What the sweep said, where it doesn't hold."""


def apply_plans(
    path: Path, *, device: str | None, tiny: bool, listen: Listener = lambda progress: None
) -> tuple[Applied, ...]:
    """Of each plan in the file, in a fresh pipeline: a simulated one on its simulated card, one for
    a real card on `device`. Everything is put back.

    Raises PlanFileError, StalePlanError with the first difference, and InputError where there is
    nothing to apply, or a plan needs a device and none is named.
    """
    report = Report.read(path)
    plans = [plan for plan in report.plans if plan.status is Status.COMMITTED]
    if not plans:
        raise InputError(
            f"{path} has no plan that retains anything",
            hint="`residency show` says why; there is nothing to apply",
        )
    return tuple(_apply(path, report.pipeline, plan, device, tiny, listen) for plan in plans)


def _apply(
    path: Path, name: str, plan: Plan, device: str | None, tiny: bool, listen: Listener
) -> Applied:
    known = plan.fingerprint
    if known is None:
        raise StalePlanError(
            f"{path} doesn't say what the plan for {plan.card} holds for", hint="plan again"
        )

    def tell(doing: Event | str) -> None:
        listen(Progress(plan.card, str(doing)))

    tell(f"building {name}")
    is_simulated = plan.device == "simulated"
    pipeline = _pipeline(name, tiny=tiny, virtual=is_simulated and not tiny)
    with _device(plan, device, tiny) as card:
        startup = Startup(
            pipeline,
            Hardware.of(card),
            tuple(Shape.parse(shape) for shape in known.envelope),
            None,
            Options(
                margin_bytes=known.margin_bytes, prefetch=known.prefetch, plan=path, attempts=0
            ),
            Limit(),
            tell,
            Solo(),
        )
        startup.declarations = _declarations(known)
        startup.sized = frozenset(d.component for d in known.declarations if d.sized)
        Report.read(path).plan_under(startup.fingerprint(), str(path))
        settled = startup.run(Mode.VERIFY)
        if settled.outcome.failure is None:
            settled.outcome.close()
    refuted = [a for a in settled.plan.attempts if a.verdict is not Verdict.ACCEPTED]
    gc.collect()
    if settled.verified:
        return Applied(plan, True, None)
    return Applied(plan, False, refuted[0] if refuted else None)


def _pipeline(name: str, *, tiny: bool, virtual: bool) -> DiffusersPipeline:
    if is_pretrained(name):
        return load_pretrained(name)
    family = find_family(name, tiny=tiny)
    built = family.build(virtual=virtual)
    return DiffusersPipeline(built, name=family.name, request=family.request)


@contextmanager
def _device(plan: Plan, device: str | None, tiny: bool) -> Iterator[Device | str]:
    if plan.device != "simulated":
        if device is None:
            raise InputError(
                f"the plan for {plan.card} is for a real card", hint="name it: --device cuda:0"
            )
        yield device
        return
    card = replace(custom_card(plan.capacity_bytes), name=plan.card)
    with SimulatedCard(
        card,
        virtual=not tiny,
        allocator="exact" if tiny else "caching",
        context_bytes=plan.context_bytes,
        others_bytes=plan.others_bytes,
    ) as simulated:
        yield simulated


def _declarations(known: Fingerprint) -> dict[str, Declaration]:
    return {
        each.component: Declaration(ResidencyMode(each.mode), each.resident_layers)
        for each in known.declarations
    }
