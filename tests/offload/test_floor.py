import threading

import pytest

from residency.offload.cards import custom_card
from residency.offload.device import FreeFloor
from residency.offload.errors import DeviceError
from residency.offload.simulated.card import SimulatedCard

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def card():
    with SimulatedCard(custom_card(GIB), allocator="exact", context_bytes=64 * MIB) as card:
        yield card


def test_without_sampling_the_floor_is_the_lower_of_both_ends(card):
    with FreeFloor(card, every_s=None) as floor:
        card.others_bytes = 300 * MIB
    assert floor.samples == 2
    assert floor.least_free_bytes == GIB - 364 * MIB
    assert floor.most_others_bytes == 300 * MIB
    assert floor.most_context_bytes == 64 * MIB
    assert floor.most_outside_bytes == 364 * MIB


def test_a_neighbour_that_came_and_went_is_seen_by_sampling(card):
    seen = threading.Event()
    read = card.read

    def reading():
        found = read()
        if found.others_bytes:
            seen.set()
        return found

    card.read = reading
    with FreeFloor(card, every_s=0.001) as floor:
        card.others_bytes = 500 * MIB
        assert seen.wait(30)
        card.others_bytes = 0
    assert floor.most_others_bytes == 500 * MIB
    assert floor.least_free_bytes == GIB - 564 * MIB


def test_the_most_of_both_together_is_of_one_time(card):
    with FreeFloor(card, every_s=None) as floor:
        card.context_bytes, card.others_bytes = 10 * MIB, 20 * MIB
    assert floor.most_outside_bytes == 64 * MIB
    assert floor.most_others_bytes + floor.most_context_bytes == 84 * MIB


def test_an_error_of_the_sampling_thread_is_raised_when_the_block_ends(card):
    failed = threading.Event()
    read = card.read

    def reading():
        if threading.current_thread() is not threading.main_thread():
            failed.set()
            raise DeviceError("the card fell off the bus")
        return read()

    card.read = reading
    with pytest.raises(DeviceError, match="fell off"), FreeFloor(card, every_s=0.001):
        assert failed.wait(30)


def test_an_error_of_the_block_goes_first(card):
    with pytest.raises(ZeroDivisionError), FreeFloor(card, every_s=0.001):
        raise ZeroDivisionError
