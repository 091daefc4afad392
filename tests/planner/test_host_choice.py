"""What is pinned and what is resident instead, where host memory is short. Bytes are MiB here."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from instances import instance, instances, part

from residency.offload.host_memory import HostMemory, chunked_charge_bytes
from residency.planner.choosing.choose import Chosen, choose
from residency.planner.choosing.joint import joined
from residency.planner.choosing.model import Fixed, Instance, Mode, Part, nothing_retained
from residency.planner.choosing.program import Program
from residency.planner.choosing.unfit import Lack, Unfit

MIB, GIB = 1 << 20, 1 << 30
GB = 10**9
SECONDS = 1 / 20_000
"""For a MiB from pinned masters."""
STREAMED = Fixed(resident=(0,), retains=False)


def streamed(
    layers: int,
    layer_mib: int,
    *,
    host_mib: int | None = None,
    passes: int = 30,
    phase: int = 0,
    places: int = 2,
    component: str = "dit",
    fixed: Fixed | None = None,
) -> Part:
    """Pinned, or pageable at 2.5 times the seconds."""
    host = layers * layer_mib if host_mib is None else host_mib
    modes = (Mode(1, True, SECONDS, host), Mode(1, False, 2.5 * SECONDS, 0))
    return part(
        (layers, layer_mib),
        phase=phase,
        places=places,
        passes=passes,
        modes=modes,
        component=component,
        fixed=fixed,
    )


def chosen_for(whole: Instance) -> Chosen:
    found = choose(whole)
    assert isinstance(found, Chosen), str(found)
    assert found.proven
    assert whole.fits(found.choice)
    return found


def pinned(found: Chosen) -> list[bool]:
    return [chosen.mode.pinned for chosen in found.choice]


def test_masters_are_pinned_as_far_as_their_charge_in_chunks_goes():
    """HM-01: 34 layers of 1.2 GiB, and a host that has 41.22 GiB for them."""
    layer_bytes, budget = round(1.2 * GIB), round(41.22 * GIB)
    charge = chunked_charge_bytes(layer_bytes)
    for layers, fits in ((34, True), (35, False)):
        modes = (Mode(1, True, 1 / GIB, layers * charge), Mode(1, False, 2.5 / GIB, 0))
        dit = part((layers, layer_bytes), modes=modes)
        found = chosen_for(instance(dit, rooms=(3 * GIB, 0), host=budget))
        assert pinned(found) == [fits]


@pytest.mark.parametrize(
    ("host_gib", "weights_mib"),
    [pytest.param(32.0, 30_915, id="HM-02"), pytest.param(42.84 - 37.3, 38_195, id="HM-03")],
)
def test_what_can_not_be_pinned_streams_from_pageable_masters(host_gib: float, weights_mib: int):
    left = HostMemory(round(host_gib * GIB), "memory.max", 0)
    budget = left.budget_bytes() // MIB
    dit = streamed(weights_mib // 491, 491, host_mib=weights_mib)
    found = chosen_for(instance(dit, rooms=(20_000, 0), host=budget))
    assert pinned(found) == [False]
    assert found.host_bytes == 0
    # 20,000 fit 40 layers: 38, and two buffers.
    assert found.choice[0].resident == ((38,),)
    enough = chosen_for(instance(dit, rooms=(20_000, 0), host=weights_mib))
    assert pinned(enough) == [True]


def test_the_pin_that_is_worth_least_is_dropped_and_always_the_same():
    """HM-09: 40,492 MiB would be pinned, and 38,353 can be."""
    parts = [
        streamed(30, 499, host_mib=14_961, passes=1, phase=0, places=4, component="text_encoder"),
        streamed(40, 500, host_mib=19_999, passes=2, phase=1, places=4, component="dit"),
        streamed(4, 143, host_mib=566, passes=1, phase=2, places=4, component="audio_vae"),
        streamed(8, 620, host_mib=4_966, passes=1, phase=3, places=4, component="video_vae"),
    ]
    assert sum(each.modes[0].host_bytes for each in parts) == 40_492
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 0, 1]):
        rooms = (1000, 1000, 286, 1240)
        found = chosen_for(instance(*(parts[i] for i in order), rooms=rooms, host=38_353))
        pageable = [
            parts[i].component
            for i, chosen in zip(order, found.choice, strict=True)
            if not chosen.mode.pinned
        ]
        assert pageable == ["video_vae"]


def test_layers_that_can_not_be_pinned_go_to_the_idle_card():
    """HM-10: 19,633 MiB to pin, of which 13,042 can be, and 12 GiB of the card are idle."""
    dit = streamed(40, 491, host_mib=19_633)
    found = chosen_for(instance(dit, rooms=(12 * 1024, 0), host=13_042))
    assert pinned(found) == [False]
    (held,), *_ = found.choice[0].resident
    assert held == 23  # and two buffers are 12,275
    assert held * 491 >= 6.4 * 1024


@pytest.mark.parametrize(("ranks", "is_pinned"), [(1, True), (4, True), (8, False)])
def test_the_host_is_shared_by_the_ranks_of_a_node(ranks: int, is_pinned: bool):
    """HM-11: 124 GB each on a host of 1 TB."""
    budget = HostMemory(1000 * GB, "RAM available", 1000 * GB).budget_bytes(local_ranks=ranks)
    modes = (Mode(1, True, 1 / GB, 124 * GB), Mode(1, False, 2.5 / GB, 0))
    rank = instance(part((62, 2 * GB), modes=modes), rooms=(20 * GB, 0), host=budget)
    assert pinned(chosen_for(joined([rank] * ranks).instance)) == [is_pinned]
    only = replace(rank, parts=(replace(rank.parts[0], modes=modes[:1]),))
    refused = choose(joined([only] * ranks).instance)
    if is_pinned:
        assert isinstance(refused, Chosen)
    else:
        assert isinstance(refused, Unfit)
        assert refused.lack is Lack.HOST
        assert refused.short_bytes == 124 * GB - 950 * GB // 8


@pytest.mark.parametrize(
    ("resident", "free", "largest_pin"),
    [
        (15_360, 7972, 8192),
        (17_408, 5924, 6656),
        (19_456, 3876, 3840),
        (21_504, 1828, 2816),
        (22_528, 804, 1536),
    ],
)
def test_where_pins_are_charged_to_the_card_both_have_to_fit(
    resident: int, free: int, largest_pin: int
):
    """HM-04: a card of 24 GiB under WDDM, and what could be pinned beside what is resident."""
    margin = 256
    assert resident + largest_pin <= 24 * 1024
    room = resident + free - margin
    for over in (0, 1):
        # Through two buffers of 1.
        host = free - margin - 2 + over
        vae = streamed(10, 1, host_mib=host, component="vae", fixed=STREAMED)
        dit = part(rest_bytes=resident, modes=(Mode(0, False, SECONDS, 0),))
        dit = replace(dit, non_layer_copy_bytes=0)
        whole = instance(dit, vae, rooms=(room, 0), host=32 * 1024)
        assert pinned(chosen_for(whole))[1]
        on_card = replace(whole, pinned_on_card=True, places=(whole.places[0],) * 2)
        found = chosen_for(on_card)
        assert pinned(found)[1] == (over == 0)
        most = on_card.device_bytes(found.choice, 0)
        assert most == resident + 2 + found.host_bytes <= room
        assert found.host_bytes <= largest_pin


def test_a_place_that_nothing_is_in_has_room_for_pins_as_well():
    dit = streamed(4, 10, fixed=STREAMED)
    whole = replace(instance(dit, rooms=(60, 40)), pinned_on_card=True)
    assert whole.device_bytes((nothing_retained(dit, dit.modes[0]),), 1) == 40
    assert pinned(chosen_for(whole)) == [True]
    tight = replace(whole, places=(whole.places[0], replace(whole.places[1], room_bytes=39)))
    assert pinned(chosen_for(tight)) == [False]


def test_pins_fill_a_room_to_the_byte_that_layers_are_no_multiple_of():
    dit = streamed(4, 10, host_mib=9, fixed=STREAMED)
    for room, fits in ((29, True), (28, False)):
        whole = replace(instance(dit, rooms=(room, room)), pinned_on_card=True)
        assert pinned(chosen_for(whole)) == [fits]


def test_of_many_sets_that_the_pins_leave_no_room_for_none_is_tried_one_by_one():
    modes = (Mode(1, True, SECONDS, 100), Mode(1, False, 2.5 * SECONDS, 0))
    dit = part((20, 10), (20, 11), (20, 13), passes=4, modes=modes)
    whole = replace(instance(dit, rooms=(400, 400)), pinned_on_card=True)
    found = chosen_for(whole)
    assert pinned(found) == [True]
    assert 300 < whole.device_bytes(found.choice, 0) <= 400


def test_what_is_pinned_takes_the_room_of_resident_layers_on_such_a_card():
    """Pinned, 40 of 60 are for pins and two buffers of 10 for the rest; pageable, 4 are held."""
    dit = streamed(4, 10, passes=2)
    whole = replace(instance(dit, rooms=(60, 60)), pinned_on_card=True)
    found = chosen_for(whole)
    assert (pinned(found), found.choice[0].resident) == ([False], ((4,),))
    assert whole.device_bytes(found.choice, 0) == 40


def test_a_card_that_is_too_small_for_required_pins_is_told_with_the_bytes():
    dit = streamed(4, 10)
    only = replace(dit, modes=dit.modes[:1])
    found = choose(replace(instance(only, rooms=(59, 40)), pinned_on_card=True))
    assert isinstance(found, Unfit)
    assert (found.lack, found.short_bytes, found.place) == (Lack.ROOM, 1, 0)


def test_ranks_of_which_one_charges_pins_to_the_card_all_reckon_so():
    rank = instance(streamed(4, 10), rooms=(60, 60))
    both = joined([rank, replace(rank, pinned_on_card=True)]).instance
    assert both.pinned_on_card
    assert not joined([rank, rank]).instance.pinned_on_card


def test_what_exceeds_a_room_by_its_pins_alone_is_excluded_without_its_likes():
    """What it excludes in a place, other modes of a part that isn't used there aren't."""
    dit = streamed(4, 10, fixed=STREAMED)
    vae = streamed(2, 10, phase=1, component="vae", fixed=STREAMED)
    whole = replace(instance(dit, vae, rooms=(79, 90)), pinned_on_card=True)
    program = Program(whole, slack=0.1)
    both = tuple(nothing_retained(each, each.modes[0]) for each in whole.parts)
    assert whole.device_bytes(both, 0) == 20 + 40 + 20
    program.exclude(both, 0)
    answer = program.minimise(program.seconds(), within=1e-8, deadline=float("inf"))
    assert answer.choice is not None
    assert [chosen.mode.pinned for chosen in answer.choice] == [True, False]


@settings(
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
@given(instances())
def test_pins_that_are_charged_to_the_card_never_make_a_request_faster(whole: Instance):
    beside = choose(replace(whole, pinned_on_card=False))
    on_card = choose(replace(whole, pinned_on_card=True))
    assume(isinstance(on_card, Chosen))
    assert isinstance(on_card, Chosen)
    assert isinstance(beside, Chosen)
    assert beside.best_s <= on_card.best_s * (1 + 1e-9)
    for place, room in enumerate(whole.places):
        weights = replace(whole, pinned_on_card=False).device_bytes(on_card.choice, place)
        assert weights + on_card.host_bytes <= room.room_bytes
