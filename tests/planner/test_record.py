from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journaling import LARGE, MEDIUM, candidate, record
from pydantic import ValidationError

from residency.phases.use import ComponentUse
from residency.planner.journal.record import (
    CandidateRecord,
    JournalRecord,
    Kind,
    format_layers,
    parse_layers,
    record_of,
)


@dataclass(frozen=True)
class Streamed:
    prefetch: int = 1
    pinned: bool = True


STREAMED = {"text_encoder": Streamed(), "transformer": Streamed(0, pinned=False)}
DECLARED = {"text_encoder": {2, 0, 1}, "transformer": {0}}
SIZED = ComponentUse(
    "text_encode", "text_encoder", 1, True, frozenset({0, 1, 2, 7}), frozenset({7, 2})
)
DECLARED_USES = (
    ComponentUse("text_encode", "text_encoder", 1, True),
    ComponentUse("denoise", "transformer", 50, False),
)


@given(st.frozensets(st.integers(0, 200)))
def test_layers_are_read_as_they_were_written(layers):
    assert parse_layers(format_layers(layers)) == tuple(sorted(layers))


@pytest.mark.parametrize(
    ("layers", "text"), [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((9, 0, 1, 2, 5), "0-2,5,9")]
)
def test_layers_are_written_as_ranges(layers, text):
    assert format_layers(layers) == text


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "1 2", "1-2-3", "٣", "0-9999999999"])
def test_what_is_no_list_of_layers_is_refused(text):
    with pytest.raises(ValueError, match="no list of layers"):
        parse_layers(text)


def test_a_sized_use_is_recorded_with_its_sets():
    (use,) = record_of([SIZED], STREAMED, DECLARED).uses
    assert (use.sized, use.resident_set, use.retained_set) == (True, (0, 1, 2, 7), (2, 7))
    assert (use.prefetch, use.pinned) == (1, True)


def test_a_use_without_sets_of_its_own_is_recorded_with_the_declared_one_where_it_is_held():
    retained, streamed = record_of(DECLARED_USES, STREAMED, DECLARED).uses
    assert (retained.sized, retained.resident_set, retained.retained_set) == (
        False,
        (0, 1, 2),
        (0, 1, 2),
    )
    assert (streamed.resident_set, streamed.retained_set) == ((0,), ())
    once = ComponentUse("text_encode", "text_encoder", 1, False)
    (nothing,) = record_of([once], STREAMED, DECLARED).uses
    assert (nothing.resident_set, nothing.retained_set) == ((), ())


@pytest.mark.parametrize("uses", [(SIZED,), DECLARED_USES], ids=["sized", "declared"])
def test_the_uses_of_a_record_are_those_that_it_was_made_of(uses):
    made = record_of(uses, STREAMED, DECLARED)
    assert tuple(use.component_use() for use in made.uses) == uses
    assert record_of((use.component_use() for use in made.uses), STREAMED, DECLARED) == made


def test_a_record_survives_the_journal():
    made = record_of([SIZED, *DECLARED_USES], STREAMED, DECLARED)
    text = made.model_dump_json()
    assert '"resident_set":"0-2,7"' in text
    assert CandidateRecord.model_validate_json(text) == made


def test_the_key_tells_what_is_decided_and_nothing_else():
    first, second = LARGE.uses
    assert LARGE.key == CandidateRecord(uses=(second, first)).key
    assert LARGE.key != MEDIUM.key
    for field, value in (
        ("retain_resident_layers", False),
        ("resident_set", ()),
        ("retained_set", ()),
        ("prefetch", 0),
        ("pinned", False),
        ("component", "other"),
        ("phase", "other"),
    ):
        changed = first.model_copy(update={field: value})
        assert CandidateRecord(uses=(changed, second)).key != LARGE.key
    for field, value in (("passes", 7), ("resident_set", ()), ("retained_set", (1,))):
        as_given = second.model_copy(update={field: value})
        assert CandidateRecord(uses=(first, as_given)).key == LARGE.key


def test_the_components_of_a_candidate_are_those_that_retain():
    assert LARGE.components == ("text_encoder",)
    assert candidate().components == ()


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
