import json
from pathlib import Path

import pytest
from canned import COMMITTED, INFEASIBLE, REFUTED, report
from canned_program import CannedService, Run

SAVED = report(COMMITTED, REFUTED)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(SAVED.to_json(), encoding="utf-8")
    return path


def test_a_saved_plan_is_shown_as_it_was_when_planned(
    run: Run, service: CannedService, saved: Path
):
    service.answer = SAVED
    planned = run("plan", "qwen-image-2.1", "--card", "RTX 4090")
    shown = run("show", saved)
    assert (shown.code, shown.out, shown.err) == (0, planned.out, "")


def test_a_saved_plan_is_printed_as_the_json_that_it_is(run: Run, saved: Path):
    assert run("show", saved, "--json").out == saved.read_text(encoding="utf-8")


def test_showing_a_plan_that_fits_no_card_succeeds(run: Run, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(report(INFEASIBLE).to_json())
    result = run("show", path)
    assert (result.code, "Does not fit" in result.out) == (0, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"format_version": 99}), "format version 99"),
        (json.dumps({"format_version": 1}), "format version 1, this residency reads 3"),
        ("{}", "format version None"),
        ("[]", "format version None"),
        ("no json", "is no JSON"),
        ("", "is no JSON"),
        (json.dumps({"format_version": 3, "plans": []}), "is no report"),
        ("\udcff", "can't be read"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(run: Run, tmp_path: Path, text: str, message: str):
    path = tmp_path / "plan.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    result = run("show", path)
    error, hint = result.err.splitlines()
    assert (result.code, result.out) == (2, "")
    assert message in error
    assert hint.startswith("hint: ")


def test_a_directory_is_no_plan(run: Run, tmp_path: Path):
    assert run("show", tmp_path).code == 2
