"""What the loop is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..phases.declaration import Declaration
from ..phases.limit import Limit
from ..phases.shape import Shape
from .journal.log import Log
from .journal.record import CandidateRecord
from .plan import Plan
from .pricing import Pricing
from .ranks.agreement import Agreement, Solo


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
    crashed: tuple[CandidateRecord, ...] = ()
    """Candidates that ended a process: neither they nor any that is at least as large is tried."""
    verify: CandidateRecord | None = None
    """Committed by an earlier start: swept once before anything else is tried."""
    measure_only: bool = False
    """End with the headroom of the baseline."""
    propose_only: bool = False
    """End with the best candidate by the model, and apply nothing."""
    patience: float = 5.0
    """A try that takes so many times the baseline's sweep is refuted as slower."""
    least_patience_s: float = 30.0
    """No try is ended before."""
    sample_s: float | None = None
    """How often free memory is sampled while a sweep runs; None: where phases end."""
    limit: Limit = field(default_factory=Limit)
    """Of the whole loop: past it no further candidate is tried."""
    log: Log = field(default_factory=Log)
    agreement: Agreement = field(default_factory=Solo)
