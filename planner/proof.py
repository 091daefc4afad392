"""The proof of a schedule: it is applied as a transaction, swept, judged, run in turns with the
baseline, and committed or rolled back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..offload.device import FreeFloor, Reading
from ..offload.errors import HostMemoryError, JournalError, OvertimeError
from ..offload.memory_errors import cut_off
from ..phases.host import Change, Failure, Host, Sweep, check_undone, undo
from ..phases.limit import Limit
from ..phases.schedule import Schedule
from ..phases.shape import Shape
from .choosing.choose import WOBBLE_BYTES
from .choosing.prices import Pricing
from .journal.journal import Log
from .plan import Plan
from .ranks.agreement import Agreement, Solo
from .verdict import Comparison, Judgement, Step, Verdict, judge, judge_failure, judge_time

ROUNDS = 3
"""How often baseline and candidate take turns at a shape."""

COMPARED_SWEEPS = 2 * ROUNDS
"""A comparison with the baseline runs as many requests as so many sweeps of it."""

KERNELS_BYTES = 512 << 20
"""A context grows as kernels are loaded; what it grows by beyond this isn't its own."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the loop is told, besides the host."""

    margin_bytes: int
    pricing: Pricing
    explore: int = 0
    """Also try so many of the best candidates that the model says don't fit."""
    attempts: int = 8
    """Candidates that are tried at most, the explored ones aside."""
    previous: Plan | None = None
    """Of the last start: kept where only the reading of free memory wobbles, and what refutations
    taught then is known from the start."""
    crashed: tuple[Schedule, ...] = ()
    """Candidates that ended a process: neither they nor any that is at least as large is tried."""
    verify: Schedule | None = None
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

    def has_crashed(self, schedule: Schedule) -> bool:
        return schedule.key in {each.key for each in self.crashed}


class Transaction:
    """The steps from the schedule in effect to another, all taken or all undone."""

    def __init__(self, host: Host, schedule: Schedule) -> None:
        self._host = host
        self._before = host.schedule
        self._steps = [*host.steps(schedule)]
        self._applied: list[Change] = []

    def apply(self) -> None:
        """Raises what a step raises; the transaction can then be rolled back."""
        for step in self._steps:
            self._applied.append(step)
            step.apply()

    def rollback(self) -> None:
        """Undo what was applied, in reverse, and give up what is on the device.

        Raises RollbackError if a step raised, or what we put on isn't as the schedule before has
        it.
        """
        errors = undo(self._applied)
        self._host.release()
        is_back = self._host.schedule == self._before
        check_undone(errors, () if is_back else ["another schedule is in effect than before"])
        self._host.check_restored()


@dataclass(frozen=True, slots=True)
class Proof:
    judgement: Judgement
    sweep: Sweep | None = None
    comparisons: tuple[Comparison, ...] = ()

    @property
    def holds(self) -> bool:
        return self.judgement.verdict is Verdict.ACCEPTED


