"""What each layer computed and waited, on a clock. An operation takes 1 s, a layer has three, and
is 1024 bytes; the weights in no layer are 1028, and two operations come before the first layer."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from stacks import Stack, row

from residency.offload.cards import custom_card
from residency.offload.clocks import LayerTime, LayerTimer, UseTime
from residency.offload.errors import DeviceError
from residency.offload.host_memory import HostBudget
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.work import Clock

LAYER = 1024
REST = 1024 + 4


@contextmanager
def timed(
    *, copy_s: float, pinned: bool = True, prefetch: int = 1, resident: tuple[int, ...] = ()
) -> Iterator[LayerwiseOffload]:
    """A layer's copy takes `copy_s`."""
    rate = LAYER / copy_s
    clock = Clock(h2d_bytes_per_s=rate, pageable_bytes_per_s=rate, op_s=1.0)
    with SimulatedCard(
        custom_card(1 << 20), allocator="exact", context_bytes=0, clock=clock, check_order=True
    ) as card:
        offload = LayerwiseOffload(
            Stack(),
            card,
            resident_layers=resident,
            prefetch=prefetch,
            pin=HostBudget(1 << 22) if pinned else None,
        )
        offload.install()
        offload.timer = LayerTimer(card)
        use(offload)  # the order is known from then on
        yield offload
        offload.remove()


def use(
    offload: LayerwiseOffload, *, passes: int = 1, holds: bool = False, keep: bool = False
) -> UseTime:
    x = row().to(offload.device.torch_device)
    offload.device.synchronize()
    offload.begin_use(holds_resident_set=holds, passes=passes)
    for _ in range(passes):
        offload.module(x)
    offload.release_after_use(keep_resident=keep)
    assert offload.timer is not None
    return offload.timer.use()


def stalls(time: UseTime) -> list[float]:
    return [each.stall_s for each in time.layers]


def test_copies_hide_behind_compute_that_is_longer():
    with timed(copy_s=2) as offload:
        time = use(offload)
    # The copy of layer 0 begins behind that of the weights in no layer; then two operations run.
    assert time.outside_stall_s == pytest.approx(2 * REST / LAYER)
    assert time.layers == tuple(LayerTime(i, 0.0, 3.0, LAYER) for i in range(6))
    assert time.compute_s == 18
    assert time.copy_bytes == REST + 6 * LAYER


def test_what_compute_is_too_short_for_is_exposed():
    with timed(copy_s=7) as offload:
        time = use(offload)
    # Layer 0 is fetched while two operations run, each other one while the one before it does.
    assert stalls(time) == pytest.approx([7 - 2, *[7 - 3] * 5])
    assert {each.compute_s for each in time.layers} == {3.0}
    assert time.outside_stall_s == pytest.approx(7 * REST / LAYER)


def test_without_prefetch_every_copy_is_exposed_in_whole():
    with timed(copy_s=2, prefetch=0) as offload:
        time = use(offload)
    assert stalls(time) == pytest.approx([2] * 6)
    assert time.stall_s == pytest.approx(2 * time.copy_bytes / LAYER)


def test_two_layers_ahead_hide_no_more_than_the_bus_can_carry():
    with timed(copy_s=7, prefetch=2) as offload:
        time = use(offload)
    # The bus is never idle: 6 copies behind one another, and compute after the last of them.
    total = time.stall_s + time.compute_s + 2
    assert total == pytest.approx(7 * REST / LAYER + 6 * 7 + 3)


def test_a_copy_from_pageable_memory_holds_up_the_host_and_is_exposed_in_whole():
    with timed(copy_s=2, pinned=False) as offload:
        time = use(offload, passes=2)
    # Layer 0 is fetched by begin_use, and for the second pass behind the last layer of the first.
    assert time.outside_stall_s == pytest.approx(2 * REST / LAYER + 2 + 2)
    assert stalls(time) == pytest.approx([2, 2, 2, 2, 2, 0] * 2)
    assert {each.compute_s for each in time.layers} == {3.0}
    assert time.stall_s == pytest.approx(2 * time.copy_bytes / LAYER)


def test_a_resident_layer_is_copied_once_and_not_at_all_where_it_was_retained():
    with timed(copy_s=7, resident=(1, 0)) as offload:
        first = use(offload, passes=2, holds=True, keep=True)
        second = use(offload, holds=True)
    of_layer_0 = [each for each in first.layers if each.layer == 0]
    assert [each.copy_bytes for each in of_layer_0] == [LAYER, 0]
    assert of_layer_0[1].stall_s == 0
    assert (first.copy_bytes, second.copy_bytes) == (REST + (1 + 5 * 2) * LAYER, 5 * LAYER)
    assert (second.outside_copy_bytes, second.outside_stall_s) == (0, 0)


def test_nothing_waits_for_a_mark_while_the_use_runs():
    with timed(copy_s=7) as offload:
        card = offload.device
        assert isinstance(card, SimulatedCard)
        card.synchronize()
        x = row().to(card.torch_device)
        before_s = card.timeline.host_s
        offload.begin_use(holds_resident_set=False)
        offload.module(x)
        offload.release_after_use()
        assert card.timeline.host_s == before_s
        assert offload.timer.use().stall_s > 0
        assert card.timeline.host_s > before_s


def test_a_layer_that_fails_has_no_time_and_the_next_use_starts_anew():
    with timed(copy_s=2) as offload:
        offload.begin_use(holds_resident_set=False)
        offload.module.path = (0, 99)
        with pytest.raises(IndexError):
            offload.module(row().to(offload.device.torch_device))
        offload.module.path = range(6)
        assert [each.layer for each in offload.timer.use().layers] == [0]
        offload.release_all()
        assert len(use(offload).layers) == 6


def test_a_timer_that_came_in_the_middle_of_a_layer_does_not_end_another():
    with timed(copy_s=2) as offload:
        timer = LayerTimer(offload.device)
        timer.end(0)
        timer.reach()
        timer.start(1, 0)
        timer.end(0)
        assert timer.use().layers == ()


def test_the_output_is_the_same_whether_it_is_timed_or_not():
    with timed(copy_s=2) as offload:
        x = row().to(offload.device.torch_device)
        outputs = []
        for timer in (offload.timer, None):
            offload.timer = timer
            offload.begin_use(holds_resident_set=False)
            outputs.append(offload.module(x).tolist())
            offload.release_after_use()
        assert outputs[0] == outputs[1] == Stack()(row()).tolist()


def test_a_device_without_a_clock_can_not_be_timed():
    with (
        SimulatedCard(custom_card(1 << 30)) as card,
        pytest.raises(DeviceError, match="has no clock"),
    ):
        LayerTimer(card)
