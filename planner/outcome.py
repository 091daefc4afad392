"""What the loop came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..phases.headroom import Headroom
from ..phases.warmup import Failure, Sweep
from .candidate import Candidate, Shortage
from .choosing.choice import Chosen
from .choosing.instance import Instance
from .comparison import Comparison
from .installation import Installation
from .measured import Measured
from .transaction import Transaction
from .validation import Judgement


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
    comparisons: tuple[Comparison, ...] = ()
    """With the baseline's time; empty where the device has no clock, or it failed before."""


@dataclass(slots=True)
class Outcome:
    """The pipeline stays as it says until `close`.

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
    """The last choice: what was committed or proposed, or the baseline."""
    tries: list[Try] = field(default_factory=list)
    committed: Candidate | None = None
    proposed: Candidate | None = None
    """The best by the model, where nothing was to be applied."""
    stopped: str | None = None
    """Why no more was tried, where more could have been: the attempts or the time were used up."""

    @property
    def candidate(self) -> Candidate | None:
        """What is retained, or would be."""
        return self.committed or self.proposed

    def close(self) -> None:
        """Put the pipeline back as it was given. Raises RollbackError."""
        self.transaction.rollback()
