"""What a server counts and measures."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import StrEnum

from ...offload.oom import OomKind
from .exposition import Counter, Family, Gauge, Summary


class Served(StrEnum):
    """How a request ended."""

    PLANNED = "planned"
    BASELINE = "baseline"
    """It ran with nothing retained, and was meant to."""
    RETRIED = "retried"
    """It ran out of memory, and the second run went through."""
    OOM = "oom"
    ERROR = "error"
    """With another error than out of memory."""
    OUTSIDE = "outside"
    """It wasn't run, since it is outside the envelope."""
    BUSY = "busy"
    """It wasn't run, since another one ran."""


class Release(StrEnum):
    """Why a request began with nothing retained although a plan is applied."""

    OUTSIDE = "outside"
    NEIGHBOUR = "neighbour"
    OOM = "oom"


class Metrics:
    """All families of one server. Any thread may write, and read a consistent `text`."""

    def __init__(self) -> None:
        lock = self._lock = threading.RLock()
        self.requests = Counter(
            lock, "residency_requests_total", "Requests, by how they ended.", ("outcome",)
        )
        self.outside_envelope = Counter(
            lock,
            "residency_outside_envelope_total",
            "Requests outside the validated envelope, by the policy that was applied.",
            ("policy",),
        )
        self.ooms = Counter(
            lock,
            "residency_ooms_total",
            "Runs that ended out of device memory, by whether the card was full.",
            ("kind",),
        )
        self.retries = Counter(
            lock, "residency_retries_total", "Runs of a request that had run out of memory before."
        )
        self.released = Counter(
            lock,
            "residency_released_total",
            "Runs that began with nothing retained although a plan is applied, by why.",
            ("cause",),
        )
        self.demotions = Counter(
            lock,
            "residency_demotions_total",
            "How often a plan was given up for the baseline after repeated OOMs.",
        )
        self.retained_bytes = Gauge(
            lock,
            "residency_retained_bytes",
            "Device bytes of a component's weights after the last request.",
            ("component",),
        )
        self.headroom_bytes = Gauge(
            lock,
            "residency_headroom_bytes",
            "Device bytes left at a phase's validated peak, less the margin, after the last "
            "request.",
            ("phase", "shape"),
        )
        self.free_bytes = Gauge(
            lock, "residency_free_bytes", "Free device bytes after the last request."
        )
        self.request_seconds = Summary(
            lock,
            "residency_request_seconds",
            "Seconds of a request, all its runs together, without waiting for its turn.",
            ("outcome",),
        )
        self.settled = Gauge(
            lock, "residency_settled", "1 while what the last settling decided is applied."
        )
        self.state = Gauge(
            lock, "residency_state", "1 for the state that the server is in.", ("state",)
        )
        for counter, values in (
            (self.requests, Served),
            (self.released, Release),
            (self.ooms, (OomKind.DEVICE, OomKind.FRAGMENTED, OomKind.TRANSIENT)),
        ):
            for value in values:
                counter.add(0, **{counter.labels[0]: value})

    @property
    def families(self) -> Iterable[Family]:
        return (each for each in vars(self).values() if isinstance(each, Family))

    def text(self) -> str:
        with self._lock:
            return "".join(f"{line}\n" for each in self.families for line in each.lines())
