"""A committed choice stays while readings only wobble."""

from dataclasses import replace

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from instances import PAGEABLE, instance, instances, part

from residency.planner.choosing.choose import Chosen, choose, kept
from residency.planner.choosing.model import Instance, Mode, nothing_retained

WOBBLE = 6
"""Bytes, for the rooms of small instances."""

drawn = settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
wobbles = st.integers(-WOBBLE, WOBBLE)


def read(whole: Instance, wobble: list[int]) -> Instance:
    """Each place read with an error of its own."""
    return replace(
        whole,
        places=tuple(
            replace(room, room_bytes=room.room_bytes + error)
            for room, error in zip(whole.places, wobble, strict=False)
        ),
    )


@drawn
@given(
    instances(),
    st.lists(wobbles, min_size=8, max_size=8),
    st.lists(wobbles, min_size=8, max_size=8),
)
def test_what_is_chosen_at_one_reading_is_kept_at_any_other(
    whole: Instance, first: list[int], second: list[int]
) -> None:
    chosen = choose(read(whole, first))
    assume(isinstance(chosen, Chosen))
    assert isinstance(chosen, Chosen)
    assert kept(read(whole, second), chosen.choice, wobble_bytes=WOBBLE) == chosen.choice


def test_a_choice_that_no_longer_fits_is_given_up() -> None:
    whole = instance(part((10, 10)), rooms=(99, 0))
    chosen = choose(whole)
    assert isinstance(chosen, Chosen)
    assert kept(whole.shifted(-12), chosen.choice, wobble_bytes=WOBBLE) == chosen.choice
    assert kept(whole.shifted(-22), chosen.choice, wobble_bytes=WOBBLE) is None


def test_a_choice_is_given_up_where_much_more_room_makes_a_request_faster() -> None:
    whole = instance(part((10, 10)), rooms=(99, 0))
    chosen = choose(whole)
    assert isinstance(chosen, Chosen)
    assert kept(whole.shifted(10), chosen.choice, wobble_bytes=WOBBLE) == chosen.choice
    assert kept(whole.shifted(50), chosen.choice, wobble_bytes=WOBBLE) is None


def test_a_refuted_choice_is_not_kept() -> None:
    whole = instance(part((10, 10)), rooms=(99, 0))
    chosen = choose(whole)
    assert isinstance(chosen, Chosen)
    refuted = replace(whole, refuted=(chosen.choice,))
    assert kept(refuted, chosen.choice, wobble_bytes=WOBBLE) is None


def test_a_mode_is_the_same_when_its_copies_are_measured_anew() -> None:
    whole = instance(part((10, 10)), rooms=(99, 0))
    chosen = choose(whole)
    assert isinstance(chosen, Chosen)
    slower = Mode(PAGEABLE.prefetch, PAGEABLE.pinned, 0.021, 0)
    again = instance(part((10, 10), modes=(slower,)), rooms=(99, 0))
    found = kept(again, chosen.choice, wobble_bytes=WOBBLE)
    assert found == (replace(chosen.choice[0], mode=slower),)


def test_a_choice_for_other_components_is_not_kept() -> None:
    whole = instance(part((10, 10)), rooms=(99, 0))
    other = instance(part((10, 10)), part((2, 5), phase=1, component="vae"), rooms=(99, 99))
    previous = (nothing_retained(whole.parts[0], PAGEABLE),)
    assert kept(other, previous, wobble_bytes=WOBBLE) is None
    fewer = instance(part((4, 10), (2, 1)), rooms=(99, 0))
    assert kept(fewer, previous, wobble_bytes=WOBBLE) is None
