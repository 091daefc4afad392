"""What goes wrong at a chosen allocation or copy, and once."""

from collections.abc import Iterator

import pytest
import torch

from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard, hang, neighbour_grows


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    with SimulatedCard(custom_card(1000), allocator="exact", context_bytes=0) as card:
        yield card


def take(card: SimulatedCard, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=card.torch_device)


def test_a_neighbour_grows_at_the_nth_allocation_and_that_one_sees_it(card):
    card.faults.at_allocation(2, neighbour_grows(card, 700))
    first = take(card, 200)
    assert card.read().others_bytes == 0
    with pytest.raises(torch.OutOfMemoryError) as caught:
        take(card, 101)
    assert caught.value.shortfall.free_bytes == 100
    assert card.read().others_bytes == 700
    assert take(card, 100).numel() == 100
    assert card.read().others_bytes == 700
    del first


def test_a_neighbour_may_go_as_well(card):
    card.others_bytes = 900
    card.faults.at_allocation(1, neighbour_grows(card, -900))
    assert take(card, 1000).numel() == 1000


def test_a_copy_that_hangs_goes_on_after_a_while(card, monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    card.faults.at_copy(2, hang(30.0))
    for done in ([], [30.0], [30.0]):
        assert torch.ones(2, device=card.torch_device).cpu().tolist() == [1.0, 1.0]
        assert slept == done


def test_faults_that_were_cleared_do_not_happen(card):
    card.faults.at_allocation(1, neighbour_grows(card, 700))
    card.faults.at_copy(1, hang(3600.0))
    card.faults.clear()
    assert take(card, 1000).cpu().numel() == 1000


def test_a_fault_that_raised_keeps_no_tensor_alive(card):
    """The error's frames would have it, and the error itself be in one of them."""
    card.faults.at_copy(1)
    with pytest.raises(RuntimeError, match="injected"):
        take(card, 500).cpu()
    assert card.read().allocated_bytes == 0
