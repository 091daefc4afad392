"""The exact choice, against all choices, and by hand."""

import time
from dataclasses import replace

import pytest
from brute_force import best, part_choices, penalty_s, shortest, size
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from instances import PAGEABLE, instance, instances, part

from residency.planner.choosing.choose import Chosen, choose
from residency.planner.choosing.model import (
    Choice,
    Fixed,
    Instance,
    LayerClass,
    Mode,
    Part,
    UseSpan,
    nothing_retained,
)
from residency.planner.choosing.program import Order
from residency.planner.choosing.unfit import Lack, Unfit

PINNED = Mode(1, True, 0.01, 40)

drawn = settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
fewer = settings(drawn, max_examples=60)


def chosen_for(whole: Instance, **told: object) -> Chosen:
    found = choose(whole, **told)  # type: ignore[arg-type]
    assert isinstance(found, Chosen), str(found)
    return found


def agrees(whole: Instance, found: Chosen | Unfit) -> None:
    expected = best(whole)
    if expected is None:
        assert isinstance(found, Unfit)
        if found.lack is Lack.ROOM:
            assert found.short_bytes == shortest(whole)
        return
    assert isinstance(found, Chosen), str(found)
    assert whole.fits(found.choice)
    assert found.proven
    assert found.gap <= 1e-9
    assert found.best_s == pytest.approx(expected.best_s, rel=1e-9)
    assert found.held_bytes == whole.held_bytes(found.choice) == expected.held_bytes
    assert found.host_bytes == whole.host_bytes(found.choice) == expected.host_bytes
    last = found.seconds + penalty_s(Order(whole), found.choice)
    assert last == pytest.approx(expected.seconds_and_order, rel=1e-9)


@drawn
@given(instances())
def test_every_step_of_the_choice_is_that_of_trying_all(whole: Instance) -> None:
    assume(size(whole) <= 20_000)
    agrees(whole, choose(whole))


@fewer
@given(instances(), st.data())
def test_what_was_refuted_and_all_that_is_as_large_is_excluded(
    whole: Instance, data: st.DataObject
) -> None:
    assume(0 < size(whole) <= 4_000)
    start: Choice | None = None
    for _ in range(3):
        found = choose(whole, start=start)
        agrees(whole, found)
        if isinstance(found, Unfit):
            return
        start = found.choice
        other = tuple(data.draw(st.sampled_from([*part_choices(p)])) for p in whole.parts)
        whole = replace(whole, refuted=(*whole.refuted, start, other))


@fewer
@given(instances(), st.integers(0, 40), st.integers(0, 7))
def test_a_larger_room_never_makes_a_request_slower(
    whole: Instance, more_bytes: int, place: int
) -> None:
    before = choose(whole)
    assume(isinstance(before, Chosen))
    assert isinstance(before, Chosen)
    places = list(whole.places)
    at = place % len(places)
    places[at] = replace(places[at], room_bytes=places[at].room_bytes + more_bytes)
    after = chosen_for(replace(whole, places=tuple(places)))
    assert after.best_s <= before.best_s * (1 + 1e-9)
    assert after.seconds <= before.best_s * 1.01 * (1 + 1e-9)


@fewer
@given(instances(), st.data())
def test_the_start_has_no_say(whole: Instance, data: st.DataObject) -> None:
    found = choose(whole)
    assume(isinstance(found, Chosen))
    assert isinstance(found, Chosen)
    start = tuple(data.draw(st.sampled_from([*part_choices(p)])) for p in whole.parts)
    started = chosen_for(whole, start=start)
    # How far the solver rounds the bound may depend on where it began.
    assert started.bound_s == pytest.approx(found.bound_s, rel=1e-9, abs=1e-12)
    assert replace(started, bound_s=found.bound_s) == found
    assert choose(whole) == found


def test_retaining_the_largest_block_shrinks_the_window() -> None:
    # Streamed: 2 buffers of 100. With the block of 100 held: 100 + 2 buffers of 10.
    whole = instance(part((1, 100), (6, 10)), rooms=(120, 0))
    found = chosen_for(whole)
    assert found.choice[0].resident == ((1, 0),)
    assert whole.device_bytes(found.choice, 0) == 120
    streamed = (nothing_retained(whole.parts[0], PAGEABLE),)
    assert whole.device_bytes(streamed, 0) == 200


