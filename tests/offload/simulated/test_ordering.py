"""What a checker of order says of work on two streams, against what CUDA guarantees."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from residency.offload.cards import custom_card
from residency.offload.errors import OrderError
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.streams import SimulatedStream


def small(**options: Any) -> SimulatedCard:
    given = {"allocator": "exact", "context_bytes": 0, "check_order": True}
    return SimulatedCard(custom_card(1 << 23), **{**given, **options})


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    with small() as card:
        yield card


@pytest.fixture
def side(card: SimulatedCard) -> SimulatedStream:
    return card.new_stream()


def ones(card: SimulatedCard, n: int = 8) -> torch.Tensor:
    return torch.ones(n, device=card.torch_device)


def after(card: SimulatedCard, stream: SimulatedStream) -> None:
    """The current stream goes on after all that `stream` was given."""
    card.current_stream().wait_event(stream.record_event())


def test_one_stream_is_in_order_by_itself(card):
    x = ones(card)
    x += 1
    assert (x * x).tolist() == [4.0] * 8
    del x
    assert ones(card).sum().item() == 8


def test_a_read_has_to_wait_for_the_last_write(card, side):
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        x.fill_(3)
    with pytest.raises(OrderError) as caught:
        x + 1
    assert caught.value.message == (
        "aten::add, which reads 32 bytes on stream 0, doesn't wait for aten::fill_, which writes "
        "32 bytes on stream 1"
    )
    assert caught.value.hint == (
        "make stream 0 wait for an event recorded on stream 1 after aten::fill_"
    )
    after(card, side)
    assert (x + 1).tolist() == [4.0] * 8


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x + 1,
        lambda x: x.view(8, 1) @ x.view(1, 8),
        lambda x: torch.cummax(x, 0).values,
        torch.clone,
        torch.exp_,
    ],
)
def test_a_result_is_read_only_behind_what_made_it(card, side, make):
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        result = make(x)
    with pytest.raises(OrderError, match=r"reads \d+ bytes on stream 0, doesn't wait for"):
        result * 2


def test_an_event_from_before_the_write_does_not_order_it(card, side):
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    early = side.record_event()
    with card.on(side):
        x.fill_(3)
    card.current_stream().wait_event(early)
    with pytest.raises(OrderError, match="reads 32 bytes"):
        x + 1


def test_a_write_has_to_wait_for_every_read(card, side):
    x = ones(card)
    third = card.new_stream()
    for stream in (side, third):
        stream.wait_event(card.current_stream().record_event())
        with card.on(stream):
            x + 1
    after(card, side)
    with pytest.raises(OrderError, match="add, which reads 32 bytes on stream 2"):
        x.zero_()
    after(card, third)
    x.zero_()


def test_a_write_has_to_wait_for_the_last_write(card, side):
    x = ones(card)
    with card.on(side), pytest.raises(OrderError, match=r"fill_, which writes .* on stream 1"):
        x.fill_(3)


def test_reads_need_no_order_among_themselves(card, side):
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        theirs = x + 1
    assert (x + 1).tolist() == [2.0] * 8
    after(card, side)
    assert theirs.tolist() == [2.0] * 8


def test_order_passes_through_a_third_stream(card, side):
    x = ones(card)
    third = card.new_stream()
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        x.fill_(3)
    third.wait_event(side.record_event())
    after(card, third)
    assert (x + 1).tolist() == [4.0] * 8


@pytest.mark.parametrize("how", ["event", "stream", "device", "copy", "item"])
def test_what_the_host_has_waited_for_comes_before_all_that_it_issues_then(card, side, how: str):
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        x.fill_(3)
        match how:
            case "event":
                side.record_event().synchronize()
            case "stream":
                side.synchronize()
            case "device":
                torch.simgpu.synchronize()  # type: ignore[attr-defined]
            case "copy":
                x.cpu()
            case "item":
                x.sum().item()
    assert (x + 1).tolist() == [4.0] * 8


def test_a_view_is_the_storage_under_it(card, side):
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        x.view(2, 4)[1].fill_(3)
    with pytest.raises(OrderError):
        x.as_strided((2,), (1,)) + 1


def test_what_only_looks_at_the_shape_reads_nothing(card, side):
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        x.fill_(3)
    assert torch.empty_like(x).shape == x.new_empty(8).shape == x.view(2, 4).reshape(8).shape
    assert x.as_strided((4,), (2,)).is_contiguous() is False
    torch.empty(0, device=card.torch_device).set_(x)
    torch.nn.Parameter(torch.empty(8)).data = x


@pytest.mark.parametrize("allocator", ["exact", "caching", "expandable"])
def test_memory_that_another_stream_may_still_use_is_not_given_out_again(allocator):
    with small(allocator=allocator) as card:
        side = card.new_stream()
        x = ones(card)
        side.wait_event(card.current_stream().record_event())
        with card.on(side):
            x.fill_(3)
        del x
        with pytest.raises(OrderError) as caught:
            torch.empty(4, device=card.torch_device)
        assert caught.value.message == (
            "16 bytes are allocated on stream 0 while aten::fill_, which writes 32 bytes on stream "
            "1 that were freed since, may still be running: they may be the same memory"
        )
        assert "record_stream" in str(caught.value.hint)
        card.check_integrity()
        after(card, side)
        torch.empty(4, device=card.torch_device)


def test_memory_of_another_stream_is_not_given_out_at_all(card, side):
    """Each stream has a pool of its own."""
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        x + 1
    del x
    with card.on(side):
        assert ones(card).tolist() == [1.0] * 8


def test_the_allocator_waits_for_streams_that_were_recorded(card, side):
    x = ones(card)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        x.fill_(3)
    extension = torch.Stream(device=card.torch_device).device_type
    x.record_stream(torch.Stream(stream_id=side.number, device_index=0, device_type=extension))
    del x
    assert ones(card).tolist() == [1.0] * 8


def test_new_memory_comes_after_whoever_had_it_on_any_stream(card, side):
    """It is allocated on one stream, and filled on another that hasn't waited for the first."""
    x = ones(card)
    x += 1
    del x
    y = torch.empty(8, device=card.torch_device)
    with card.on(side), pytest.raises(OrderError, match=r"doesn't wait for aten::"):
        y.fill_(3)
    side.wait_event(card.current_stream().record_event())
    with card.on(side):
        y.fill_(3)


