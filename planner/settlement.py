"""A settled pipeline, ready to serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from ..offload.device import Device
from ..offload.errors import BaselineError, JournalError
from ..phases.conductor import RequestTrace
from ..phases.diffusers import DiffusersPipeline
from ..phases.limit import Limit
from ..phases.shape import Shape
from .event import Listener, ignore
from .hardware import Hardware
from .journal.journal_log import JournalLog
from .options import Mode, Options
from .plan import Plan, Status, Verdict
from .ranks.agreement import Agreement
from .ranks.rendezvous import meet
from .report import Report
from .serving.evidence import Evidence
from .serving.guard import Guard
from .serving.metrics import Metrics
from .startup import Settled, Startup

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    ours = None
    if agreement is None:
        agreement = ours = meet()
    try:
        startup = Startup(
            pipeline if isinstance(pipeline, DiffusersPipeline) else DiffusersPipeline(pipeline),
            Hardware.of(device),
            tuple(Shape.parse(each) if isinstance(each, str) else each for each in envelope),
            None if journal is None else Path(journal),
            options or Options(),
            limit or Limit(),
            listen,
            agreement,
        )
        settled = startup.run(Mode(mode))
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
        self._guard = self._made() if self._runs else None

    @property
    def _runs(self) -> bool:
        return self._settled.outcome.failure is None

    def _made(self) -> Guard:
        options = self._startup.options
        return Guard(
            self._settled.outcome,
            self._startup.pipeline,
            self._startup.hardware.device,
            outside=options.outside,
            concurrency=options.concurrency,
            wait_s=options.wait_s,
            max_ooms=options.max_ooms,
            margin_bytes=self._startup.margin_bytes,
            metrics=self.metrics,
            demoted=self._demoted,
        )

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
        """Settle anew, from the baseline, between two requests. The limit that `settle` was given
        isn't this one's. Raises as `settle` does, and what was served before is closed then."""
        guard = self._serving()
        with guard.exclusive():
            self._startup.limit = limit or Limit()
            guard.close()
            self._settled.outcome.close()
            self._settled = self._startup.run(Mode(mode)).in_effect()
            if self._runs:
                guard.renew(self._settled.outcome)

    def close(self) -> None:
        """Put the pipeline back as it was given; the plan stays committed for the next start.

        Raises RollbackError.
        """
        if self._guard is None:
            return
        with self._guard.exclusive():
            self._guard.close()
            self._settled.outcome.close()

    def _serving(self) -> Guard:
        if self._guard is None:
            failure = self._settled.outcome.failure
            raise BaselineError(
                f"{self._startup.pipeline.name} doesn't run on {self.plan.card}: "
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
