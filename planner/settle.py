"""The loop: measure, propose, apply, validate, and commit or roll back and propose again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..offload.device import Device
from ..offload.host import HostBudget
from ..offload.layerwise import LayerwiseOffload
from ..phases.declaration import Declaration
from ..phases.diffusers import DiffusersPipeline
from ..phases.headroom import Headroom
from ..phases.shape import Shape
from ..phases.warmup import Failure, Sweep
from .candidate import Candidate, Shortage
from .choice import Chosen, choose
from .installation import Installation
from .instance import Instance
from .measured import Measured
from .plan import Plan, Verdict
from .pricing import Pricing
from .stability import kept
from .transaction import Assign, Operation, Pin, Prefetch, Transaction
from .unfit import Unfit
from .validation import Judgement, judge

LOAD = "load"
"""Where a failure is said to be that came before any phase: resident weights didn't fit."""

UNLIMITED_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class Settings:
    shapes: tuple[Shape, ...]
    """The envelope."""
    declarations: Mapping[str, Declaration]
    margin_bytes: int
    pricing: Pricing
    sized: frozenset[str] = frozenset()
    """Components whose resident and retained sets the planner sizes; of others they are as
    declared, and it decides whether they are retained."""
    explore: int = 0
    """Also try so many of the best candidates that the model says don't fit."""
    attempts: int = 8
    """Candidates that are tried at most, the explored ones aside."""
    prefetch: int = 1
    previous: Plan | None = None
    """Of the last start: kept where only the reading of free memory wobbles, and what refutations
    taught then is known from the start."""
    measure_only: bool = False
    """End with the headroom of the baseline."""


@dataclass(frozen=True, slots=True)
class Try:
    """A candidate that was applied, and what came of it."""

    candidate: Candidate
    shortage: Shortage | None
    """What the model said was missing."""
    judgement: Judgement
    shortfall_bytes: int | None
    """What was missing where it failed: by the model, and at least what was seen."""
    rolled_back: bool


@dataclass(slots=True)
class Settlement:
    """What the loop came to. The pipeline stays as it says until `close`.

    `failure` is set where the baseline doesn't run; then nothing is applied, and all but
    `installation` is empty.
    """

    installation: Installation
    transaction: Transaction
    failure: Failure | None = None
    baseline: Sweep | None = None
    planned: Sweep | None = None
    """With what was committed applied; the baseline's where nothing was."""
    headrooms: tuple[Headroom, ...] = ()
    """Of each phase at each shape; empty where the baseline doesn't run."""
    measured: Measured | None = None
    instance: Instance | None = None
    """What is left to choose from, after all refutations."""
    chosen: Chosen | None = None
    """The last choice: what was committed, or the baseline."""
    tries: list[Try] = field(default_factory=list)
    committed: Candidate | None = None

    def close(self) -> None:
        """Put the pipeline back as it was given. Raises RollbackError."""
        self.transaction.rollback()


def settle(
    pipeline: DiffusersPipeline,
    device: Device,
    settings: Settings,
    *,
    listen: Callable[[str], None] = lambda doing: None,
) -> Settlement:
    """Run the loop on `device`; the pipeline's components have to be on the host.

    Each refutation excludes what was refuted and all that is at least as large, so the loop ends.
    After an error that ends it, the pipeline is as it was given.
    Raises InputError where the pipeline refuses a shape, OffloadError where a component can't be
    placed as declared, RollbackError where an undo failed.
    """
    shapes = pipeline.largest(settings.shapes)
    installation = Installation(
        pipeline, device, settings.declarations, shapes, prefetch=settings.prefetch
    )
    transaction = installation.transaction()
    settlement = Settlement(installation, transaction)
    try:
        listen("placing components")
        settlement.failure = _place(transaction) or _measure(settlement, settings, listen)
        if settlement.failure is None and not settings.measure_only:
            _propose(settlement, settings, listen)
    except BaseException:
        transaction.rollback()
        raise
    if settlement.failure is not None:
        transaction.rollback()
    return settlement


def _place(transaction: Transaction) -> Failure | None:
    try:
        transaction.apply()
    except torch.OutOfMemoryError as error:
        return Failure.of(error, LOAD, None)
    return None


def _measure(
    settlement: Settlement, settings: Settings, listen: Callable[[str], None]
) -> Failure | None:
    installation = settlement.installation
    listen("finding the phases")
    failure = installation.warmup.discover()
    if failure is not None:
        return failure
    listen("measuring the baseline")
    baseline = installation.warmup.sweep()
    if baseline.failure is not None:
        return baseline.failure
    settlement.baseline = settlement.planned = baseline
    reading = installation.device.read()
    settlement.headrooms = tuple(
        Headroom(
            phase,
            run.asked,
            reading.total_bytes,
            reading.others_bytes,
            reading.context_bytes,
            run.peak_bytes(phase),
            settings.margin_bytes,
        )
        for run in baseline.runs
        for phase in installation.graph.phases
    )
    settlement.measured = Measured(
        installation, baseline, settlement.headrooms, settings.pricing, settings.sized
    )
    settlement.instance = settlement.measured.instance
    if settings.previous is not None:
        settlement.instance = settlement.measured.learnt(settings.previous.phases)
    return None


