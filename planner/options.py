"""What a server may say of how its pipeline is settled and served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from .serving.guard import OutsidePolicy
from .serving.turn import Concurrency


class Mode(StrEnum):
    VERIFY = "verify"
    """A plan that an earlier start committed under the same fingerprint is swept once. Only where
    there is none, or it doesn't hold any more, is one searched for."""
    SEARCH = "search"
    OFF = "off"
    """Only the baseline is measured, and nothing is retained."""


@dataclass(frozen=True, slots=True)
class Options:
    """The first ten as in `residency plan`. What isn't given is measured on a real device."""

    component_residency: Mapping[str, str] = field(default_factory=dict)
    resident_layers: Mapping[str, str] = field(default_factory=dict)
    size: Literal["declared", "auto"] = "auto"
    exposures: Mapping[str, float] = field(default_factory=dict)
    margin_bytes: int | None = None
    host_bytes: int | None = None
    prefetch: int = 1
    explore: int = 0
    dry_run: bool = False
    """The best candidate by the model is told, and nothing is applied."""
    plan: Path | None = None
    """A file that `residency plan --out` wrote: it is verified where no earlier start committed
    another one. A stale one is told with the first difference, and searched for anew."""
    attempts: int = 8
    least_patience_s: float = 30.0
    """A candidate is refuted as slower where its sweep takes longer than this and than five times
    the baseline's."""
    lock_folder: Path | None = None
    """Where planners on one card exclude one another. None: a folder of the user's, and a simulated
    card isn't locked."""
    lock_s: float = 0.0
    """How long to wait for another planner."""
    outside: OutsidePolicy = OutsidePolicy.REFUSE
    concurrency: Concurrency = Concurrency.WAIT
    wait_s: float | None = None
    """How long a request waits for its turn; None: until it comes."""
    max_crashes: int = 3
    """So many candidates that ended a process under one fingerprint, and no other is tried: else a
    server that something else ends would be started again for each of them."""
    max_ooms: int = 3
    """So many requests that run out of memory, and the baseline is served."""
