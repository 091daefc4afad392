"""Serving under a plan: what wasn't validated is flagged, and out of memory is recovered from.

Turn        one request at a time
Envelope    the shapes that were validated, and where a request stands to them
OomWindow   how many of the last runs ended out of memory
Guard       runs the requests"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from ...offload.errors import (
    BusyError,
    InputError,
    OffloadError,
    OutsideEnvelopeError,
    ReentryError,
)
from ...offload.memory_errors import OomKind, classify, cut_off
from ...phases.host import Host, RequestTrace
from ...phases.schedule import Schedule
from ...phases.shape import Shape
from ..loop import Outcome
from ..proof import Transaction
from .evidence import Evidence, Premises
from .metrics import Metrics, Release, Served


class Concurrency(StrEnum):
    """What becomes of a request that is made while another one runs."""

    WAIT = "wait"
    REFUSE = "refuse"


class Turn:
    """Held by one thread at a time, from before a request until it is cleaned up.

    `wait_s`: how long a thread waits for it at the most; None has no limit.
    Raises InputError for a `wait_s` that is below 0, or where nobody waits.
    """

    def __init__(
        self, concurrency: Concurrency = Concurrency.WAIT, wait_s: float | None = None
    ) -> None:
        if wait_s is not None and (wait_s < 0 or concurrency is Concurrency.REFUSE):
            raise InputError(
                f"wait_s is {wait_s}, and concurrency is {concurrency}",
                hint="wait_s is 0 or more, and needs concurrency=wait",
            )
        self.concurrency = concurrency
        self.wait_s = wait_s
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises BusyError where it isn't to be had in time, ReentryError where this thread has it
        already: waiting for itself would have no end."""
        if self._owner == threading.get_ident():
            raise ReentryError(
                "this thread is inside a request already",
                hint="end it before the next one begins; requests don't nest",
            )
        waits = self.concurrency is Concurrency.WAIT
        within = self.wait_s if waits and self.wait_s is not None else -1
        if not self._lock.acquire(blocking=waits, timeout=within):
            waited = f", and still did after {within:g} s" if waits else ""
            raise BusyError(
                f"another request runs{waited}",
                hint="try again later, or let requests wait longer (concurrency, wait_s)",
            )
        with self._owned():
            yield

    @contextmanager
    def taken_if_free(self) -> Iterator[bool]:
        """Never waits and never raises. Whether it is taken, inside."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        with self._owned():
            yield True

    @contextmanager
    def _owned(self) -> Iterator[None]:
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()


class OomWindow:
    """Runs that ended out of memory, among the last `length` that were begun."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._begun = 0
        self._at: deque[int] = deque()

    def begin(self) -> None:
        self._begun += 1
        if self._at and self._at[0] <= self._begun - self._length:
            self._at.popleft()

    def add(self) -> None:
        """The run that was begun last ended out of memory."""
        self._at.append(self._begun)

    def __len__(self) -> int:
        return len(self._at)


class Envelope:
    """`shapes` are the largest ones, as they were asked for."""

    def __init__(self, host: Host, shapes: Sequence[Shape]) -> None:
        self._completed = {shape: host.completed(shape) for shape in shapes}

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(self._completed)

    def covering(self, asked: Shape) -> tuple[Shape, ...]:
        """Those that are at least as large as `asked`, which is completed.

        With guidance they cover what is asked without: that runs the same phases, in fewer passes.
        """
        return tuple(each for each, full in self._completed.items() if full.covers(asked))

    def like(self, asked: Shape) -> Shape:
        """The one that a request at `asked` is most like: if any covers it, one that does, and with
        or without guidance as it is, if there is such a one."""
        candidates = self.covering(asked) or self.shapes
        return min(candidates, key=lambda each: self._completed[each].guided != asked.guided)

    def refusal(self, asked: Shape) -> OutsideEnvelopeError:
        envelope = [*map(str, self._completed.values())]
        return OutsideEnvelopeError(
            f"{asked} is outside the validated envelope: {', '.join(envelope)}",
            hint="ask for less, settle again with this shape, or choose what becomes of such "
            "requests: outside=release or outside=warn",
            shape=str(asked),
            envelope=envelope,
        )


logger = logging.getLogger(__name__)

T = TypeVar("T")

_RECOVERED = (OomKind.DEVICE, OomKind.FRAGMENTED, OomKind.TRANSIENT)
"""Where host memory is short, less on the device helps nothing."""


class OutsidePolicy(StrEnum):
    """What becomes of a request outside the envelope."""

    REFUSE = "refuse"
    RELEASE = "release"
    """It runs at the baseline: what is retained is released first."""
    WARN = "warn"
    """It runs as planned, and a warning is logged."""


class GuardState(StrEnum):
    PLANNED = "planned"
    BASELINE = "baseline"
    """Nothing is retained: that was the plan, or it was given up after repeated OOMs."""
    CLOSED = "closed"
    """No request is run."""


