import re
import threading

import pytest

from residency.offload.errors import InputError
from residency.offload.oom import OomKind
from residency.planner.serving.exposition import Counter, Gauge, Summary
from residency.planner.serving.metrics import Metrics, Release, Served

# As the text format 0.0.4 has them: https://prometheus.io/docs/instrumenting/exposition_formats/
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
NUMBER = r"(?:[+-]Inf|NaN|[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)"
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? ({NUMBER})")
SUFFIXES = {"counter": ("",), "gauge": ("",), "summary": ("_sum", "_count")}


def check_format(text: str) -> dict[str, float]:
    """The samples, after every line was found to be in its place."""
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    seen: set[str] = set()
    name = kind = None
    lines = iter(text.removesuffix("\n").split("\n"))
    for line in lines:
        helped = re.fullmatch(rf"# HELP ({NAME}) (?:[^\\]|\\[\\n])+", line)
        if helped:
            typed = re.fullmatch(rf"# TYPE ({NAME}) (\w+)", next(lines))
            name, kind = typed[1], typed[2]
            assert name == helped[1]
            assert name not in seen
            seen.add(name)
            assert name.endswith("_total") == (kind == "counter")
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        assert sample[1].removeprefix(name) in SUFFIXES[kind]
        key = line.rpartition(" ")[0]
        assert key not in samples
        samples[key] = float(sample[3])
    return samples


def test_the_text_of_a_fresh_server_has_every_counter_at_0():
    samples = check_format(Metrics().text())
    for name, label, values in (
        ("requests", "outcome", Served),
        ("released", "cause", Release),
        ("ooms", "kind", (OomKind.DEVICE, OomKind.FRAGMENTED, OomKind.TRANSIENT)),
    ):
        for value in values:
            assert samples[f'residency_{name}_total{{{label}="{value}"}}'] == 0
    assert samples["residency_retries_total"] == samples["residency_demotions_total"] == 0


def test_what_was_counted_stands_in_the_text():
    metrics = Metrics()
    metrics.requests.add(outcome=Served.PLANNED)
    metrics.requests.add(2, outcome=Served.PLANNED)
    metrics.request_seconds.observe(0.25, outcome=Served.PLANNED)
    metrics.request_seconds.observe(0.5, outcome=Served.PLANNED)
    metrics.retained_bytes.set(9_749_889_024, component="text_encoder")
    samples = check_format(metrics.text())
    assert samples['residency_requests_total{outcome="planned"}'] == 3
    assert samples['residency_request_seconds_sum{outcome="planned"}'] == 0.75
    assert samples['residency_request_seconds_count{outcome="planned"}'] == 2
    assert 'residency_retained_bytes{component="text_encoder"} 9749889024\n' in metrics.text()


def test_label_values_and_help_are_escaped():
    lock = threading.RLock()
    gauge = Gauge(lock, "g", 'one\\two\nthree "four"', ("phase", "shape"))
    gauge.set(1, phase='a\\b\n"c"', shape="1x1:tokens=1,guidance=1")
    assert [*gauge.lines()] == [
        '# HELP g one\\\\two\\nthree "four"',
        "# TYPE g gauge",
        'g{phase="a\\\\b\\n\\"c\\"",shape="1x1:tokens=1,guidance=1"} 1',
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1 << 40, "1099511627776"),
        (-5, "-5"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        (float("inf"), "+Inf"),
        (float("-inf"), "-Inf"),
        (float("nan"), "NaN"),
    ],
)
def test_numbers_are_written_as_prometheus_reads_them(value: float, text: str):
    gauge = Gauge(threading.RLock(), "g", "A gauge.")
    gauge.set(value)
    assert [*gauge.samples()] == [f"g {text}"]
    assert SAMPLE.fullmatch(f"g {text}")


def test_a_counter_does_not_go_down():
    counter = Counter(threading.RLock(), "c_total", "A counter.")
    counter.add(2)
    with pytest.raises(InputError, match="can't go down by 1"):
        counter.add(-1)
    assert counter.value() == 2


def test_labels_that_a_family_does_not_have_are_refused():
    summary = Summary(threading.RLock(), "s", "A summary.", ("outcome",))
    with pytest.raises(InputError, match="was given the labels"):
        summary.observe(1.0)
    with pytest.raises(InputError, match=r"\['outcome', 'phase'\]"):
        summary.observe(1.0, outcome="planned", phase="denoise")
    assert summary.count(outcome="planned") == 0


def test_samples_that_are_replaced_are_gone():
    gauge = Gauge(threading.RLock(), "g", "A gauge.", ("phase",))
    gauge.set(1, phase="denoise")
    gauge.replace({("vae_decode",): 2})
    assert [*gauge.samples()] == ['g{phase="vae_decode"} 2']


def test_no_count_is_lost_between_threads(monkeypatch):
    metrics = Metrics()
    gate = threading.Barrier(8)

    class Slow(dict):
        def get(self, *given):
            """Between reading and writing, the other threads get their chance."""
            found = super().get(*given)
            threading.Event().wait(0.0005)
            return found

    monkeypatch.setattr(metrics.ooms, "_values", Slow(metrics.ooms._values))

    def count() -> None:
        gate.wait()
        for _ in range(20):
            metrics.ooms.add(kind=OomKind.DEVICE)
            check_format(metrics.text())

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.ooms.value(kind=OomKind.DEVICE) == 160


def test_prometheus_own_parser_reads_the_text():
    parser = pytest.importorskip("prometheus_client.parser")
    metrics = Metrics()
    metrics.headroom_bytes.set(-5, phase="denoise", shape='64x64:tokens=16\\"x"')
    metrics.request_seconds.observe(0.5, outcome=Served.BASELINE)
    read = {
        (sample.name, *sample.labels.items()): sample.value
        for family in parser.text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }
    shape = ("shape", '64x64:tokens=16\\"x"')
    assert read["residency_headroom_bytes", ("phase", "denoise"), shape] == -5
    assert read["residency_request_seconds_count", ("outcome", "baseline")] == 1
    assert len(read) == len(check_format(metrics.text()))
