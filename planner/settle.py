"""The loop: measure, propose, apply, validate, and commit or roll back and propose again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ..offload.device import Device
from ..phases.declaration import Declaration
from ..phases.diffusers import DiffusersPipeline
from ..phases.headroom import Headroom
from ..phases.shape import Shape
from ..phases.warmup import Failure, Sweep
from .candidates import Candidate, Limits, Option, Shortage, candidates
from .installation import Installation
from .plan import Verdict
from .transaction import Retain, Transaction
from .validation import Judgement, judge

LOAD = "load"
"""Where a failure is said to be that came before any phase: resident weights didn't fit."""


@dataclass(frozen=True, slots=True)
class Settings:
    shapes: tuple[Shape, ...]
    """The envelope."""
    declarations: Mapping[str, Declaration]
    margin_bytes: int
    explore: int = 0
    """Also try so many of the best candidates that the model says don't fit."""
    prefetch: int = 1
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
    options: tuple[Option, ...] = ()
    limits: Limits | None = None
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
    warmup = settlement.installation.warmup
    listen("finding the phases")
    failure = warmup.discover()
    if failure is not None:
        return failure
    listen("measuring the baseline")
    baseline = warmup.sweep()
    if baseline.failure is not None:
        return baseline.failure
    settlement.baseline = settlement.planned = baseline
    reading = settlement.installation.device.read()
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
        for phase in settlement.installation.graph.phases
    )
    settlement.options = tuple(settlement.installation.options())
    settlement.limits = Limits(settlement.headrooms)
    return None


def _propose(settlement: Settlement, settings: Settings, listen: Callable[[str], None]) -> None:
    explored = 0
    limits = settlement.limits
    assert limits is not None
    for candidate in candidates(option for option in settlement.options if option.saved_bytes):
        if limits.is_refuted(candidate):
            continue
        shortage = limits.shortage(candidate)
        if shortage is not None:
            if explored == settings.explore:
                continue
            explored += 1
        listen(f"trying to retain {', '.join(candidate.components)}")
        if _try(settlement, settings, candidate, shortage):
            return


def _try(
    settlement: Settlement, settings: Settings, candidate: Candidate, shortage: Shortage | None
) -> bool:
    """Apply, validate, and keep or undo. Whether it was kept."""
    installation, baseline, limits = (
        settlement.installation,
        settlement.baseline,
        settlement.limits,
    )
    assert baseline is not None
    assert limits is not None
    transaction = Transaction(
        installation.pipeline,
        installation.device,
        [
            Retain(installation.graph, option.use, installation.placements[option.use.component])
            for option in candidate.options
        ],
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
    else:
        del sweep
        transaction.rollback()
        limits.refute(candidate, judgement.place)
    settlement.tries.append(
        Try(candidate, shortage, judgement, _missing(limits, candidate, judgement), not accepted)
    )
    return accepted


def _missing(limits: Limits, candidate: Candidate, judgement: Judgement) -> int | None:
    if judgement.verdict is not Verdict.OOM or judgement.place is None:
        return judgement.shortfall_bytes
    return max(judgement.shortfall_bytes or 0, limits.missing_bytes(candidate, judgement.place))