def test_host_memory_is_read_only_behind_a_copy_into_it(card):
    host = torch.zeros(8)
    host.copy_(ones(card), non_blocking=True)
    for read in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.sum, torch.Tensor.clone):
        with pytest.raises(OrderError, match=r"the host reads 32 bytes of its own memory"):
            read(host)
    with pytest.raises(OrderError, match=r"the host writes 32 bytes of its own memory in aten::"):
        host.zero_()
    assert host[2:].shape == (6,)
    card.current_stream().synchronize()
    assert host.tolist() == [1.0] * 8


def test_a_copy_that_blocks_can_be_read_at_once(card):
    host = torch.zeros(8)
    host.copy_(ones(card))
    assert host.tolist() == ones(card).cpu().tolist() == [1.0] * 8


def test_pinned_memory_is_written_only_behind_the_copies_from_it(card, side):
    master = card.pin(torch.ones(8))
    with card.on(side):
        x = torch.empty(8, device=card.torch_device)
        x.copy_(master, non_blocking=True)
    assert master.sum() == 8
    with pytest.raises(OrderError, match=r"the host writes 32 bytes of its own memory in aten::"):
        master.fill_(2)
    side.synchronize()
    master.fill_(2)


def test_pinned_memory_can_be_freed_while_a_copy_from_it_runs(card, side):
    """Its allocator keeps the events. New memory at the same place is another's."""
    x = torch.empty(8, device=card.torch_device)
    for _ in range(3):
        master = card.pin(torch.ones(8))
        x.copy_(master, non_blocking=True)
        del master
    assert not card.ordering.has_copies_in_flight


def test_pageable_memory_has_been_read_when_the_copy_returns(card):
    source = torch.ones(8)
    x = torch.empty(8, device=card.torch_device)
    x.copy_(source, non_blocking=True)
    source.fill_(2)
    assert x.tolist() == [1.0] * 8


def test_a_copy_to_the_card_waits_for_the_one_that_fills_its_source(card, side):
    host = card.pin(torch.zeros(8))
    host.copy_(ones(card), non_blocking=True)
    with card.on(side):
        y = torch.empty(8, device=card.torch_device)
        with pytest.raises(OrderError, match=r"doesn't wait for aten::_copy_from, which writes"):
            y.copy_(host, non_blocking=True)
        after(card, SimulatedStream(0, card.streams))
        y.copy_(host, non_blocking=True)
        assert y.tolist() == [1.0] * 8


def test_pageable_memory_that_a_copy_fills_is_not_read_for_another(card):
    host = torch.zeros(8)
    host.copy_(ones(card), non_blocking=True)
    with pytest.raises(OrderError, match=r"the host reads 32 bytes"):
        ones(card).copy_(host, non_blocking=True)


def test_nothing_is_watched_where_nobody_asked():
    with small(check_order=False) as card:
        assert card.ordering is None
        assert card.watch is None
        x = ones(card)
        with card.on(card.new_stream()):
            x.fill_(3)
        assert x.tolist() == [3.0] * 8


def test_the_host_is_watched_while_the_card_is_in_its_slot():
    with small() as card:
        host = torch.zeros(8)
        host.copy_(ones(card), non_blocking=True)
    assert host.tolist() == [1.0] * 8
