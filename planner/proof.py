"""The proof of a candidate: it is applied, swept, and run in turns with the baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..offload.device import Reading
from ..offload.errors import HostMemoryError, OvertimeError
from ..offload.floor import FreeFloor
from ..phases.warmup import Failure, Sweep
from .choosing.stability import WOBBLE_BYTES
from .comparison import ROUNDS, Comparison, compare
from .event import Step
from .installation import Installation
from .plan import Verdict
from .settings import Settings
from .transaction import Transaction
from .validation import Judgement, judge, judge_failure, judge_time

COMPARED_SWEEPS = 2 * ROUNDS
"""A comparison with the baseline runs as many requests as so many sweeps of it."""

KERNELS_BYTES = 512 << 20
"""A context grows as kernels are loaded; what it grows by beyond this isn't its own."""


@dataclass(frozen=True, slots=True)
class Proof:
    judgement: Judgement
    sweep: Sweep | None = None
    comparisons: tuple[Comparison, ...] = ()


class Prover:
    """Proves candidates against one baseline, once that is `measured`; before, by their sweeps
    alone."""

    def __init__(
        self, installation: Installation, settings: Settings, tell: Callable[[Step, str], None]
    ) -> None:
        self.sweep_s = 0.0
        """What a sweep of the baseline takes, of the host's time."""
        self._installation = installation
        self._settings = settings
        self._tell = tell
        self._baseline: Sweep | None = None
        self._others_bytes = self._context_bytes = 0

    def measured(self, baseline: Sweep, reading: Reading) -> None:
        """`reading`: behind the baseline's sweep."""
        self._baseline = baseline
        self._others_bytes, self._context_bytes = reading.others_bytes, reading.context_bytes

    def prove(self, transaction: Transaction) -> Proof:
        """Apply it and sweep. Raises CancelledError; what takes too long is a verdict."""
        settings = self._settings
        try:
            transaction.apply()
        except HostMemoryError as error:
            return Proof(Judgement(Verdict.HOST_MEMORY, detail=error.message))
        settings.log.applied()
        floor = self.floor()
        try:
            with settings.limit.within(self._patience_s(), interrupt=True):
                with floor:
                    sweep = self._installation.warmup.sweep()
                judgement = judge(sweep, self._baseline, floor, margin_bytes=settings.margin_bytes)
            if judgement.verdict is Verdict.ACCEPTED:
                with settings.limit.within(self._patience_s(COMPARED_SWEEPS), interrupt=True):
                    return self._compared(sweep)
        except OvertimeError as error:
            return Proof(Judgement(Verdict.SLOWER, detail=error.message))
        if judgement.verdict in (Verdict.OOM, Verdict.HEADROOM):
            grown = self.grown_bytes(floor)
            short = judgement.shortfall_bytes
            if grown and grown >= (WOBBLE_BYTES if short is None else short):
                judgement = replace(judgement, neighbour_bytes=grown)
        return Proof(judgement, sweep)

    def floor(self) -> FreeFloor:
        return FreeFloor(self._installation.device, every_s=self._settings.sample_s)

    def grown_bytes(self, floor: FreeFloor) -> int:
        """What others took since the baseline. Where they can't be told from the context, more
        than the kernels that it loads when they are first used."""
        grown = max(floor.most_others_bytes - self._others_bytes, 0)
        if floor.most_context_bytes - self._context_bytes > KERNELS_BYTES:
            grown += floor.most_context_bytes - self._context_bytes
        return grown

    @property
    def longest_s(self) -> float:
        """No proof takes longer."""
        return self._patience_s() + self._patience_s(COMPARED_SWEEPS)

    def _patience_s(self, sweeps: int = 1) -> float:
        """With what takes so many sweeps of the baseline."""
        settings = self._settings
        return max(settings.patience * sweeps * self.sweep_s, settings.least_patience_s)

    def _compared(self, sweep: Sweep) -> Proof:
        """Accepted, unless the baseline turns out to be faster."""
        if self._baseline is None or not self._installation.device.traits.timed:
            return Proof(Judgement(Verdict.ACCEPTED), sweep)
        self._tell(Step.COMPARING, "comparing its time with the baseline's")
        found = compare(self._installation)
        if isinstance(found, Failure):
            return Proof(judge_failure(found), sweep)
        return Proof(judge_time(found), sweep, found)
