"""What a machine says of its card: every figure with its source, and what doesn't add up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .device import Identity, Reading, Traits


@dataclass(frozen=True, slots=True)
class Term:
    """One figure. `value` is None where the source doesn't say; `source` then tells why."""

    name: str
    value: int | str | None
    unit: str
    """`bytes`, or what the number counts; empty for a word."""
    source: str


class Nature(StrEnum):
    CONTRADICTION = "contradiction"
    """Two sources disagree, or one is impossible: which was taken is said."""
    ABSENCE = "absence"
    """What can't be read."""
    ASSUMPTION = "assumption"
    """What was decided and not read."""
    CONDITION = "condition"
    """What holds on this machine and not on every one."""


class FindingKind(StrEnum):
    """For explaining; what is decided by is in the reading and the traits."""

    TOTALS_DISAGREE = "totals disagree"
    FREE_DISAGREES = "free disagrees"
    PARTS_DISAGREE = "parts disagree"
    IMPOSSIBLE_MEMORY = "impossible memory"
    IMPOSSIBLE_PROCESS = "impossible process"
    ALLOCATOR_ABOVE_CARD = "allocator above card"
    NOT_OWN_PROCESS = "not own process"
    PROCESSES_DISAGREE = "processes disagree"
    NO_NVML = "no NVML"
    NO_MEMORY = "no memory by NVML"
    NO_PROCESSES = "no processes by NVML"
    OTHERS_UNKNOWN = "others unknown"
    NO_RETRIES = "no retries counted"
    OS_RESERVE = "reserve of the operating system"
    DRIVER_MODEL = "driver model assumed"
    UNIFIED = "unified memory"
    SPILLS = "spills"
    SLICE = "slice of a card"
    EXPANDABLE_ON_SLICE = "expandable segments on a slice"
    ASYNC_ALLOCATOR = "cudaMallocAsync"
    DESKTOP = "desktop"
    FOREIGN = "other processes"
    FOREIGN_GROWTH = "growth outside"

    @property
    def nature(self) -> Nature:
        return _NATURES.get(self, Nature.CONDITION)


_NATURES = {
    FindingKind.TOTALS_DISAGREE: Nature.CONTRADICTION,
    FindingKind.FREE_DISAGREES: Nature.CONTRADICTION,
    FindingKind.PARTS_DISAGREE: Nature.CONTRADICTION,
    FindingKind.IMPOSSIBLE_MEMORY: Nature.CONTRADICTION,
    FindingKind.IMPOSSIBLE_PROCESS: Nature.CONTRADICTION,
    FindingKind.ALLOCATOR_ABOVE_CARD: Nature.CONTRADICTION,
    FindingKind.NOT_OWN_PROCESS: Nature.CONTRADICTION,
    FindingKind.PROCESSES_DISAGREE: Nature.CONTRADICTION,
    FindingKind.NO_NVML: Nature.ABSENCE,
    FindingKind.NO_MEMORY: Nature.ABSENCE,
    FindingKind.NO_PROCESSES: Nature.ABSENCE,
    FindingKind.OTHERS_UNKNOWN: Nature.ABSENCE,
    FindingKind.NO_RETRIES: Nature.ABSENCE,
    FindingKind.OS_RESERVE: Nature.ASSUMPTION,
    FindingKind.DRIVER_MODEL: Nature.ASSUMPTION,
}


@dataclass(frozen=True, slots=True)
class Finding:
    kind: FindingKind
    message: str
    hint: str | None = None

    @property
    def nature(self) -> Nature:
        return self.kind.nature


@dataclass(frozen=True, slots=True)
class Inspection:
    """A reading with all that it was made of."""

    identity: Identity
    reading: Reading
    traits: Traits
    terms: tuple[Term, ...]
    findings: tuple[Finding, ...]
    granularity_bytes: int
    """The allocator takes device memory in multiples of this."""
    drift_reserve_bytes: int = 0
    """What programs of a desktop may come to take between two requests: for a plan's margin."""

    def of(self, kind: FindingKind) -> Finding | None:
        return next((finding for finding in self.findings if finding.kind is kind), None)
