import json
from pathlib import Path

import pytest
from canned import COMMITTED, INFEASIBLE, report
from canned_program import Run
from canned_sized import FIXED_BINDS, NOTHING_FITS, ONE_PHASE_BINDS

from residency.planner.plan import Plan


def explained(run: Run, path: Path, *plans: Plan) -> str:
    path.write_text(report(*plans).to_json(), encoding="utf-8")
    result = run("explain", path)
    assert (result.code, result.err) == (0, "")
    return result.out


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan.json"


def test_each_plan_of_the_file_is_explained(run: Run, path: Path):
    text = explained(run, path, ONE_PHASE_BINDS, FIXED_BINDS)
    assert [line for line in text.splitlines() if " on RTX " in line] == [
        "qwen-image-2.1 on RTX 4090 (simulated)",
        "qwen-image-2.1 on RTX 5090 (simulated)",
    ]
    assert text.count("What stopped each component") == 2


def test_explaining_what_fits_no_card_succeeds(run: Run, path: Path):
    assert "even with everything streamed" in explained(run, path, NOTHING_FITS)


def test_a_plan_without_explanation_is_said_to_have_none(run: Run, path: Path):
    text = explained(run, path, COMMITTED, INFEASIBLE)
    assert "The file has no explanation of this plan.\n" in text
    assert "The baseline doesn't run, so nothing was chosen" in text


def test_the_json_is_the_explanations_and_whose_they_are(run: Run, path: Path):
    path.write_text(report(ONE_PHASE_BINDS, COMMITTED).to_json(), encoding="utf-8")
    document = json.loads(run("explain", path, "--json").out)
    first, second = document["explanations"]
    assert ONE_PHASE_BINDS.explanation is not None
    assert document["format_version"] == 3
    assert (first["card"], second["card"]) == ("RTX 4090", "RTX 5090")
    assert first["explanation"] == ONE_PHASE_BINDS.explanation.model_dump(mode="json")
    assert second["explanation"] is None


def test_a_file_that_is_no_plan_is_refused(run: Run, path: Path):
    path.write_text("{}")
    result = run("explain", path)
    assert (result.code, result.out) == (2, "")
    assert "hint: " in result.err