@dataclass(slots=True)
class _Request:
    asked: Shape
    """Completed."""
    like: Shape
    """The validated shape that it is run as."""
    is_inside: bool
    release: Release | None = None
    """Why it runs at the baseline though a plan is applied."""
    was_transient: bool = False
    ran_out: bool = False
    """Whether its last run ended out of device memory."""
    runs: int = 0


class Guard:
    """Runs requests one at a time on the host that an outcome has settled, once it is told which
    (`renew`).

    `shape`s are what the caller promises of its request: they are compared with the validated
    ones, and never with what then runs. Inside a request no gradients are recorded.

    After an OOM what is retained is released, and the next run of the request has nothing retained
    either. With `serve` that run is made here, once. A `with request(shape)` block can't be run
    again from here: it raises, and the caller's own second `with request(shape)` is that run. The
    plan is in effect again afterwards; `max_ooms` of them in the last `oom_window` planned
    requests, and it is given up for the baseline until `renew`. A transient one, with far more free
    than was asked for, counts towards nothing: everything stays where it is, and the request may
    run again as planned, once.

    `watch_neighbour`: a request that wouldn't fit beside what others take by now runs at the
    baseline; the plan itself is never changed by what is free. `demoted` is told why a plan is
    given up.
    Raises InputError for numbers that can't be.
    """

    def __init__(
        self,
        *,
        outside: OutsidePolicy = OutsidePolicy.REFUSE,
        concurrency: Concurrency = Concurrency.WAIT,
        wait_s: float | None = None,
        max_ooms: int = 3,
        oom_window: int = 100,
        watch_neighbour: bool = True,
        margin_bytes: int = 0,
        metrics: Metrics | None = None,
        demoted: Callable[[str], None] = lambda why: None,
    ) -> None:
        if max_ooms < 1 or oom_window < max_ooms:
            raise InputError(
                f"max_ooms is {max_ooms} and oom_window is {oom_window}",
                hint="max_ooms is 1 or more, and oom_window at least as many",
            )
        self.outside = outside
        self.max_ooms = max_ooms
        self.oom_window = oom_window
        self.watch_neighbour = watch_neighbour
        self.margin_bytes = margin_bytes
        self.metrics = metrics or Metrics()
        self._demoted = demoted
        self._turn = Turn(concurrency, wait_s)
        self.metrics.outside_envelope.labels(policy=outside)  # at 0, not missing
        self._enter(GuardState.CLOSED, settled=False)

    def renew(self, outcome: Outcome) -> None:
        """Serve what another settling of the pipeline came to; what was counted is forgotten.

        To be called inside `exclusive` where requests may come at the same time.
        Raises BaselineError, and the guard is closed, where `outcome` is a failure.
        """
        self.close()
        self.host = outcome.host
        self._premises = Premises(outcome, margin_bytes=self.margin_bytes, metrics=self.metrics)
        self.envelope = Envelope(self.host, self._premises.validated.shapes)
        self._ooms = OomWindow(self.oom_window)
        self._was_short = False
        self._again: dict[Shape, _Request] = {}
        self._outside_run = 0
        planned = outcome.committed is not None
        self._enter(GuardState.PLANNED if planned else GuardState.BASELINE, settled=True)
        self._premises.measure()

    def close(self) -> None:
        """No further request is run until `renew`."""
        self._enter(GuardState.CLOSED, settled=False)

    def reopen(self, state: GuardState) -> None:
        """Serve again what was served when it was closed in `state`."""
        self._enter(state, settled=state is not GuardState.CLOSED)

    def exclusive(self) -> AbstractContextManager[None]:
        """Inside, no request runs: to close or to settle again. Raises as `request` does."""
        return self._turn.taken()

    @property
    def state(self) -> GuardState:
        return self._state

    @contextmanager
    def request(self, shape: Shape) -> Iterator[RequestTrace]:
        """One run of a request. What an OOM inside left behind is gone when it is raised, but for
        what the caller's own variables hold.

        Raises OutsideEnvelopeError before anything runs, BusyError, ReentryError.
        """
        with self._admitted(shape) as request:
            try:
                with self._run(request) as trace:
                    yield trace
            except Exception:
                if request.ran_out:
                    self._again[request.asked] = request
                raise

    def serve(self, shape: Shape, call: Callable[[], T]) -> T:
        """`call()` as a request, and after an OOM once more. Raises as `request` does."""
        with self._admitted(shape) as request:
            while True:
                try:
                    with self._run(request):
                        return call()
                except Exception:
                    if not request.ran_out or request.runs > 1 + request.was_transient:
                        raise
                self.metrics.retries.inc()

    def check(self) -> Evidence:
        """Whether the plan's evidence still holds. May be called at any time, from any thread."""
        with self._turn.taken_if_free() as free:
            if free:
                self._check_open()
                self._premises.measure()
            return self._premises.evidence(ooms=len(self._ooms), outside=self._outside_run)

    @contextmanager
    def _admitted(self, shape: Shape) -> Iterator[_Request]:
        asked = self.host.completed(shape)
        self._refuse_outside(asked)
        with ExitStack() as stack:
            try:
                stack.enter_context(self._turn.taken())
            except BusyError:
                self.metrics.requests.labels(outcome=Served.BUSY).inc()
                raise
            request = self._admit(asked)
            served, began = Served.ERROR, time.perf_counter()
            try:
                yield request
                served = self._served(request)
            except Exception:
                served = Served.OOM if request.ran_out else Served.ERROR
                raise
            finally:
                seconds = time.perf_counter() - began
                self.metrics.requests.labels(outcome=served).inc()
                self.metrics.request_seconds.labels(outcome=served).observe(seconds)
            self._premises.measure()

    def _served(self, request: _Request) -> Served:
        if request.runs > 1:
            return Served.RETRIED
        planned = self._state is GuardState.PLANNED and request.release is None
        return Served.PLANNED if planned else Served.BASELINE

    def _refuse_outside(self, asked: Shape) -> None:
        if self.outside is OutsidePolicy.REFUSE and not self.envelope.covering(asked):
            self.metrics.outside_envelope.labels(policy=self.outside).inc()
            self.metrics.requests.labels(outcome=Served.OUTSIDE).inc()
            raise self.envelope.refusal(asked)

    def _admit(self, asked: Shape) -> _Request:
        self._check_open()  # it may have been closed while this one waited
        self._refuse_outside(asked)
        again = self._again.pop(asked, None)
        if again is not None:
            self.metrics.retries.inc()
            return again
        covering = self.envelope.covering(asked)
        request = _Request(asked, self.envelope.like(asked), is_inside=bool(covering))
        if not covering:
            self.metrics.outside_envelope.labels(policy=self.outside).inc()
            logger.warning("%s is outside the validated envelope: %s", asked, self.outside)
            if self.outside is OutsidePolicy.RELEASE:
                request.release = Release.OUTSIDE
        if self._is_short(covering or [request.like]) and request.release is None:
            request.release = Release.NEIGHBOUR
        if not covering and request.release is None:
            self._outside_run += 1
        return request

    def _check_open(self) -> None:
        if self._state is GuardState.CLOSED:
            raise OffloadError("the pipeline isn't served any more", hint="settle it again first")

    def _is_short(self, shapes: Sequence[Shape]) -> bool:
        """Whether the plan doesn't fit any of `shapes` beside what else there is on the device."""
        short = self._premises.short_bytes(shapes)
        is_short = short > 0 and self.watch_neighbour and self._state is GuardState.PLANNED
        if is_short and not self._was_short:
            logger.warning("the plan lacks %d bytes by now: requests run at the baseline", short)
        self._was_short = is_short
        return is_short

    @contextmanager
    def _run(self, request: _Request) -> Iterator[RequestTrace]:
        """One run. Raises the OOM that ended it, when what it left behind is gone."""
        request.runs += 1
        request.ran_out = False
        is_planned = self._state is GuardState.PLANNED and request.release is None
        counts = is_planned and request.is_inside
        if counts:
            self._ooms.begin()
        oom: Exception | None = None
        kind = OomKind.DEVICE
        try:
            with self._schedule(request), self.host.request(request.asked, request.like) as trace:
                yield trace
        except Exception as error:
            if classify(error) not in _RECOVERED:
                raise
            oom, kind = error, classify(error, self.host.read())
        if oom is None:
            return
        try:
            cut_off(oom)
            self._recover(request, kind, str(oom), counts=counts)
            raise oom
        finally:
            del oom

    @contextmanager
    def _schedule(self, request: _Request) -> Iterator[None]:
        """Inside, the schedule that the request runs under is in effect."""
        if self._state is not GuardState.PLANNED or request.release is None:
            yield
            return
        self.metrics.released.labels(cause=request.release).inc()
        released = Transaction(self.host, self._released)
        released.apply()
        try:
            yield
        finally:
            released.rollback()

    @property
    def _released(self) -> Schedule:
        """Nothing retained, and all that was pinned still is: to pin 16 GiB takes seconds."""
        return self.host.schedule.released(self.host.baseline)

    def _recover(self, request: _Request, kind: OomKind, said: str, *, counts: bool) -> None:
        request.ran_out = True
        self.metrics.ooms.labels(kind=kind).inc()
        transient = kind is OomKind.TRANSIENT and not request.was_transient
        if not transient:
            self.host.release()
        self.host.reclaim()
        if transient:
            request.was_transient = True
            logger.warning("a transient OOM at %s: %s", request.asked, said)
        else:
            request.release = Release.OOM
            logger.warning("out of memory at %s, all is released: %s", request.asked, said)
            if counts:
                self._ooms.add()
                if len(self._ooms) >= self.max_ooms:
                    self._demote()
        self._premises.measure()

    def _demote(self) -> None:
        Transaction(self.host, self._released).apply()
        self._enter(GuardState.BASELINE, settled=False)
        self.metrics.demotions.inc()
        why = f"{len(self._ooms)} requests in {self.oom_window} ran out of memory"
        logger.error("%s: nothing is retained until it is settled again", why)
        self._demoted(why)

    def _enter(self, state: GuardState, *, settled: bool) -> None:
        self._state = state
        self.metrics.settled.set(int(settled))
        self.metrics.state.replace({(each,): int(each is state) for each in GuardState})
