"""Serving under a plan: what wasn't validated is flagged, and out of memory is recovered from."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import torch

from ...offload.device import Device
from ...offload.errors import BusyError, InputError, OffloadError
from ...offload.frames import cut_off
from ...offload.oom import OomKind, classify
from ...phases.conductor import RequestTrace
from ...phases.diffusers import DiffusersPipeline
from ...phases.limit import Limit
from ...phases.shape import Shape
from ...phases.use import ComponentUse
from ..outcome import Outcome
from .envelope import Envelope
from .evidence import Evidence
from .metrics import Metrics, Release, Served
from .passes import expected_passes
from .premises import Premises
from .recovery import OomWindow, reclaim
from .turn import Concurrency, Turn

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
    """Runs requests one at a time on the pipeline that `outcome` has settled.

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
    Raises InputError for numbers that can't be, BaselineError where `outcome` is a failure.
    """

    def __init__(
        self,
        outcome: Outcome,
        pipeline: DiffusersPipeline,
        device: Device,
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
        self.pipeline = pipeline
        self.device = device
        self.outside = outside
        self.max_ooms = max_ooms
        self.oom_window = oom_window
        self.watch_neighbour = watch_neighbour
        self.margin_bytes = margin_bytes
        self.metrics = metrics or Metrics()
        self._demoted = demoted
        self._turn = Turn(concurrency, wait_s)
        self.metrics.outside_envelope.add(0, policy=outside)
        self.renew(outcome)

    def renew(self, outcome: Outcome) -> None:
        """Serve what another settling of the pipeline came to; what was counted is forgotten.

        To be called inside `exclusive` where requests may come at the same time.
        Raises BaselineError, and the guard is closed, where `outcome` is a failure.
        """
        self.close()
        self._installation = outcome.installation
        # That of the loop, which may be over by now.
        self._installation.conductor.limit = Limit()
        self._premises = Premises(outcome, margin_bytes=self.margin_bytes, metrics=self.metrics)
        self.envelope = Envelope(self.pipeline, self._premises.validated.shapes)
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
                self.metrics.retries.add()

    def check(self) -> Evidence:
        """Whether the plan's evidence still holds. May be called at any time, from any thread."""
        with self._turn.taken_if_free() as free:
            if free:
                self._premises.measure()
            return self._premises.evidence(ooms=len(self._ooms), outside=self._outside_run)

    @contextmanager
    def _admitted(self, shape: Shape) -> Iterator[_Request]:
        asked = self.pipeline.completed(shape)
        self._refuse_outside(asked)
        with ExitStack() as stack:
            try:
                stack.enter_context(self._turn.taken())
            except BusyError:
                self.metrics.requests.add(outcome=Served.BUSY)
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
                self.metrics.requests.add(outcome=served)
                self.metrics.request_seconds.observe(seconds, outcome=served)
            self._premises.measure()

    def _served(self, request: _Request) -> Served:
        if request.runs > 1:
            return Served.RETRIED
        planned = self._state is GuardState.PLANNED and request.release is None
        return Served.PLANNED if planned else Served.BASELINE

    def _refuse_outside(self, asked: Shape) -> None:
        if self.outside is OutsidePolicy.REFUSE and not self.envelope.covering(asked):
            self.metrics.outside_envelope.add(policy=self.outside)
            self.metrics.requests.add(outcome=Served.OUTSIDE)
            raise self.envelope.refusal(asked)

    def _admit(self, asked: Shape) -> _Request:
        if self._state is GuardState.CLOSED:
            raise OffloadError(
                f"{self.pipeline.name} isn't served any more", hint="settle it again first"
            )
        self._refuse_outside(asked)
        again = self._again.pop(asked, None)
        if again is not None:
            self.metrics.retries.add()
            return again
        covering = self.envelope.covering(asked)
        request = _Request(asked, self.envelope.like(asked), is_inside=bool(covering))
        if not covering:
            self.metrics.outside_envelope.add(policy=self.outside)
            logger.warning("%s is outside the validated envelope: %s", asked, self.outside)
            if self.outside is OutsidePolicy.RELEASE:
                request.release = Release.OUTSIDE
        if self._is_short(covering or [request.like]) and request.release is None:
            request.release = Release.NEIGHBOUR
        if not covering and request.release is None:
            self._outside_run += 1
        return request

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
        installation, asked = self._installation, request.asked
        request.runs += 1
        request.ran_out = False
        is_planned = self._state is GuardState.PLANNED and request.release is None
        counts = is_planned and request.is_inside
        if counts:
            self._ooms.begin()
        oom: Exception | None = None
        kind = OomKind.DEVICE
        try:
            with self._uses(request), torch.no_grad():
                installation.graph.expect(expected_passes(installation, asked, request.like))
                with installation.conductor.request() as trace:
                    yield trace
        except Exception as error:
            if classify(error) not in _RECOVERED:
                raise
            oom, kind = error, classify(error, self.device.read())
        if oom is None:
            return
        try:
            cut_off(oom)
            self._recover(request, kind, str(oom), counts=counts)
            raise oom
        finally:
            del oom

    @contextmanager
    def _uses(self, request: _Request) -> Iterator[None]:
        if self._state is not GuardState.PLANNED or request.release is None:
            yield
            return
        self.metrics.released.add(cause=request.release)
        with self._installation.at_baseline():
            yield

    def _recover(self, request: _Request, kind: OomKind, said: str, *, counts: bool) -> None:
        request.ran_out = True
        self.metrics.ooms.add(kind=kind)
        transient = kind is OomKind.TRANSIENT and not request.was_transient
        if not transient:
            for placement in self._installation.placements.values():
                placement.release_all()
        reclaim(self.device)
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
        uses = [*self._installation.graph.uses]
        self._installation.assign(ComponentUse(use.phase, use.component) for use in uses)
        self._enter(GuardState.BASELINE, settled=False)
        self.metrics.demotions.add()
        why = f"{len(self._ooms)} requests in {self.oom_window} ran out of memory"
        logger.error("%s: nothing is retained until it is settled again", why)
        self._demoted(why)

    def _enter(self, state: GuardState, *, settled: bool) -> None:
        self._state = state
        self.metrics.settled.set(int(settled))
        self.metrics.state.replace({(each,): int(each is state) for each in GuardState})