def test_held_layers_leave_room_for_the_window() -> None:
    found = chosen_for(instance(part((10, 10)), rooms=(99, 0)))
    assert found.choice[0].resident == ((7,),)  # 70, and 2 buffers of 10; 8 would take 100


def test_the_last_streamed_layer_needs_one_buffer() -> None:
    fixed = Fixed(resident=(9,))
    whole = instance(part((10, 10), fixed=fixed), rooms=(100, 0))
    assert whole.device_bytes(chosen_for(whole).choice, 0) == 100


def test_a_set_is_retained_into_the_next_request_where_the_other_phases_have_room() -> None:
    encoder = part((4, 10), passes=1, rest_bytes=5, component="text_encoder")
    found = chosen_for(instance(encoder, rooms=(45, 45)))
    assert found.choice[0].retains == (True,)
    assert found.choice[0].retained == ((4,),)
    assert found.seconds == 0
    tight = chosen_for(instance(encoder, rooms=(45, 4)))
    assert tight.choice[0].retains == (False,)
    assert tight.seconds == pytest.approx(45 * 0.02)


def test_each_gap_is_decided_on_its_own() -> None:
    """Uses in phases 0 and 2; phase 1 between them has room, phase 3 behind them has none."""
    twice = Part(
        "vae",
        0,
        0,
        (LayerClass("g", 4, 10, 10, (True, True)),),
        (
            UseSpan("phase0", (0,), (1,), 1, (1,), 1.0),
            UseSpan("phase2", (2,), (1,), 1, (3,), 1.0),
        ),
        (PAGEABLE,),
    )
    found = chosen_for(instance(twice, rooms=(40, 25, 60, 0)))
    assert found.choice[0].retains == (True, False)
    assert found.choice[0].retained == ((2,), (0,))
    assert found.seconds == pytest.approx((40 + 20) * 0.02)
    wrapping = chosen_for(instance(twice, rooms=(60, 0, 40, 25)))
    assert wrapping.choice[0].retained == ((0,), (2,))


def test_the_fewest_bytes_within_one_percent_win() -> None:
    """Layers save 200 copies of 10, and one of them only 2: not worth 1 % of a request."""
    dit = part((3, 10), passes=200)
    small = part((1, 30), phase=1, passes=1, component="vae")
    found = chosen_for(instance(dit, small, rooms=(100, 100)))
    # Best: 0 s. Nothing is within 1 % of that, so all is retained.
    assert found.best_s == found.seconds == 0
    slow = replace(instance(dit, small, rooms=(100, 100)), fixed_seconds=200.0)
    kept = chosen_for(slow)
    assert kept.best_s == 200.0
    assert kept.choice[0].retains == kept.choice[1].retains == (False,)
    assert kept.seconds <= 202.0
    assert kept.held_bytes == 30


def test_the_host_budget_goes_where_it_saves_most() -> None:
    parts = [
        part((4, 10), phase=i, passes=passes, modes=(PAGEABLE, PINNED), component=f"c{i}")
        for i, passes in enumerate((2, 9))
    ]
    found = chosen_for(instance(*parts, rooms=(20, 20), host=40))
    assert [chosen.mode.pinned for chosen in found.choice] == [False, True]
    assert found.host_bytes == 40


def test_nothing_fits_is_told_with_the_phase_and_the_bytes() -> None:
    found = choose(instance(part((4, 100), rest_bytes=50), rooms=(220, 900)))
    assert isinstance(found, Unfit)
    assert (found.lack, found.phase, found.shape, found.place) == (
        Lack.ROOM,
        "phase0",
        "large",
        0,
    )
    assert found.short_bytes == 30
    assert str(found) == ("phase0 at large is short by 30 bytes, even with everything streamed")


