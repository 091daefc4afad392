"""The loop on simulated cards, or on a card of this machine and put back: what would be retained,
and whether what a plan file retains still holds."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..offload.cards import Card, custom_card
from ..offload.cuda.device import CudaDevice
from ..offload.device import Device, FindingKind
from ..offload.errors import InputError, StalePlanError
from ..offload.hardware import Hardware
from ..offload.simulated.card import CONTEXT_BYTES, AllocatorKind, SimulatedCard
from ..phases.graph import Headroom
from ..phases.hosts import (
    Declared,
    envelope_of,
    family_pipeline,
    host_as,
    host_of,
    load_pipeline,
)
from ..phases.limit import Limit
from ..phases.shape import Shape
from .account.account import account
from .choosing.prices import MARGIN_BYTES, Pricing
from .fingerprint import Fingerprint, residency_version
from .loop import UNLIMITED_BYTES, run_loop
from .plan import Attempt, Plan, Report, Status
from .planfile import read_report
from .proof import Settings
from .ranks.agreement import Solo
from .settlement import Mode, Options, Settled, Startup
from .verdict import Event, Listener, Step, Verdict, ignore

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..phases.host import Host


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Raises InputError, from `plan`, where a name or a number can't be."""

    pipeline: str
    """A family's name; on a real card also a folder that a diffusers pipeline was saved in."""
    cards: tuple[Card, ...]
    shapes: tuple[Shape, ...] = ()
    """The envelope; empty: the request that the model card recommends."""
    component_residency: Mapping[str, str] = field(default_factory=dict)
    resident_layers: Mapping[str, str] = field(default_factory=dict)
    context_bytes: int | None = None
    others_bytes: int = 0
    margin_bytes: int | None = None
    """None: 256 MiB, and on a real card what programs of its desktop may come to take."""
    explore: int = 0
    """Also try the N best candidates that the model says don't fit."""
    size: Literal["declared", "auto"] = "declared"
    """These three and `prefetch` as in `Declared`."""
    exposures: Mapping[str, float] = field(default_factory=dict)
    """Phase → the share of copy time that isn't hidden behind compute, 0 to 1; 1 if not said."""
    host_bytes: int | None = None
    """For pinned host masters; None: all are pinned, and not counted."""
    previous: Report | None = None
    """Of the last start: what it committed for a card is kept where only the reading of free
    memory wobbles."""
    prefetch: int = 1
    expandable_segments: bool = False
    """Simulate the allocator's expandable segments, which lose less to fragmentation."""
    dry_run: bool = False
    """On a real card: apply nothing, and tell the best candidate by the model."""
    tiny: bool = False
    """The family's tiny config, with real arithmetic."""

    @property
    def declared(self) -> Declared:
        return Declared(self.component_residency, self.resident_layers, self.size, self.prefetch)


def plan(request: PlanRequest, listen: Listener = ignore) -> Report:
    """The loop on each card in turn, from a fresh pipeline each, all put back afterwards.

    Raises InputError where a name, a shape or a number of the request can't be.
    """
    if not request.cards:
        raise InputError("no card is named", hint="give --card or --capacity")
    for name in ("margin_bytes", "explore", "prefetch"):
        if (getattr(request, name) or 0) < 0:
            raise InputError(f"{name} is {getattr(request, name)}", hint="it is 0 or more")
    plans = [_plan_card(request, card, listen) for card in request.cards]
    return Report(
        residency_version=residency_version(), pipeline=request.pipeline, plans=tuple(plans)
    )


def _plan_card(request: PlanRequest, card: Card, listen: Listener) -> Plan:
    tell = _on(card.name, listen)
    tell(Event(Step.BUILDING, f"building {request.pipeline}"))
    pipeline = family_pipeline(request.pipeline, tiny=request.tiny, shapes=request.shapes)
    shapes = envelope_of(pipeline, request.shapes)
    pricing = Pricing.assumed(card, request.exposures, request.host_bytes)
    settings = Settings(
        MARGIN_BYTES if request.margin_bytes is None else request.margin_bytes,
        pricing,
        explore=request.explore,
        previous=_previous(request, card),
    )

    def host_on(device: Device) -> Host:
        return host_of(
            pipeline, device, shapes, request.declared, host_bytes=pricing.host_budget_bytes
        )

    with _simulated(request, card) as device:
        outcome = run_loop(host_on(device), settings, listen=tell)
        if outcome.failure is None:
            made = account(outcome, settings, card)
            outcome.close()
        device.check_integrity()
    if outcome.failure is not None:
        tell(Event(Step.MEASURING, "measuring what it would take"))
        is_oom = outcome.failure.is_oom
        needs = _needs(request, host_on, settings, card) if is_oom else ()
        made = account(outcome, settings, card, needs)
    del outcome
    gc.collect()
    return made


def _on(card: str, listen: Listener) -> Listener:
    return lambda event: listen(replace(event, card=card))


def _previous(request: PlanRequest, card: Card) -> Plan | None:
    if request.previous is None or request.previous.pipeline != request.pipeline:
        return None
    return next((made for made in request.previous.plans if made.card == card.name), None)


def _simulated(request: PlanRequest, card: Card) -> SimulatedCard:
    context = CONTEXT_BYTES if request.context_bytes is None else request.context_bytes
    return _card_with(
        card,
        context,
        request.others_bytes,
        tiny=request.tiny,
        allocator="expandable" if request.expandable_segments else "caching",
    )


