from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from residency.phases.graph import ComponentUse
from residency.phases.schedule import NOTHING, Hold, Schedule, format_layers, parse_layers


def hold(**changed) -> Hold:
    """An encoder of which four layers are held, and two across the gap."""
    said = {
        "phase": "text_encode",
        "component": "text_encoder",
        "retain_resident_layers": True,
        "resident_set": (0, 1, 2, 7),
        "retained_set": (2, 7),
        "prefetch": 1,
        "pinned": True,
    }
    return Hold.model_validate(said | changed)


DENOISE = hold(
    phase="denoise",
    component="transformer",
    retain_resident_layers=False,
    resident_set=(0,),
    retained_set=(),
    prefetch=0,
    pinned=False,
)
REFINE = DENOISE.model_copy(update={"phase": "refine"})


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


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"retained_set": (2, 8)}, "layers 8 are retained, and aren't in the resident set"),
        ({"retain_resident_layers": False}, "retain_resident_layers is false"),
        ({"prefetch": -1}, "greater than or equal to 0"),
        ({"layers": 3}, "Extra inputs are not permitted"),
    ],
)
def test_what_a_use_can_not_hold_is_refused(changed, told):
    with pytest.raises(ValidationError, match=told):
        hold(**changed)


def test_a_use_is_there_once_and_a_component_is_streamed_in_one_way():
    with pytest.raises(ValidationError, match="a use is there twice"):
        Schedule(uses=(hold(), hold(retained_set=())))
    with pytest.raises(ValidationError, match="transformer is streamed in two ways"):
        Schedule(uses=(DENOISE, REFINE.model_copy(update={"prefetch": 1})))


def test_the_key_is_of_what_is_held_and_not_of_its_order():
    uses = (hold(), DENOISE, REFINE)
    assert len({Schedule(uses=each).key for each in permutations(uses)}) == 1
    changes = [
        {"retain_resident_layers": False, "retained_set": ()},
        {"resident_set": (2, 7)},
        {"retained_set": (2,)},
        {"prefetch": 0},
        {"pinned": False},
        {"component": "text_encoder_2"},
        {"phase": "text_encode_2"},
    ]
    keys = {Schedule(uses=(hold(**each), DENOISE)).key for each in changes}
    assert len(keys | {Schedule(uses=(hold(), DENOISE)).key}) == len(changes) + 1


def test_a_schedule_is_read_as_it_was_written():
    made = Schedule(uses=(hold(), DENOISE))
    text = made.model_dump_json()
    assert '"resident_set":"0-2,7"' in text
    assert Schedule.model_validate_json(text) == made


def test_it_tells_what_is_retained_and_what_changes():
    made = Schedule(uses=(hold(), DENOISE, REFINE))
    assert made.retaining == ("text_encoder",)
    assert [each.component for each in made.components] != []
    assert {each.component for each in made.components} == {"text_encoder", "transformer"}
    assert made.changed(made) == frozenset()
    less = Schedule(uses=(hold(retained_set=()), DENOISE, REFINE))
    assert made.changed(less) == {"text_encoder"}
    assert made.changed(NOTHING) == {"text_encoder", "transformer"}


def test_what_is_released_is_streamed_as_before():
    planned = Schedule(uses=(hold(prefetch=3), DENOISE))
    baseline = Schedule(
        uses=(hold(retain_resident_layers=False, retained_set=(), pinned=False), DENOISE)
    )
    released = planned.released(baseline)
    assert released.retaining == ()
    assert [(each.prefetch, each.pinned) for each in released.uses] == [(3, True), (0, False)]
    assert [each.resident_set for each in released.uses] == [(0, 1, 2, 7), (0,)]


def test_a_use_under_a_schedule_holds_what_it_says():
    use = ComponentUse("text_encode", "text_encoder", 1)
    under = use.holding(hold(), 3)
    assert (under.passes, under.retain_resident_layers) == (3, True)
    assert (under.resident_layers, under.retained_layers) == ({0, 1, 2, 7}, {2, 7})
    assert use.holding(None, 1) == use
