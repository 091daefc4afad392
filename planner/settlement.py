"""The call for a server's startup, and what a server holds afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..offload.errors import BaselineError, JournalError, PlanFileError, UnknownNameError
from ..offload.hardware import Hardware
from ..phases.host import Host, RequestTrace
from ..phases.hosts import Declared, host_of
from ..phases.limit import Limit
from ..phases.schedule import Schedule
from ..phases.shape import Shape
from .account.account import account
from .choosing.joint import check_cards
from .choosing.prices import MARGIN_BYTES, Pricing
from .fingerprint import Fingerprint, residency_version
from .journal.journal import Journal, JournalLog, Log, Run
from .journal.lock import PlannerLock
from .loop import Outcome, run_loop
from .plan import Plan, Report, Status
from .planfile import read_report, write_report
from .proof import Settings
from .ranks.agreement import Agreement
from .ranks.rendezvous import meet
from .serving.evidence import Evidence
from .serving.guard import Concurrency, Guard, OutsidePolicy
from .serving.metrics import Metrics
from .verdict import Event, Listener, Step, Verdict, ignore

if TYPE_CHECKING:
    from ..offload.device import Device

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Mode(StrEnum):
    VERIFY = "verify"
    """A plan that an earlier start committed under the same fingerprint is swept once. Only where
    there is none, or it doesn't hold any more, is one searched for."""
    SEARCH = "search"
    OFF = "off"
    """Only the baseline is measured, and nothing is retained."""

    @classmethod
    def read(cls, text: str) -> Mode:
        """Raises UnknownNameError."""
        try:
            return cls(text)
        except ValueError:
            raise UnknownNameError("mode", text, [*map(str, cls)]) from None


@dataclass(frozen=True, slots=True)
class Options:
    """What a server may say of how its pipeline is settled and served. The first ten as in
    `residency plan`; what isn't given is measured on a real device."""

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

    @property
    def declared(self) -> Declared:
        return Declared(self.component_residency, self.resident_layers, self.size, self.prefetch)


@dataclass(frozen=True, slots=True)
class Settled:
    """What one run came to."""

    outcome: Outcome
    report: Report
    """Of one plan."""
    log: Log
    verified: bool
    """The plan is that of an earlier start, swept once; else it was searched for."""
    warnings: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        return self.report.plans[0]

    def in_effect(self) -> Settled:
        """With a plan that says that it is served with."""
        served = self.plan.status is Status.COMMITTED
        plan = self.plan.model_copy(update={"in_effect": served})
        return replace(self, report=self.report.model_copy(update={"plans": (plan,)}))