def _card_with(
    card: Card,
    context_bytes: int,
    others_bytes: int,
    *,
    tiny: bool,
    allocator: AllocatorKind = "caching",
) -> SimulatedCard:
    """A tiny pipeline is computed, and its bytes are those that it asks for."""
    return SimulatedCard(
        card,
        virtual=not tiny,
        allocator="exact" if tiny else allocator,
        context_bytes=context_bytes,
        others_bytes=others_bytes,
    )


def _needs(
    request: PlanRequest, host_on: Callable[[Device], Host], settings: Settings, card: Card
) -> tuple[Headroom, ...]:
    """The headroom of each phase on `card`, measured on a card without a limit."""
    with _simulated(request, replace(card, total_bytes=UNLIMITED_BYTES)) as device:
        outcome = run_loop(host_on(device), replace(settings, explore=0, measure_only=True))
        outcome.close()
        return tuple(
            replace(headroom, capacity_bytes=card.total_bytes) for headroom in outcome.headrooms
        )


def plan_on(device: str, request: PlanRequest, listen: Listener) -> Report:
    """The loop on a card of this machine, and everything put back. A family's pipeline gets random
    weights, a folder's those that are in it.

    Raises InputError where the device isn't there, or a name, a shape or a number can't be;
    LockedError where another planner is on the card.
    """
    hardware = Hardware.of(device)
    tell = _on(hardware.device.identity.name, listen)
    tell(Event(Step.BUILDING, f"loading {request.pipeline}"))
    pipeline = load_pipeline(request.pipeline, tiny=request.tiny, shapes=request.shapes)
    shapes = envelope_of(pipeline, request.shapes)
    options = Options(
        component_residency=request.component_residency,
        resident_layers=request.resident_layers,
        size=request.size,
        exposures=request.exposures,
        margin_bytes=request.margin_bytes,
        host_bytes=request.host_bytes,
        prefetch=request.prefetch,
        explore=request.explore,
        dry_run=request.dry_run,
    )
    settled = _settled(
        lambda host_bytes: host_of(
            pipeline, hardware.device, shapes, options.declared, host_bytes=host_bytes
        ),
        hardware,
        options,
        Mode.SEARCH,
        tell,
    )
    return settled.report.model_copy(update={"pipeline": request.pipeline})


def _settled(
    build: Callable[[int | None], Host],
    hardware: Hardware,
    options: Options,
    mode: Mode,
    tell: Listener,
) -> Settled:
    """One run of a startup, put back."""
    startup = Startup(build, hardware, None, options, Limit(), tell, Solo())
    with startup.locked():
        settled = startup.run(mode)
        settled.outcome.close()
    return settled


def free_card(device: str, request: PlanRequest) -> PlanRequest:
    """`request` for a simulated card like the device, as if nobody else were on it."""
    found = CudaDevice.parse(device)
    inspection = found.inspect()
    reading = inspection.reading
    # Where others can't be told from the context, what is known of other contexts is all there is.
    unknown = inspection.of(FindingKind.OTHERS_UNKNOWN) is not None
    context = CONTEXT_BYTES if unknown else reading.context_bytes
    card = replace(custom_card(reading.total_bytes), name=f"{found.identity.name}, all free")
    return replace(request, cards=(card,), context_bytes=context, others_bytes=0)


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of a plan of a file that was applied and swept once."""

    plan: Plan
    holds: bool
    refutation: Attempt | None
    """What the sweep said, where it doesn't hold."""


def apply_plans(
    path: Path, *, device: str | None, tiny: bool, listen: Listener = ignore
) -> tuple[Applied, ...]:
    """Of each plan in the file, in a fresh pipeline: a simulated one on its simulated card, one for
    a real card on `device`. Everything is put back.

    Raises PlanFileError, StalePlanError with the first difference, and InputError where there is
    nothing to apply, or a plan needs a device and none is named.
    """
    report = read_report(path)
    plans = [plan for plan in report.plans if plan.status is Status.COMMITTED]
    if not plans:
        raise InputError(
            f"{path} has no plan that retains anything",
            hint="`residency show` says why; there is nothing to apply",
        )
    return tuple(_apply(path, report, plan, device, tiny, listen) for plan in plans)


def _apply(
    path: Path, report: Report, plan: Plan, device: str | None, tiny: bool, listen: Listener
) -> Applied:
    known = plan.fingerprint
    if known is None:
        raise StalePlanError(
            f"{path} doesn't say what the plan for {plan.card} holds for", hint="plan again"
        )
    tell = _on(plan.card, listen)
    tell(Event(Step.BUILDING, f"building {report.pipeline}"))
    is_virtual = plan.device == "simulated" and not tiny
    shapes = [Shape.parse(text) for text in known.envelope]
    pipeline = load_pipeline(report.pipeline, tiny=tiny, virtual=is_virtual, shapes=shapes)

    def build(host_bytes: int | None) -> Host:
        host = host_as(known, pipeline, hardware.device, host_bytes=host_bytes)
        now = Fingerprint.of(host, margin_bytes=known.margin_bytes)
        report.plan_under(now, str(path))
        return host

    with _device(plan, device, tiny) as card:
        hardware = Hardware.of(card)
        options = Options(margin_bytes=known.margin_bytes, plan=path, attempts=0)
        settled = _settled(build, hardware, options, Mode.VERIFY, tell)
    refuted = [a for a in settled.plan.attempts if a.verdict is not Verdict.ACCEPTED]
    gc.collect()
    if settled.verified:
        return Applied(plan, True, None)
    return Applied(plan, False, refuted[0] if refuted else None)


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
    with _card_with(card, plan.context_bytes, plan.others_bytes, tiny=tiny) as simulated:
        yield simulated
