"""What a server counts and measures, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Metric,
    Summary,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily

from ...offload.memory_errors import OomKind

CONTENT_TYPE = CONTENT_TYPE_LATEST


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


class WholeGauge:
    """A gauge whose samples are replaced all at once: a scrape in another thread finds those of
    before or those of after, and none of a component or shape that is served no more."""

    def __init__(
        self, name: str, text: str, labels: tuple[str, ...], *, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        # Exchanged as a whole, never written into: `collect` iterates over the one that it found.
        self._values: Mapping[tuple[str, ...], float] = {}
        registry.register(self)

    def replace(self, values: Mapping[tuple[str, ...], float]) -> None:
        """`values`: by the values of the labels, in their order."""
        assert all(len(key) == len(self._labels) for key in values)
        self._values = dict(values)

    def describe(self) -> Iterable[Metric]:
        """Its name, with which no other collector of the registry may clash."""
        return [GaugeMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for key, value in self._values.items():
            family.add_metric(key, value)
        return [family]


class _Registry(CollectorRegistry):
    """Without the time at which each counter was made, which doubles the samples and says nothing
    here: `disable_created_metrics` would be for the whole process, which isn't ours."""

    def collect(self) -> Iterable[Metric]:
        for metric in super().collect():
            metric.samples = [s for s in metric.samples if s.name != f"{metric.name}_created"]
            yield metric


class Metrics:
    """All families of one settlement, in a registry of its own. Any thread may write and read.

    `registry` can be handed to what takes one, such as `prometheus_client.make_asgi_app`.
    """

    def __init__(self) -> None:
        registry = self.registry = _Registry()
        self.requests = Counter(
            "residency_requests_total",
            "Requests, by how they ended.",
            ("outcome",),
            registry=registry,
        )
        self.outside_envelope = Counter(
            "residency_outside_envelope_total",
            "Requests outside the validated envelope, by the policy that was applied.",
            ("policy",),
            registry=registry,
        )
        self.ooms = Counter(
            "residency_ooms_total",
            "Runs that ended out of device memory, by whether the card was full.",
            ("kind",),
            registry=registry,
        )
        self.retries = Counter(
            "residency_retries_total",
            "Runs of a request that had run out of memory before.",
            registry=registry,
        )
        self.released = Counter(
            "residency_released_total",
            "Runs that began with nothing retained although a plan is applied, by why.",
            ("cause",),
            registry=registry,
        )
        self.demotions = Counter(
            "residency_demotions_total",
            "How often a plan was given up for the baseline after repeated OOMs.",
            registry=registry,
        )
        self.retained_bytes = WholeGauge(
            "residency_retained_bytes",
            "Device bytes of a component's weights after the last request.",
            ("component",),
            registry=registry,
        )
        self.headroom_bytes = WholeGauge(
            "residency_headroom_bytes",
            "Device bytes left at a phase's validated peak, less the margin, after the last "
            "request.",
            ("phase", "shape"),
            registry=registry,
        )
        self.free_bytes = Gauge(
            "residency_free_bytes", "Free device bytes after the last request.", registry=registry
        )
        self.request_seconds = Summary(
            "residency_request_seconds",
            "Seconds of a request, all its runs together, without waiting for its turn.",
            ("outcome",),
            registry=registry,
        )
        self.settled = Gauge(
            "residency_settled",
            "1 while what the last settling decided is applied.",
            registry=registry,
        )
        self.state = WholeGauge(
            "residency_state",
            "1 for the state that the server is in.",
            ("state",),
            registry=registry,
        )
        # A counter that is there from the start, at 0, has a rate when it first counts.
        for outcome in Served:
            self.requests.labels(outcome=outcome)
        for cause in Release:
            self.released.labels(cause=cause)
        for kind in (OomKind.DEVICE, OomKind.FRAGMENTED, OomKind.TRANSIENT):
            self.ooms.labels(kind=kind)

    def text(self) -> str:
        """As `CONTENT_TYPE` says."""
        return generate_latest(self.registry).decode()
