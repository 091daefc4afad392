import json

import pytest
from canned_program import Run

CARD = ("--tiny", "--capacity", "1GiB", "--margin", "0", "--size", "auto")


@pytest.fixture
def saved(run: Run, tmp_path):
    path = tmp_path / "plan.json"
    assert run("plan", "qwen-image-2.1", *CARD, "--out", path).code == 0
    return path


def changed(path, **fields):
    report = json.loads(path.read_text())
    report["plans"][0].update(fields)
    path.write_text(json.dumps(report))


def test_a_plan_that_holds_is_swept_once_and_put_back(run: Run, saved):
    result = run("apply", saved, "--tiny")
    assert result.code == 0
    assert "Holds: one sweep at the largest shapes was accepted." in result.out
    assert "Would retain" in result.out
    assert "verifying the plan that is known" in result.err
    assert "measuring the baseline" not in result.err


def test_a_plan_that_does_not_fit_any_more_says_where_it_failed(run: Run, saved):
    plan = json.loads(saved.read_text())["plans"][0]
    free = plan["capacity_bytes"] - plan["context_bytes"]
    changed(saved, others_bytes=free - max(phase["peak_bytes"] for phase in plan["phases"]))
    result = run("apply", saved, "--tiny")
    assert result.code == 1
    assert "Doesn't hold: out of memory in" in result.out
    assert "rolled back" in result.out


def test_a_stale_plan_is_refused_with_the_first_difference(run: Run, saved):
    report = json.loads(saved.read_text())
    report["plans"][0]["fingerprint"]["torch"] = "2.0.0"
    saved.write_text(json.dumps(report))
    result = run("apply", saved, "--tiny")
    assert result.code == 2
    assert "torch was 2.0.0, is " in result.err
    assert "hint:" in result.err


def test_a_plan_for_a_real_card_needs_the_card(run: Run, saved):
    changed(saved, device="NVIDIA GeForce RTX 4090")
    result = run("apply", saved, "--tiny")
    assert result.code == 2
    assert "is for a real card" in result.err
    assert "--device" in result.err


def test_a_file_that_retains_nothing_has_nothing_to_apply(run: Run, saved):
    changed(saved, status="baseline_only")
    result = run("apply", saved, "--tiny")
    assert result.code == 2
    assert "has no plan that retains anything" in result.err