def test_a_block_too_large_to_stream_is_no_reason_while_it_can_be_held() -> None:
    found = choose(instance(part((1, 100), (3, 10)), rooms=(110, 0)))
    assert isinstance(found, Unfit)
    assert found.short_bytes == 10  # 100 held, 2 buffers of 10
    assert str(found) == "phase0 at large is short by 10 bytes, whatever is held"


def test_what_is_fixed_and_do_not_fit_are_reported_and_not_changed() -> None:
    found = choose(instance(part((4, 10), fixed=Fixed(resident=(3,))), rooms=(30, 0)))
    assert isinstance(found, Unfit)
    assert str(found) == (
        "phase0 at large is short by 10 bytes, even with everything streamed that isn't fixed"
    )


def test_what_is_fixed_and_contradict_themselves_are_reported() -> None:
    for fixed in (
        Fixed(resident=(5,)),
        Fixed(resident=(1,), retained=(2,), retains=True),
        Fixed(mode=PINNED),
    ):
        found = choose(instance(part((4, 10), fixed=fixed), rooms=(100, 100)))
        assert isinstance(found, Unfit)
        assert found.lack is Lack.FIXED
        assert found.component == "dit"


def test_a_host_budget_too_small_for_what_has_to_be_pinned_is_reported() -> None:
    whole = instance(
        part((4, 10), modes=(PAGEABLE, PINNED), fixed=Fixed(mode=PINNED)), rooms=(100, 100), host=30
    )
    found = choose(whole)
    assert isinstance(found, Unfit)
    assert (found.lack, found.short_bytes) == (Lack.HOST, 10)


def test_when_everything_was_refuted_it_says_so() -> None:
    whole = instance(part((4, 10)), rooms=(100, 100))
    everything = (nothing_retained(whole.parts[0], PAGEABLE),)
    found = choose(replace(whole, refuted=(everything,)))
    assert isinstance(found, Unfit)
    assert found.lack is Lack.REFUTED


def test_a_lowered_room_excludes_what_was_refuted_there() -> None:
    whole = instance(part((10, 10)), rooms=(100, 0))
    first = chosen_for(whole)
    used = whole.device_bytes(first.choice, 0)
    second = chosen_for(whole.lowered(0, used - 1), start=first.choice)
    assert second.choice != first.choice
    assert whole.device_bytes(second.choice, 0) < used


def test_when_time_is_up_the_start_is_kept() -> None:
    whole = instance(part((10, 10)), rooms=(99, 0))
    started = replace(nothing_retained(whole.parts[0], PAGEABLE), resident=((3,),))
    found = chosen_for(whole, time_limit_s=0.0, start=(started,))
    assert whole.fits(found.choice)
    assert found.bound_s <= 7 * 0.02 * 40
    assert found.seconds <= whole.seconds((started,)) * 1.01
    assert not found.proven


def test_a_time_limit_is_kept() -> None:
    parts = [
        part(
            *[(5 + i + j, 97 + 13 * i + 7 * j) for j in range(6)],
            phase=i,
            places=6,
            passes=7,
            component=f"c{i}",
            modes=tuple(Mode(d, False, 0.02 - d / 999, 0) for d in range(4)),
        )
        for i in range(6)
    ]
    whole = instance(*parts, rooms=(4001,) * 6)
    start = time.process_time()
    found = chosen_for(whole, time_limit_s=0.1)
    assert time.process_time() - start < 5
    assert whole.fits(found.choice)
    assert not found.proven
    assert 0 <= found.bound_s < found.best_s
    assert 0 < found.gap <= 1


def test_sizes_that_floats_can_not_tell_apart_still_fit() -> None:
    """Gigabytes with no common divisor, and room to the byte."""
    sizes = ((7, (1 << 30) + 1), (5, (1 << 29) + 3), (3, (1 << 28) + 7))
    held = 7 * sizes[0][1] + 2 * sizes[1][1]
    for off in (-1, 0, 1):
        whole = instance(part(*sizes), rooms=(held + 2 * sizes[1][1] + off, 0))
        found = chosen_for(whole)
        assert whole.fits(found.choice)
        assert found.bound_s <= found.best_s
