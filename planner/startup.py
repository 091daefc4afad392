"""Settling as a server starts: the card's lock, the journal, the plan of the last start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..offload.errors import JournalError, PlanFileError
from ..phases.declaration import Declaration, declare, left_to_size
from ..phases.diffusers import DiffusersPipeline
from ..phases.limit import Limit
from ..phases.shape import Shape
from .account import account
from .choosing.joint import check_cards
from .event import Event, Listener, Step
from .hardware import Hardware
from .journal.journal import Journal, Run
from .journal.journal_log import JournalLog
from .journal.lock import PlannerLock
from .journal.log import Log
from .journal.record import CandidateRecord, planned
from .loop import run_loop
from .options import Mode, Options
from .outcome import Outcome
from .plan import Plan, Status
from .planfile.fingerprint import Fingerprint, residency_version
from .ranks.agreement import Agreement
from .report import Report
from .settings import Settings


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

    pipeline: DiffusersPipeline
    hardware: Hardware
    envelope: tuple[Shape, ...]
    journal: Path | None
    options: Options
    limit: Limit
    listen: Listener
    agreement: Agreement
    declarations: dict[str, Declaration] = field(init=False)
    sized: frozenset[str] = field(init=False)
    margin_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        options, device = self.options, self.hardware.device
        self.declarations = declare(
            self.pipeline.components,
            options.component_residency,
            options.resident_layers,
            unified=device.traits.unified,
        )
        self.sized = frozenset()
        if options.size == "auto":
            self.sized = left_to_size(self.declarations, options.resident_layers)
        given = options.margin_bytes
        self.margin_bytes = self.hardware.margin_bytes if given is None else given

    def run(self, mode: Mode) -> Settled:
        """Raises as `settle` does; the pipeline has to be as it was given."""
        identity, rank = self.hardware.device.identity, self.agreement.rank
        simulated = self.hardware.device.traits.simulated
        card = f"{identity.uuid} of rank {rank}" if simulated else identity.uuid
        check_cards(self.agreement.exchange("cards", card))
        with self._locked():
            return self._run(mode)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(
            self.pipeline,
            self.hardware.device,
            self.declarations,
            self.envelope,
            margin_bytes=self.margin_bytes,
            prefetch=self.options.prefetch,
            sized=self.sized,
            world_size=self.agreement.world_size,
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        device, folder = self.hardware.device, self.options.lock_folder
        if device.traits.simulated and folder is None:
            yield
            return
        with PlannerLock(device.identity.uuid, folder, timeout_s=self.options.lock_s):
            yield

    def _run(self, mode: Mode) -> Settled:
        options, hardware, fingerprint = self.options, self.hardware, self.fingerprint()
        warnings: list[str] = []
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
            self.envelope,
            self.declarations,
            self.margin_bytes,
            hardware.pricing(
                options.exposures, options.host_bytes, local_ranks=self.agreement.local_ranks
            ),
            sized=self.sized,
            explore=options.explore,
            attempts=options.attempts,
            prefetch=options.prefetch,
            crashed=crashed,
            verify=None if known is None else planned(known),
            measure_only=measure_only,
            propose_only=options.dry_run,
            least_patience_s=options.least_patience_s,
            sample_s=hardware.sample_s,
            limit=self.limit,
            log=log,
            agreement=self.agreement,
        )
        outcome = run_loop(self.pipeline, hardware.device, settings, listen=self.listen)
        try:
            return self._kept(outcome, settings, known, warnings)
        except BaseException:
            outcome.close()
            raise

    def _kept(
        self, outcome: Outcome, settings: Settings, known: Plan | None, warnings: list[str]
    ) -> Settled:
        log = settings.log
        verified = outcome.committed is not None and outcome.measured is None
        if verified and known is not None:
            plan = known
        else:
            plan = account(outcome, settings, self.hardware.card)
        report = Report(
            residency_version=residency_version(), pipeline=self.pipeline.name, plans=(plan,)
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
        if plan is not None and planned(plan).key != committed.key:
            warnings.append(f"searched for anew: {path} isn't what the journal says is committed")
            return None
        return plan

    def _given(
        self,
        fingerprint: Fingerprint,
        crashed: Sequence[CandidateRecord],
        warnings: list[str],
    ) -> Plan | None:
        path = self.options.plan
        plan = None if path is None else _read(path, fingerprint, warnings)
        if plan is not None and planned(plan).key in {each.key for each in crashed}:
            warnings.append(f"searched for anew: what {path} retains ended a process")
            return None
        return plan

    def _keep(self, report: Report, warnings: list[str]) -> None:
        path = self._plan_file
        if path is None or report.plans[0].status is not Status.COMMITTED:
            return
        try:
            report.write(path)
        except PlanFileError as error:
            warnings.append(f"the next start has to search: {error.message}")


def _read(path: Path, fingerprint: Fingerprint, warnings: list[str]) -> Plan | None:
    """The plan in `path`, where it holds for `fingerprint` and retains something."""
    try:
        plan = Report.read(path).plan_under(fingerprint, str(path))
    except PlanFileError as error:
        warnings.append(f"searched for anew: {error.message}")
        return None
    return plan if plan.status is Status.COMMITTED else None
