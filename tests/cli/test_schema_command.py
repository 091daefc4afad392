import json
import subprocess
import sys
from datetime import UTC, datetime

import pytest
from canned import COMMITTED, report
from canned_program import Run

from residency.phases.schedule import Hold, Schedule
from residency.planner.journal.record import JournalRecord, Kind, ProcessRecord

RECORD = JournalRecord(
    format_version=2,
    kind=Kind.INTENT,
    run="0123",
    attempt=1,
    fingerprint="abcd",
    candidate=Schedule(
        uses=(
            Hold(
                phase="text_encode",
                component="text_encoder",
                retain_resident_layers=True,
                resident_set=(0, 1, 2, 7),
                retained_set=(0,),
                prefetch=1,
                pinned=True,
            ),
        )
    ),
    verdict=None,
    detail=None,
    process=ProcessRecord(pid=1, host="node7", boot="b"),
    time=datetime(2026, 1, 2, tzinfo=UTC),
)


@pytest.mark.parametrize(
    ("arguments", "model", "value"),
    [
        ((), "Report", report(COMMITTED).to_json()),
        (("plan",), "Report", report(COMMITTED).to_json()),
        (("journal",), "JournalRecord", RECORD.to_line().decode()),
    ],
)
def test_the_schema_has_the_fields_of_what_is_written(
    run: Run, arguments: tuple[str, ...], model: str, value: str
):
    result = run("schema", *arguments)
    assert (result.code, result.err) == (0, "")
    schema = json.loads(result.out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["title"] == model
    assert {*schema["required"]} == {*schema["properties"]} == {*json.loads(value)}


def test_fields_say_what_they_mean(run: Run):
    plan = json.loads(run("schema").out)["$defs"]
    assert plan["Fingerprint"]["properties"]["world_size"]["description"] == (
        "Ranks that serve together."
    )
    assert plan["Plan"]["properties"]["fingerprint"]["description"].startswith("What the plan")
    journal = json.loads(run("schema", "journal").out)
    assert journal["properties"]["run"]["description"]
    assert "intent" in journal["$defs"]["Kind"]["enum"]


def test_layers_are_written_as_the_schema_says(run: Run):
    import re

    schema = json.loads(run("schema", "journal").out)
    layers = schema["$defs"]["Hold"]["properties"]["resident_set"]
    (use,) = json.loads(RECORD.to_line())["candidate"]["uses"]
    assert layers["type"] == "string"
    for text in (use["resident_set"], use["retained_set"], ""):
        assert re.search(layers["pattern"], text)
    assert not re.search(layers["pattern"], "0-")


def test_another_schema_is_bad_input(run: Run):
    result = run("schema", "journl")
    assert (result.code, result.out) == (2, "")
    assert result.err.splitlines() == [
        "error: there is no schema 'journl'",
        "hint: did you mean 'journal'?",
    ]


def test_the_schema_needs_no_torch():
    code = (
        "import sys; from residency.cli.main import main\n"
        "sys.argv[1:] = ['schema', 'journal']\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True)
    assert done.stderr == "False\n"