class Prover:
    """Proves schedules against one baseline, once that is `measured`; before, by their sweeps
    alone."""

    def __init__(self, host: Host, settings: Settings, tell: Callable[[Step, str], None]) -> None:
        self.sweep_s = 0.0
        """What a sweep of the baseline takes, of the host's time."""
        self._host = host
        self._settings = settings
        self._tell = tell
        self._baseline: Sweep | None = None
        self._others_bytes = self._context_bytes = 0

    def measured(self, baseline: Sweep, reading: Reading) -> None:
        """`reading`: behind the baseline's sweep."""
        self._baseline = baseline
        self._others_bytes, self._context_bytes = reading.others_bytes, reading.context_bytes

    def prove(self, schedule: Schedule) -> Proof:
        """Apply `schedule`, and leave it in effect where it holds on all ranks, else put back the
        one before. What takes too long is a verdict.

        Raises CancelledError, RankError, JournalError and whatever else isn't of the candidate,
        when it is rolled back; RollbackError where that failed.
        """
        settings = self._settings
        if settings.has_crashed(schedule):
            # Other ranks may not know, and wait for what this one says.
            crashed = Judgement(Verdict.CRASH, detail="it ended an earlier process")
            return Proof(self._joint(crashed))
        transaction = Transaction(self._host, schedule)
        settings.log.intent(schedule)
        floor, sweep = self.floor(), None
        comparisons: tuple[Comparison, ...] = ()
        try:
            try:
                transaction.apply()
                settings.log.applied()
                with settings.limit.within(self._patience_s(), interrupt=True):
                    with floor:
                        sweep = self._host.sweep()
                    judgement = judge(
                        sweep, self._baseline, floor, margin_bytes=settings.margin_bytes
                    )
                if judgement.verdict is Verdict.ACCEPTED:
                    with settings.limit.within(self._patience_s(COMPARED_SWEEPS), interrupt=True):
                        judgement, comparisons = self._compared(schedule)
            except HostMemoryError as error:
                judgement = Judgement(Verdict.HOST_MEMORY, detail=error.message)
            except OvertimeError as error:
                judgement = Judgement(Verdict.SLOWER, detail=error.message)
                sweep = None
            judgement = self._joint(self._blamed(judgement, floor))
            settings.log.verdict(judgement)
            if judgement.verdict is Verdict.ACCEPTED:
                settings.log.committed()
                settings.agreement.exchange("committed", None)
                return Proof(judgement, sweep, comparisons)
        except BaseException as error:
            cut_off(error)
            transaction.rollback()
            with suppress(JournalError):  # then the next start takes it for a crash: the safe side
                settings.log.rolled_back()
            raise
        sweep = None  # outputs of a refuted sweep are nobody's
        transaction.rollback()
        settings.log.rolled_back()
        return Proof(judgement, None, comparisons)

    def floor(self) -> FreeFloor:
        return FreeFloor(self._host, every_s=self._settings.sample_s)

    def grown_bytes(self, floor: FreeFloor) -> int:
        """What others took since the baseline. Where they can't be told from the context, more
        than the kernels that it loads when they are first used."""
        grown = max(floor.most_others_bytes - self._others_bytes, 0)
        if floor.most_context_bytes - self._context_bytes > KERNELS_BYTES:
            grown += floor.most_context_bytes - self._context_bytes
        return grown

    def _blamed(self, judgement: Judgement, floor: FreeFloor) -> Judgement:
        """With what a neighbour took meanwhile, where that explains it."""
        if judgement.verdict not in (Verdict.OOM, Verdict.HEADROOM):
            return judgement
        grown, short = self.grown_bytes(floor), judgement.shortfall_bytes
        if grown and grown >= (WOBBLE_BYTES if short is None else short):
            return replace(judgement, neighbour_bytes=grown)
        return judgement

    def _joint(self, mine: Judgement) -> Judgement:
        """Mine, unless only other ranks refuse. Raises RankError."""
        longest_s = self._patience_s() + self._patience_s(COMPARED_SWEEPS)
        agreement = self._settings.agreement
        said = agreement.exchange("judged", (mine.verdict, mine.detail), deadline_s=longest_s)
        if mine.verdict is not Verdict.ACCEPTED:
            return mine
        for rank, (verdict, detail) in enumerate(said):
            if verdict is not Verdict.ACCEPTED:
                return Judgement(verdict, detail=f"rank {rank}: {detail}", rank=rank)
        return mine

    def _patience_s(self, sweeps: int = 1) -> float:
        """With what takes so many sweeps of the baseline."""
        settings = self._settings
        return max(settings.patience * sweeps * self.sweep_s, settings.least_patience_s)

    def _compared(self, schedule: Schedule) -> tuple[Judgement, tuple[Comparison, ...]]:
        """Accepted, unless the baseline turns out to be faster."""
        if self._baseline is None or not self._host.traits.timed:
            return Judgement(Verdict.ACCEPTED), ()
        self._tell(Step.COMPARING, "comparing its time with the baseline's")
        found = compare(self._host, schedule)
        if isinstance(found, Failure):
            return judge_failure(found), ()
        return judge_time(found), found


def compare(
    host: Host, schedule: Schedule, *, rounds: int = ROUNDS
) -> tuple[Comparison, ...] | Failure:
    """Run the baseline's own schedule and `schedule` in turns at each largest shape. `schedule` is
    in effect, before and afterwards.

    The first request of each turn isn't counted: it brings in what is retained, or gives it up,
    and may be the first of its shape. Raises StoppedError.
    """
    found = []
    for shape in host.shapes:
        baseline_s: list[float] = []
        candidate_s: list[float] = []
        for _ in range(rounds):
            before = _at_baseline(host, shape)
            if isinstance(before, Failure):
                return before
            after = _last_request(host, shape)
            if isinstance(after, Failure):
                return after
            baseline_s.append(before)
            candidate_s.append(after)
        found.append(Comparison(shape, tuple(baseline_s), tuple(candidate_s)))
    return tuple(found)


def _at_baseline(host: Host, shape: Shape) -> float | Failure:
    to_baseline = Transaction(host, host.baseline)
    to_baseline.apply()
    try:
        return _last_request(host, shape)
    finally:
        to_baseline.rollback()


def _last_request(host: Host, shape: Shape) -> float | Failure:
    """Seconds of the second of two requests."""
    first = host.run(shape)
    if isinstance(first, Failure):
        return first
    second = host.run(shape)
    if isinstance(second, Failure):
        return second
    assert second.trace.seconds is not None, "the device has no clock"
    return second.trace.seconds