@dataclass(slots=True)
class Startup:
    """All that a run needs, so that it can be done again."""

    build: Callable[[int | None], Host]
    """The host of the pipeline as it is now, with so many bytes for pinned masters."""
    hardware: Hardware
    journal: Path | None
    options: Options
    limit: Limit
    listen: Listener
    agreement: Agreement

    @property
    def margin_bytes(self) -> int:
        given = self.options.margin_bytes
        return MARGIN_BYTES + self.hardware.reserve_bytes if given is None else given

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other planner is on the card, and no other rank on the same one. Raises
        LockedError, DeviceError."""
        identity, rank = self.hardware.device.identity, self.agreement.rank
        simulated = self.hardware.device.traits.simulated
        card = f"{identity.uuid} of rank {rank}" if simulated else identity.uuid
        check_cards(self.agreement.exchange("cards", card))
        if simulated and self.options.lock_folder is None:
            yield
            return
        with PlannerLock(identity.uuid, self.options.lock_folder, timeout_s=self.options.lock_s):
            yield

    def run(self, mode: Mode) -> Settled:
        """To be called inside `locked`. Raises as `settle` does; the pipeline has to be on the host
        and free of hooks of ours."""
        options, hardware, warnings = self.options, self.hardware, list[str]()
        pricing = Pricing.of(
            hardware,
            options.exposures,
            options.host_bytes,
            local_ranks=self.agreement.local_ranks,
        )
        host = self.build(pricing.host_budget_bytes)
        fingerprint = Fingerprint.of(
            host, margin_bytes=self.margin_bytes, world_size=self.agreement.world_size
        )
        run = self._begun(fingerprint, warnings)
        log = Log() if run is None else JournalLog(run)
        crashed = () if run is None else run.history.crashed
        # A journal that was asked for and can't be kept: a crash would be repeated for ever.
        measure_only = mode is Mode.OFF or (self.journal is not None and run is None)
        if len(crashed) >= options.max_crashes:
            measure_only = True
            warnings.append(
                f"no other candidate is tried: {len(crashed)} ended a process; when it is known "
                f"why, begin another journal than {self.journal}"
            )
        known = None
        if mode is Mode.VERIFY and not options.dry_run:
            known = self._known(run, fingerprint, warnings)
            if known is None and not measure_only:
                known = self._given(fingerprint, crashed, warnings)
        settings = Settings(
            self.margin_bytes,
            pricing,
            explore=options.explore,
            attempts=options.attempts,
            crashed=crashed,
            verify=None if known is None else known.schedule,
            measure_only=measure_only,
            propose_only=options.dry_run,
            least_patience_s=options.least_patience_s,
            sample_s=hardware.sample_s,
            limit=self.limit,
            log=log,
            agreement=self.agreement,
        )
        outcome = run_loop(host, settings, listen=self.listen)
        try:
            return self._kept(outcome, settings, known, warnings)
        except BaseException:
            outcome.close()
            raise

    def _kept(
        self, outcome: Outcome, settings: Settings, known: Plan | None, warnings: list[str]
    ) -> Settled:
        log = settings.log
        verified = outcome.committed is not None and outcome.baseline is None
        if verified and known is not None:
            plan = known
        else:
            plan = account(outcome, settings, self.hardware.card)
        report = Report(
            residency_version=residency_version(), pipeline=outcome.host.name, plans=(plan,)
        )
        self._keep(report, warnings)
        if isinstance(log, JournalLog):
            try:
                log.run.close()
            except JournalError as error:
                warnings.append(error.message)
        if outcome.stopped is not None:
            warnings.append(f"nothing is retained: {outcome.stopped}")
        return Settled(outcome, report, log, verified, tuple(warnings))

    def _begun(self, fingerprint: Fingerprint, warnings: list[str]) -> Run | None:
        """The journal's run; None without a journal, or where it can't be kept."""
        if self.journal is None:
            return None
        try:
            journal = Journal.open(self.journal)
            run = journal.begin(fingerprint)
        except JournalError as error:
            warnings.append(f"nothing is tried without the journal: {error.message}")
            return None
        warnings += journal.warnings
        if run.history.crashed:
            crashed = len(run.history.crashed)
            self.listen(
                Event(Step.PLACING, f"leaving out {crashed} candidates that ended a process")
            )
        return run

    @property
    def _plan_file(self) -> Path | None:
        """Beside the journal, and of the same name."""
        return None if self.journal is None else Path(f"{self.journal}.plan.json")

    def _known(self, run: Run | None, fingerprint: Fingerprint, warnings: list[str]) -> Plan | None:
        """What the last start committed, with its evidence."""
        committed, path = None if run is None else run.history.committed, self._plan_file
        if committed is None or path is None:
            return None
        plan = _read(path, fingerprint, warnings)
        if plan is not None and plan.schedule.key != committed.key:
            warnings.append(f"searched for anew: {path} isn't what the journal says is committed")
            return None
        return plan

    def _given(
        self,
        fingerprint: Fingerprint,
        crashed: Sequence[Schedule],
        warnings: list[str],
    ) -> Plan | None:
        path = self.options.plan
        plan = None if path is None else _read(path, fingerprint, warnings)
        if plan is not None and plan.schedule.key in {each.key for each in crashed}:
            warnings.append(f"searched for anew: what {path} retains ended a process")
            return None
        return plan

    def _keep(self, report: Report, warnings: list[str]) -> None:
        path = self._plan_file
        if path is None or report.plans[0].status is not Status.COMMITTED:
            return
        try:
            write_report(report, path)
        except PlanFileError as error:
            warnings.append(f"the next start has to search: {error.message}")


def _read(path: Path, fingerprint: Fingerprint, warnings: list[str]) -> Plan | None:
    """The plan in `path`, where it holds for `fingerprint` and retains something."""
    try:
        plan = read_report(path).plan_under(fingerprint, str(path))
    except PlanFileError as error:
        warnings.append(f"searched for anew: {error.message}")
        return None
    return plan if plan.status is Status.COMMITTED else None


def settle(
    pipeline: Any,
    *,
    device: Device | str,
    envelope: Sequence[Shape | str],
    journal: Path | str | None = None,
    mode: Mode | str = Mode.VERIFY,
    options: Options | None = None,
    limit: Limit | None = None,
    listen: Listener = ignore,
    agreement: Agreement | None = None,
) -> Settlement:
    """Decide what stays on the device between phases, prove it, and hold the pipeline ready.

    `pipeline`: a diffusers pipeline with its components on the host. `device`: `cuda:0`, or a
    device. `envelope`: all that will be served; its largest shapes are swept. `journal`: a file of
    this server's own, without which a crash isn't remembered; the plan is kept beside it, as
    `<journal>.plan.json`. With several ranks each needs a journal of its own. `limit`: of time, and
    to cancel by, from any thread. `listen` is told each step. `agreement`: with other ranks;
    without, it is that of torch.distributed or of its environment, and closed at the end.

    The pipeline isn't left worse than it was given. After an error it is as it was; where the
    baseline doesn't run, too, and `status` says so; else the baseline is what stays when no
    candidate holds.
    Raises InputError where something asked for can't be, LockedError where another planner is on
    the card, CancelledError, OvertimeError where even the baseline wasn't measured in time,
    RankError where other ranks can't be met, RollbackError where an undo failed.
    """
    mode, options, hardware = Mode.read(mode), options or Options(), Hardware.of(device)
    shapes = tuple(Shape.parse(each) if isinstance(each, str) else each for each in envelope)
    ours = None
    if agreement is None:
        agreement = ours = meet()
    try:
        startup = Startup(
            lambda host_bytes: host_of(
                pipeline, hardware.device, shapes, options.declared, host_bytes=host_bytes
            ),
            hardware,
            None if journal is None else Path(journal),
            options,
            limit or Limit(),
            listen,
            agreement,
        )
        with startup.locked():
            settled = startup.run(mode)
        try:
            return Settlement(startup, settled)
        except BaseException:
            settled.outcome.close()
            raise
    except BaseException as error:
        agreement.fail(error)
        raise
    finally:
        if ours is not None:
            ours.close()


class Settlement:
    """What `settle` came to. The pipeline is placed and stays so until `close`.

    Where `status` is infeasible the baseline doesn't run: the pipeline is as it was given, and
    `guard` raises BaselineError.
    """

    def __init__(self, startup: Startup, settled: Settled) -> None:
        self._startup = startup
        self._settled = settled.in_effect()
        self.metrics = Metrics()
        self._guard = Guard(
            outside=startup.options.outside,
            concurrency=startup.options.concurrency,
            wait_s=startup.options.wait_s,
            max_ooms=startup.options.max_ooms,
            margin_bytes=startup.margin_bytes,
            metrics=self.metrics,
            demoted=self._demoted,
        )
        if self._runs:
            self._guard.renew(settled.outcome)

    @property
    def _runs(self) -> bool:
        return self._settled.outcome.failure is None

    @property
    def status(self) -> Status:
        return self._settled.plan.status

    @property
    def plan(self) -> Plan:
        """What is retained, why, and the evidence."""
        return self._settled.plan

    @property
    def report(self) -> Report:
        return self._settled.report

    @property
    def verified(self) -> bool:
        """Whether the plan is that of an earlier start, swept once."""
        return self._settled.verified

    @property
    def warnings(self) -> tuple[str, ...]:
        """For the server's log: what was wrong with the journal, and why less was tried."""
        return self._settled.warnings

    def guard(self, shape: Shape | str) -> AbstractContextManager[RequestTrace]:
        """One request inside a `with` block; see `Guard.request`."""
        return self._serving().request(_shape(shape))

    def serve(self, shape: Shape | str, call: Callable[[], T]) -> T:
        """`call()` as one request, and once more after an OOM; see `Guard.serve`."""
        return self._serving().serve(_shape(shape), call)

    def check(self) -> Evidence:
        """Whether the evidence still holds."""
        return self._serving().check()

    def resettle(self, mode: Mode | str = Mode.SEARCH, *, limit: Limit | None = None) -> None:
        """Settle the pipeline as it is now anew, between two requests. The limit that `settle` was
        given isn't this one's.

        Raises as `settle` does; then what was served before still is, unless it is RollbackError.
        """
        mode = Mode.read(mode)
        with self._guard.exclusive(), self._startup.locked():
            self._startup.limit = limit or Limit()
            before = self._settled.outcome
            state = self._guard.state
            schedule = before.host.schedule
            self._guard.close()
            is_served = before.host.is_open
            before.close()
            try:
                settled = self._startup.run(mode).in_effect()
            except BaseException:
                if is_served:
                    before.resume(schedule)
                    self._guard.reopen(state)
                raise
            self._settled = settled
            if self._runs:
                self._guard.renew(settled.outcome)

    def close(self) -> None:
        """Take off all that is ours; the plan stays committed for the next start. More than once
        is nothing.

        Raises RollbackError.
        """
        with self._guard.exclusive():
            self._guard.close()
            self._settled.outcome.close()
            self.metrics.retained_bytes.replace({})

    def _serving(self) -> Guard:
        if not self._runs:
            failure = self._settled.outcome.failure
            raise BaselineError(
                f"{self._settled.outcome.host.name} doesn't run on {self.plan.card}: "
                f"{failure.detail if failure else ''}",
                hint="offload more components, keep fewer layers resident, or serve smaller shapes",
            )
        return self._guard

    def _demoted(self, detail: str) -> None:
        log = self._settled.log
        if not isinstance(log, JournalLog):
            return
        try:
            log.taken_back(Verdict.OOM, detail)
        except JournalError as error:
            # The request that ran out of memory goes on; the next start verifies what was given up.
            logger.warning("the next start won't know: %s", error.message)


def _shape(shape: Shape | str) -> Shape:
    return Shape.parse(shape) if isinstance(shape, str) else shape
