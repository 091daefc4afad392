import subprocess
import sys
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from serving import sample

from residency.planner.serving.metrics import Metrics, Served

# What dashboards and alerts are written against: kind, and the labels of each sample.
FAMILIES = {
    "residency_requests": ("counter", {"outcome"}),
    "residency_outside_envelope": ("counter", {"policy"}),
    "residency_ooms": ("counter", {"kind"}),
    "residency_retries": ("counter", set()),
    "residency_released": ("counter", {"cause"}),
    "residency_demotions": ("counter", set()),
    "residency_retained_bytes": ("gauge", {"component"}),
    "residency_headroom_bytes": ("gauge", {"phase", "shape"}),
    "residency_free_bytes": ("gauge", set()),
    "residency_request_seconds": ("summary", {"outcome"}),
    "residency_settled": ("gauge", set()),
    "residency_state": ("gauge", {"state"}),
}
SUFFIXES = {"counter": {"_total"}, "gauge": {""}, "summary": {"_sum", "_count"}}


def test_names_kinds_and_labels_are_those_that_dashboards_know():
    metrics = Metrics()
    metrics.outside_envelope.labels(policy="refuse")
    metrics.request_seconds.labels(outcome=Served.PLANNED).observe(0.25)
    metrics.retained_bytes.replace({("text_encoder",): 9_749_889_024})
    metrics.headroom_bytes.replace({("denoise", '64x64:tokens=16\\"x"\n'): -5})
    metrics.state.replace({("planned",): 1})
    read = {each.name: each for each in text_string_to_metric_families(metrics.text())}
    assert read.keys() == FAMILIES.keys()
    for name, (kind, labels) in FAMILIES.items():
        samples = read[name].samples
        assert read[name].type == kind
        assert {each.name.removeprefix(name) for each in samples} == SUFFIXES[kind]
        assert {frozenset(each.labels) for each in samples} == {frozenset(labels)}
    (headroom,) = read["residency_headroom_bytes"].samples
    assert (headroom.labels["shape"], headroom.value) == ('64x64:tokens=16\\"x"\n', -5)


def test_a_fresh_server_has_its_counters_at_0():
    metrics = Metrics()
    read = {
        (each.name.removeprefix("residency_"), *each.labels.values()): each.value
        for family in metrics.registry.collect()
        for each in family.samples
        if family.type == "counter"
    }
    outcomes = ("planned", "baseline", "retried", "oom", "error", "outside", "busy")
    assert read == dict.fromkeys(
        [
            *(("requests_total", outcome) for outcome in outcomes),
            *(("released_total", cause) for cause in ("outside", "neighbour", "oom")),
            *(("ooms_total", kind) for kind in ("device", "fragmented", "transient")),
            ("retries_total",),
            ("demotions_total",),
        ],
        0,
    )


def test_two_settlements_count_each_for_itself():
    one, other = Metrics(), Metrics()
    one.retries.inc()
    one.state.replace({("planned",): 1})
    assert (sample(one, "retries_total"), sample(other, "retries_total")) == (1, 0)
    assert sample(other, "state", state="planned") is None


OLD = {("encode",): 1, ("denoise",): 1}
NEW = {("denoise",): 2, ("decode",): 2}


def scraped(metrics: Metrics) -> dict[tuple[str, ...], float]:
    (family,) = (f for f in metrics.registry.collect() if f.name == "residency_retained_bytes")
    return {tuple(each.labels.values()): each.value for each in family.samples}


def test_samples_that_are_replaced_are_gone():
    metrics = Metrics()
    metrics.retained_bytes.replace(OLD)
    metrics.retained_bytes.replace(NEW)
    assert scraped(metrics) == NEW


def test_a_scrape_amid_a_replacement_finds_all_of_the_old():
    metrics = Metrics()
    metrics.retained_bytes.replace(OLD)
    found = []

    class Scraped(Mapping):
        """NEW, and whenever one of its samples is asked for there is a scrape."""

        def __getitem__(self, key) -> float:
            found.append(scraped(metrics))
            return NEW[key]

        def __iter__(self) -> Iterator:
            return iter(NEW)

        def __len__(self) -> int:
            return len(NEW)

    metrics.retained_bytes.replace(Scraped())
    assert found
    assert all(each == OLD for each in found)
    assert scraped(metrics) == NEW


def test_a_replacement_amid_a_scrape_leaves_it_all_of_the_old(monkeypatch):
    metrics = Metrics()
    metrics.retained_bytes.replace(OLD)
    add = GaugeMetricFamily.add_metric

    def replaced_first(family, labels, value) -> None:
        metrics.retained_bytes.replace(NEW)
        add(family, labels, value)

    monkeypatch.setattr(GaugeMetricFamily, "add_metric", replaced_first)
    assert scraped(metrics) == OLD
    assert scraped(metrics) == NEW


def test_values_that_are_changed_after_a_replacement_change_nothing():
    metrics = Metrics()
    given = dict(OLD)
    metrics.retained_bytes.replace(given)
    given.clear()
    assert scraped(metrics) == OLD


def test_metrics_import_no_torch():
    code = "import residency.planner.serving.metrics, sys; print('torch' in sys.modules)"
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert done.stdout == "False\n"
