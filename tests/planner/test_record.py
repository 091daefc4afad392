import pytest
from journaling import record
from pydantic import ValidationError

from residency.planner.journal.record import JournalRecord, Kind


def test_a_line_is_one_line_of_json_that_is_read_as_it_was_written():
    line = record(Kind.INTENT, detail="two\nlines").to_line()
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert JournalRecord.model_validate_json(line).detail == "two\nlines"


@pytest.mark.parametrize(("kind", "attempt"), [(Kind.BEGIN, 1), (Kind.INTENT, None)])
def test_a_record_is_of_a_run_or_of_an_attempt_with_its_candidate(kind, attempt):
    with pytest.raises(ValidationError, match="attempt"):
        record(kind, attempt=attempt)
    with pytest.raises(ValidationError, match="candidate"):
        record(Kind.INTENT, candidate=None)