def _propose(settlement: Settlement, settings: Settings, listen: Callable[[str], None]) -> None:
    measured = settlement.measured
    assert measured is not None
    explored = tried = 0
    start = measured.baseline
    while tried < settings.attempts:
        assert settlement.instance is not None
        chosen = choose(settlement.instance, start=start)
        if not settlement.tries:
            chosen = _recalled(settings, measured, chosen) or chosen
        settlement.chosen = None if isinstance(chosen, Unfit) else chosen
        best = measured.baseline if settlement.chosen is None else settlement.chosen.choice
        start = best
        if explored < settings.explore:
            explored += 1
            beyond = choose(_unlimited(settlement, measured))
            if isinstance(beyond, Chosen) and beyond.choice != best:
                if _try(settlement, settings, measured, beyond, listen):
                    return
                continue
            explored = settings.explore  # nothing is better than what fits
        if best == measured.baseline:
            return
        tried += 1
        if _try(settlement, settings, measured, settlement.chosen, listen):
            return
    settlement.chosen = None


def _operations(
    settlement: Settlement, measured: Measured, candidate: Candidate
) -> Iterator[Operation]:
    installation = settlement.installation
    budget = measured.pricing.host_budget_bytes
    if budget is not None:
        host = HostBudget(budget)
        for part, chosen in zip(measured.parts, candidate.choice, strict=True):
            if chosen.mode.pinned and not part.stays:
                yield Pin(part.placement, host)
    for part, chosen in zip(measured.parts, candidate.choice, strict=True):
        if isinstance(part.placement, LayerwiseOffload):
            yield Prefetch(part.placement, chosen.mode.prefetch)
    for use in candidate.uses:
        yield Assign(installation.graph, use, installation.placements[use.component])


def _recalled(settings: Settings, measured: Measured, chosen: Chosen | Unfit) -> Chosen | None:
    """The choice of the last start, where it is to be kept instead of `chosen`."""
    known = settings.previous
    previous = None if known is None else measured.recalled(known.uses)
    if known is None or previous is None or isinstance(chosen, Unfit):
        return None
    instance = measured.learnt(known.phases)
    choice = kept(instance, previous)
    if choice is None:
        return None
    return replace(
        chosen,
        choice=choice,
        seconds=instance.seconds(choice),
        held_bytes=instance.held_bytes(choice),
        host_bytes=instance.host_bytes(choice),
    )


def _unlimited(settlement: Settlement, measured: Measured) -> Instance:
    """The instance without the limits of the model, those that refutations taught aside."""
    known = settlement.instance
    assert known is not None
    places = tuple(
        now if now.room_bytes < given.room_bytes else replace(given, room_bytes=UNLIMITED_BYTES)
        for now, given in zip(known.places, measured.instance.places, strict=True)
    )
    return replace(known, places=places)


def _try(
    settlement: Settlement,
    settings: Settings,
    measured: Measured,
    chosen: Chosen | None,
    listen: Callable[[str], None],
) -> bool:
    """Apply, validate, and keep or undo. Whether it was kept."""
    installation, baseline, instance = (
        settlement.installation,
        settlement.baseline,
        settlement.instance,
    )
    assert chosen is not None
    assert baseline is not None
    assert instance is not None
    candidate = Candidate(chosen.choice, tuple(measured.uses(chosen.choice)))
    listen(f"trying {measured.describe(candidate.choice)}")
    transaction = Transaction(
        installation.pipeline, installation.device, [*_operations(settlement, measured, candidate)]
    )
    try:
        transaction.apply()
        sweep = installation.warmup.sweep()
        judgement = judge(sweep, baseline, margin_bytes=settings.margin_bytes)
    except BaseException:
        transaction.rollback()
        raise
    accepted = judgement.verdict is Verdict.ACCEPTED
    if accepted:
        settlement.planned, settlement.committed = sweep, candidate
        settlement.chosen = chosen
    else:
        del sweep
        transaction.rollback()
        again = any(each.judgement.verdict is Verdict.OOM for each in settlement.tries)
        settlement.instance = measured.refuted(instance, candidate, judgement, again=again)
    settlement.tries.append(
        Try(
            candidate,
            candidate.shortage(measured.instance),
            judgement,
            measured.missing_bytes(candidate, judgement),
            not accepted,
        )
    )
    return accepted
