import json

import pytest
from bench_card import GIB

from residency.offload.cards import custom_card
from residency.offload.errors import PlanFileError
from residency.phases.shape import Shape
from residency.planner.dry_run import PlanRequest, plan
from residency.planner.plan import Report
from residency.planner.planfile import parse_report, read_report


@pytest.fixture(scope="module")
def report() -> Report:
    request = PlanRequest(
        "qwen-image-2.1",
        (custom_card(GIB),),
        (Shape(64, 64, tokens=16),),
        {"text_encoder": "layerwise-offload", "dit": "resident"},
        {"text_encoder": "0.5"},
        tiny=True,
    )
    return plan(request)


def test_the_json_has_the_fields_that_other_programs_rely_on(report):
    found = json.loads(report.to_json())
    assert {"format_version", "pipeline", "plans"} <= found.keys()
    (planned,) = found["plans"]
    assert {"card", "capacity_bytes", "status", "h2d_bytes_per_request"} <= planned.keys()
    assert planned["h2d_bytes_per_request"].keys() == {"baseline", "planned"}
    assert {
        "phase",
        "component",
        "retain_resident_layers",
        "resident_layers",
        "total_layers",
        "retained_bytes",
        "reason",
    } <= planned["uses"][0].keys()
    assert {"name", "shape", "peak_bytes", "headroom_bytes", "binding"} <= planned["phases"][
        0
    ].keys()
    assert {
        "retained",
        "verdict",
        "phase",
        "shape",
        "shortfall_bytes",
        "rolled_back",
    } <= planned["attempts"][0].keys()


def test_headroom_is_capacity_less_its_terms(report):
    (planned,) = report.plans
    taken = planned.others_bytes + planned.context_bytes + planned.margin_bytes
    for phase in planned.phases:
        assert phase.headroom_bytes == planned.capacity_bytes - taken - phase.peak_bytes
    assert sum(phase.binding for phase in planned.phases) == 1


def test_a_report_is_read_as_it_was_written(report, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(report.to_json())
    assert read_report(path) == report


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "format version None"),
        ('{"format_version": 1}', "format version 1, this residency reads 3"),
        ('{"format_version": "2"}', "format version '2'"),
        ('{"format_version": 3, "pipeline": "x"}', "is no report"),
        ('{"format_version": 3, "extra": 0}', "is no report"),
    ],
)
def test_what_is_no_report_of_this_version_is_refused_with_a_hint(text, said):
    with pytest.raises(PlanFileError, match=said) as refused:
        parse_report(text, "plan.json")
    assert refused.value.hint


def test_a_file_that_cannot_be_read_is_refused_with_a_hint(tmp_path):
    with pytest.raises(PlanFileError, match="can't be read"):
        read_report(tmp_path / "none.json")
