"""Time on a simulated card, in figures that can be worked out by hand. A tensor is 1024 bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from residency.offload.cards import custom_card
from residency.offload.device import Traits
from residency.offload.errors import DeviceError, InputError
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.work import Clock

KIB = 1024
PINNED, PAGEABLE, MEMORY = 512, 256, 4096
CLOCK = Clock(h2d_bytes_per_s=PINNED, pageable_bytes_per_s=PAGEABLE, op_s=1.0, bytes_per_s=MEMORY)


def timed(clock: Clock = CLOCK, total_bytes: int = 1 << 20, **options: Any) -> SimulatedCard:
    return SimulatedCard(
        custom_card(total_bytes), allocator="exact", context_bytes=0, clock=clock, **options
    )


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    with timed() as card:
        yield card


def empty(card: SimulatedCard) -> torch.Tensor:
    return torch.empty(KIB, dtype=torch.uint8, device=card.torch_device)


def pinned(card: SimulatedCard) -> torch.Tensor:
    return card.pin(torch.zeros(KIB, dtype=torch.uint8))


def now(card: SimulatedCard) -> float:
    return card.timeline.now(card.current_stream().number)


def test_an_operation_takes_its_launch_and_the_bytes_that_it_touches(card):
    x = empty(card)
    assert now(card) == 0  # allocating is no work
    x.fill_(1)
    assert now(card) == 1 + KIB / MEMORY
    _ = x & x  # two arguments are one storage, and the result another
    assert now(card) == 2 + 3 * KIB / MEMORY


def test_a_convolution_is_one_operation(card):
    image = torch.empty(1, 1, 16, 16, device=card.torch_device)
    since = card.mark()
    torch.conv2d(image, image[:, :, :1, :1])
    assert card.seconds(since, card.mark()) == 1 + (KIB + KIB) / MEMORY


def test_work_on_the_card_does_not_hold_up_the_host_until_it_waits(card):
    x = empty(card)
    x.fill_(1)
    assert card.timeline.host_s == 0
    card.synchronize()
    assert card.timeline.host_s == 1.25


@pytest.mark.parametrize("how", ["item", "cpu", "nonzero", "event", "stream", "module"])
def test_the_host_waits_where_it_needs_the_result(card, how: str):
    x = empty(card)
    x.fill_(1)
    match how:
        case "item":
            x[0].item()
        case "cpu":
            x.cpu()
        case "nonzero":
            x.nonzero()
        case "event":
            card.current_stream().record_event().synchronize()
        case "stream":
            card.current_stream().synchronize()
        case "module":
            torch.simgpu.synchronize()  # type: ignore[attr-defined]
    assert card.timeline.host_s >= 1.25


def test_a_copy_from_pinned_memory_takes_its_bytes_and_the_host_goes_on(card):
    empty(card).copy_(pinned(card), non_blocking=True)
    assert (now(card), card.timeline.host_s) == (KIB / PINNED, 0)
    empty(card).copy_(pinned(card))
    assert (now(card), card.timeline.host_s) == (2 * KIB / PINNED, 2 * KIB / PINNED)


def test_a_copy_from_pageable_memory_is_slower_and_holds_up_the_host(card):
    empty(card).copy_(torch.zeros(KIB, dtype=torch.uint8), non_blocking=True)
    assert now(card) == card.timeline.host_s == KIB / PAGEABLE


def test_copies_to_the_host_have_a_rate_of_their_own():
    with timed(Clock(h2d_bytes_per_s=512, pageable_bytes_per_s=256, d2h_bytes_per_s=128)) as card:
        pinned(card).copy_(empty(card), non_blocking=True)
        assert now(card) == KIB / 128


def test_streams_run_beside_one_another_and_wait_for_events(card):
    side = card.new_stream()
    x, y = empty(card), empty(card)
    x.fill_(1)
    with card.on(side):
        y.copy_(pinned(card), non_blocking=True)
        assert now(card) == KIB / PINNED == 2
        copied = side.record_event()
    assert now(card) == 1.25
    card.current_stream().wait_event(copied)
    assert now(card) == 2
    x.fill_(1)
    assert now(card) == 3.25
    card.current_stream().wait_event(copied)  # which is past
    assert now(card) == 3.25


def test_copies_in_one_direction_share_one_engine(card):
    for stream in (card.new_stream(), card.new_stream()):
        with card.on(stream):
            empty(card).copy_(pinned(card), non_blocking=True)
    card.synchronize()
    assert card.timeline.host_s == 2 * KIB / PINNED
    out = card.new_stream()
    x = empty(card)
    for stream in (card.new_stream(), out):
        with card.on(stream):
            if stream is out:
                pinned(card).copy_(x, non_blocking=True)
            else:
                x.copy_(pinned(card), non_blocking=True)
    card.synchronize()
    assert card.timeline.host_s == 3 * KIB / PINNED


def test_copies_to_the_host_share_one_too(card):
    x = empty(card)
    for stream in (card.new_stream(), card.new_stream()):
        with card.on(stream):
            pinned(card).copy_(x, non_blocking=True)
    card.synchronize()
    assert card.timeline.host_s == 2 * KIB / PINNED


def test_work_starts_no_sooner_than_the_host_issues_it(card):
    empty(card).fill_(1)
    card.synchronize()
    side = card.new_stream()
    with card.on(side):
        assert now(card) == 1.25
        empty(card).fill_(1)
        assert now(card) == 2.5


def test_a_slow_host_leaves_the_card_idle():
    with timed(Clock(h2d_bytes_per_s=1, pageable_bytes_per_s=1, op_s=1.0, issue_s=3.0)) as card:
        x = empty(card)
        x.fill_(1)
        x.fill_(1)
        assert (now(card), card.timeline.host_s) == (3 + 3 + 1, 6)


def test_marks_tell_the_time_between_them_and_wait_for_the_later(card):
    x = empty(card)
    since = card.mark()
    x.fill_(1)
    until = card.mark()
    x.fill_(1)
    assert card.seconds(since, until) == 1.25
    assert card.timeline.host_s == 1.25
    assert card.traits == Traits(timed=True, spills=False, simulated=card.traits.simulated)


def test_virtual_data_takes_as_long_as_real():
    def taken(virtual: bool) -> float:
        clock = Clock(h2d_bytes_per_s=1e6, pageable_bytes_per_s=1e6, op_s=1.0, bytes_per_s=1e6)
        with timed(clock, 1 << 24, virtual=virtual) as card:
            x = torch.ones(1 << 18, device=card.torch_device)
            y = (x * x).view(512, 512) @ x.view(512, 512)
            del x, y
            return now(card)

    megabytes = (1 << 20) / 1e6
    assert taken(True) == taken(False) == pytest.approx(3 + (1 + 2 + 3) * megabytes)


def test_without_a_clock_there_is_no_time():
    with SimulatedCard(custom_card(1 << 30)) as card:
        assert not card.traits.timed
        assert card.timeline is None
        with pytest.raises(DeviceError, match="has no clock"):
            card.mark()
        event = card.current_stream().record_event()
        with pytest.raises(DeviceError, match="has no clock"):
            card.seconds(event, event)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"h2d_bytes_per_s": 0}, "above 0"),
        ({"pageable_bytes_per_s": -1}, "above 0"),
        ({"bytes_per_s": 0.0}, "above 0"),
        ({"d2h_bytes_per_s": float("nan")}, "above 0"),
        ({"op_s": -1}, "0 or more"),
        ({"issue_s": -0.5}, "0 or more"),
    ],
)
def test_a_clock_that_can_not_be_is_refused(wrong: dict[str, float], hint: str):
    given = {"h2d_bytes_per_s": 1.0, "pageable_bytes_per_s": 1.0} | wrong
    (name,) = wrong
    with pytest.raises(InputError, match=f"{name} of a clock is") as caught:
        Clock(**given)
    assert hint in str(caught.value.hint)


def test_a_card_that_spills_is_never_full_and_slow_where_it_would_be():
    with timed(total_bytes=2 * KIB, spills=True) as card:
        fits, also, over = (empty(card) for _ in range(3))
        reading = card.read()
        assert (reading.free_bytes, reading.allocated_bytes) == (0, 3 * KIB)
        assert (reading.total_bytes, reading.alloc_retries) == (2 * KIB, 0)
        assert card.traits.spills
        for x, seconds in ((fits, 1.25), (also, 1.25), (over, 8 * 1.25)):
            since = card.mark()
            x.fill_(1)
            assert card.seconds(since, card.mark()) == seconds
        since = card.mark()
        fits.bitwise_and_(over)
        assert card.seconds(since, card.mark()) >= 8 * 1.5


def test_memory_that_was_freed_on_a_card_that_spills_is_the_cards_again():
    with timed(total_bytes=2 * KIB, spills=True, spill_factor=5.0) as card:
        held = [empty(card) for _ in range(3)]
        del held[0]
        x = empty(card)  # two others are alive, one of them in host memory
        del held[:]
        y = empty(card)
        since = card.mark()
        y.fill_(1)
        assert card.seconds(since, card.mark()) == 1.25
        since = card.mark()
        x.fill_(1)
        assert card.seconds(since, card.mark()) == 5 * 1.25
        card.check_integrity()


def test_a_neighbour_that_grows_makes_a_card_spill():
    with timed(total_bytes=4 * KIB, spills=True, check_order=True) as card:
        held = empty(card)
        card.others_bytes = 3 * KIB
        over = empty(card)
        assert card.read().free_bytes == 0
        since = card.mark()
        over.fill_(1)
        assert card.seconds(since, card.mark()) == 8 * 1.25
        del held


@pytest.mark.parametrize("allocator", ["caching", "expandable"])
def test_the_caching_allocators_spill_too(allocator):
    mib = 1 << 20
    card = SimulatedCard(
        custom_card(20 * mib), allocator=allocator, context_bytes=0, clock=CLOCK, spills=True
    )
    with card:
        held = [torch.empty(12 * mib, dtype=torch.uint8, device=card.torch_device) for _ in "ab"]
        assert card.read().free_bytes == 0
        assert card.read().reserved_bytes >= 24 * mib
        del held
        card.release_cache()
        assert card.read().free_bytes == 20 * mib


def test_a_card_that_spills_needs_a_clock():
    with pytest.raises(InputError, match="spills and has no clock"):
        SimulatedCard(custom_card(1 << 30), spills=True)
