import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import pytest
import torch

from residency.offload.cards import Card, custom_card, find_card
from residency.offload.device import Reading, Transfers
from residency.offload.errors import DeviceBusyError, DeviceError, DeviceIntegrityError, InputError
from residency.offload.memory_errors import Shortfall
from residency.offload.simulated import storage
from residency.offload.simulated.card import CONTEXT_BYTES, InjectedError, SimulatedCard

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def small(total_bytes: int = 1 * GIB, **options: Any) -> SimulatedCard:
    """A card without a context, so that all of it can be had."""
    return SimulatedCard(custom_card(total_bytes), context_bytes=0, **options)


def take(device: SimulatedCard, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)


def assert_adds_up(reading: Reading) -> None:
    assert reading.total_bytes == (
        reading.free_bytes + reading.others_bytes + reading.context_bytes + reading.reserved_bytes
    )
    assert reading.allocated_bytes <= reading.reserved_bytes <= reading.peak_reserved_bytes


def test_a_card_says_which_it_is():
    device = SimulatedCard(find_card("RTX 4090"))
    assert device.identity.name == "RTX 4090"
    assert device.identity.uuid != SimulatedCard(find_card("RTX 5090")).identity.uuid
    assert str(device) == "RTX 4090 (23.52 GiB, simulated)"


def test_total_is_free_others_context_and_reserved_at_every_moment():
    card = find_card("RTX 4090")
    with SimulatedCard(card, others_bytes=3 * GIB) as device:
        assert_adds_up(device.read())
        assert device.read().free_bytes == card.total_bytes - CONTEXT_BYTES - 3 * GIB
        held = take(device, 30 * MIB)
        assert_adds_up(device.read())
        device.others_bytes = 5 * GIB
        device.context_bytes = 500 * MIB
        assert_adds_up(device.read())
        assert device.read().usable_bytes == card.total_bytes - 5 * GIB - 500 * MIB
        del held
        device.release_cache()
        assert_adds_up(device.read())
        assert device.read().reserved_bytes == 0


@pytest.mark.parametrize(
    ("allocator", "allocated_bytes", "reserved_bytes"),
    [
        # Rounded to 512 bytes, from a segment of 20 MiB.
        ("caching", 3 * MIB + 512, 20 * MIB),
        ("expandable", 3 * MIB + 512, 20 * MIB),
        ("exact", 3 * MIB + 1, 3 * MIB + 1),
    ],
)
def test_the_allocator_option_decides_what_a_tensor_takes(
    allocator, allocated_bytes, reserved_bytes
):
    with small(allocator=allocator) as device:
        held = take(device, 3 * MIB + 1)
        reading = device.read()
        assert (reading.allocated_bytes, reading.reserved_bytes) == (
            allocated_bytes,
            reserved_bytes,
        )
        del held
        assert device.read().allocated_bytes == 0
        assert device.read().reserved_bytes == (0 if allocator == "exact" else reserved_bytes)
        device.check_integrity()


def test_only_expandable_segments_grow_in_place():
    def reserved_mib(allocator: Any) -> float:
        with small(allocator=allocator) as device:
            first = take(device, 12 * MIB)
            del first
            second = take(device, 30 * MIB)
            assert second.nbytes == 30 * MIB
            return device.read().reserved_bytes / MIB

    # 12 stay cached, of no use, and 30 come on top; one segment grows from 20 to 40.
    assert (reserved_mib("caching"), reserved_mib("expandable")) == (12 + 30, 40)


def test_peaks_last_until_they_are_reset():
    with small(allocator="exact") as device:
        held, gone = take(device, 100), take(device, 900)
        del gone
        assert (device.read().peak_allocated_bytes, device.read().allocated_bytes) == (1000, 100)
        device.reset_peaks()
        assert device.read().peak_allocated_bytes == device.read().peak_reserved_bytes == 100
        del held


def test_releasing_the_cache_leaves_what_tensors_hold():
    with small() as device:
        held, gone = take(device, 30 * MIB), take(device, 50 * MIB)
        del gone
        assert device.read().reserved_bytes == 80 * MIB
        device.release_cache()
        assert device.read().reserved_bytes == held.nbytes


def test_the_module_of_the_device_has_the_numbers_of_the_card():
    with small() as device:
        held = take(device, 30 * MIB)
        module = torch.simgpu  # type: ignore[attr-defined]
        assert module.memory_allocated() == module.max_memory_allocated() == held.nbytes
        assert module.mem_get_info() == (1 * GIB - 30 * MIB, 1 * GIB)
        del held
        module.empty_cache()
        assert (module.memory_reserved(), module.max_memory_reserved()) == (0, 30 * MIB)
        module.reset_peak_memory_stats()
        assert module.max_memory_reserved() == 0
        with pytest.raises(AttributeError, match="simgpu has no attribute 'get_magic'"):
            module.get_magic()


def test_a_card_is_full_at_its_last_byte():
    with small(1 * MIB, allocator="exact") as device:
        held = take(device, 1 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            take(device, 1)
        del held
        assert take(device, 1 * MIB).numel() == 1 * MIB


def test_context_and_others_are_not_to_be_had():
    card = custom_card(1000)
    with SimulatedCard(card, allocator="exact", context_bytes=100, others_bytes=300) as device:
        with pytest.raises(torch.OutOfMemoryError):
            take(device, 601)
        assert take(device, 600).numel() == 600


def test_out_of_memory_is_told_in_cudas_words():
    with SimulatedCard(custom_card(2 * GIB), context_bytes=256 * MIB) as device:
        held, gone = take(device, 1 * GIB), take(device, 5 * MIB)
        del gone
        small_one = take(device, 4 * MIB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            take(device, 800 * MIB)
        # 2048 - 256 - 1024 - a segment of 20 = 748; 256 + 1024 + 20 = 1300 = 1.27 GiB.
        assert str(caught.value) == (
            "simgpu out of memory. Tried to allocate 800.00 MiB. GPU 0 has a total capacity of "
            "2.00 GiB of which 748.00 MiB is free. Including non-PyTorch memory, this process has "
            "1.27 GiB memory in use. Of the allocated memory 1.00 GiB is allocated by PyTorch, and "
            "16.00 MiB is reserved by PyTorch but unallocated."
        )
        assert (held.nbytes, small_one.nbytes) == (1 * GIB, 4 * MIB)


def test_the_shortfall_is_exact_and_the_text_agrees_to_two_decimals():
    with small(1 * GIB, allocator="exact") as device:
        held = take(device, 100_000_001)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            take(device, 1_000_000_007)
        exact = Shortfall(1_000_000_007, 1 * GIB - 100_000_001)
        assert Shortfall.of(caught.value) == exact
        told = Shortfall.of(torch.OutOfMemoryError(str(caught.value)))
        assert told is not None
        for precise, rounded in zip(astuple(exact), astuple(told), strict=True):
            assert abs(precise - rounded) <= 0.005 * MIB
        assert held.nbytes == 100_000_001


@pytest.mark.parametrize(
    ("nbytes", "text"),
    # CUDA changes the unit above, not at, a power of it.
    [(513, "513 bytes"), (1024, "1024 bytes"), (1025, "1.00 KiB"), (MIB, "1024.00 KiB")],
)
def test_small_sizes_are_told_as_cuda_tells_them(nbytes: int, text: str):
    told = pytest.raises(torch.OutOfMemoryError, match=rf"allocate {re.escape(text)}\.")
    with small(512, allocator="exact") as device, told:
        take(device, nbytes)


def test_others_that_grow_take_what_is_free():
    with small(1000, allocator="exact") as device:
        held = take(device, 400)
        device.others_bytes = 500
        assert device.read().free_bytes == 100
        with pytest.raises(torch.OutOfMemoryError) as caught:
            take(device, 101)
        assert Shortfall.of(caught.value) == Shortfall(101, 100)
        device.others_bytes = 0
        assert take(device, 600).numel() + held.numel() == 1000


def test_others_that_grow_over_what_is_held_leave_nothing_free():
    with small(1000, allocator="exact") as device:
        held = take(device, 400)
        device.others_bytes = 900
        assert device.read().free_bytes == 0
        with pytest.raises(torch.OutOfMemoryError):
            take(device, 1)
        assert held.numel() == device.read().allocated_bytes


def test_an_allocation_that_needs_the_cache_counts_as_a_retry():
    with small(100 * MIB) as device:
        gone = take(device, 60 * MIB)
        del gone
        assert take(device, 80 * MIB).numel()
        assert device.read().alloc_retries == 1


def test_each_stream_has_a_cache_of_its_own():
    with small() as device:
        side = device.new_stream()
        gone = take(device, 30 * MIB)
        del gone
        with device.on(side):
            assert device.current_stream() == side
            held = take(device, 30 * MIB)
        assert device.current_stream() != side
        assert device.read().reserved_bytes == 2 * 30 * MIB
        again = take(device, 30 * MIB)
        assert device.read().reserved_bytes == 2 * 30 * MIB
        assert held.nbytes == again.nbytes


def test_the_stream_before_is_current_again_after_an_error():
    device = small()
    outer = device.current_stream()
    with pytest.raises(KeyError), device.on(device.new_stream()):
        raise KeyError
    assert device.current_stream() == outer


def test_streams_of_a_card_are_all_different():
    device = small()
    streams = [device.current_stream(), *(device.new_stream() for _ in range(3))]
    assert len(set(streams)) == 4


def test_a_pinned_copy_is_charged_its_power_of_two_while_it_lives():
    with small() as device:
        host = torch.arange(5 * KIB, dtype=torch.uint8)
        pinned, other = device.pin(host), device.pin(host[:3])
        assert torch.equal(pinned, host)
        assert pinned.data_ptr() != host.data_ptr()
        assert device.pinned_bytes == 8 * KIB + 4
        del pinned
        assert device.pinned_bytes == 4
        del other
        assert device.pinned_bytes == 0
        assert device.transfers == Transfers()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_nth_allocation_fails_once(n: int):
    with small() as device:
        take(device, 8)
        device.faults.at_allocation(n)
        held = [take(device, 8) for _ in range(n - 1)]
        with pytest.raises(torch.OutOfMemoryError, match="injected"):
            take(device, 8)
        assert len([*held, take(device, 8)]) == n


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_nth_copy_fails_once_in_either_direction(n: int):
    with small() as device:
        there = torch.ones(4).to(device.torch_device)
        device.faults.at_copy(n)
        for _ in range(n - 1):
            there.cpu()
        with pytest.raises(InjectedError):
            there.cpu()
        assert there.cpu().tolist() == [1.0] * 4


def test_faults_that_were_cleared_do_not_happen():
    with small() as device:
        device.faults.at_allocation(1)
        device.faults.at_copy(1)
        device.faults.clear()
        assert torch.ones(4).to(device.torch_device).cpu().tolist() == [1.0] * 4
        assert (device.faults.allocations, device.faults.copies) == (1, 2)


def test_a_failed_copy_is_not_counted_and_leaks_nothing():
    with small(allocator="exact") as device:
        device.faults.at_copy(1)
        with pytest.raises(InjectedError):
            torch.ones(4).to(device.torch_device)
        gc.collect()
        assert device.transfers == Transfers()
        assert device.read().allocated_bytes == 0
        device.check_integrity()


def test_a_second_card_has_to_wait_until_the_first_is_out():
    with small() as device:
        with pytest.raises(DeviceBusyError, match=re.escape(str(device))), small():
            pass
        assert take(device, 8).numel() == 8


def test_a_second_card_has_to_wait_until_the_tensors_of_the_first_are_gone():
    with small() as device:
        held = take(device, 8)
    with pytest.raises(DeviceBusyError, match="1 tensors of the card"), small():
        pass
    del held
    with small() as device:
        assert device.read().allocated_bytes == 0


def test_tensors_that_only_a_cycle_holds_are_not_in_the_way():
    with small() as device:
        cycle = [take(device, 8)]
        cycle.append(cycle)  # type: ignore[arg-type]
    del cycle
    with small() as device:
        assert device.read().allocated_bytes == 0


def test_work_without_a_card_is_an_error_with_a_hint():
    with small() as device:
        held = take(device, 8)
    with pytest.raises(DeviceError, match="no card is in it") as caught:
        held + 1
    assert "inside its `with` block" in str(caught.value.hint)
    with pytest.raises(AttributeError):
        torch.simgpu.memory_allocated()  # type: ignore[attr-defined]


def test_a_card_can_be_put_in_again_and_counts_on():
    device = small(allocator="exact")
    for n in (1, 2):
        with device:
            torch.ones(4).to(device.torch_device)
            assert device.transfers == Transfers(16 * n, n)
            device.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_bytes": 1000}, "nothing is left"),
        ({"context_bytes": 400, "others_bytes": 700}, "nothing is left"),
        ({"context_bytes": -1}, "context is -1"),
        ({"context_bytes": 0, "others_bytes": -5}, "others are -5"),
    ],
)
def test_a_card_on_which_nothing_is_left_is_refused(options: dict[str, int], message: str):
    with pytest.raises(InputError, match=message) as caught:
        SimulatedCard(custom_card(1000), **options)
    assert caught.value.hint


@pytest.mark.parametrize("allocator", ["caching", "expandable", "exact"])
def test_the_books_are_right_while_tensors_live_and_when_they_are_gone(allocator):
    with small(allocator=allocator) as device:
        held = [take(device, n) for n in (0, 1, 511, 3 * MIB, 30 * MIB)]
        device.check_integrity()
        held.pop(2)
        device.check_integrity()
        held.clear()
        device.check_integrity()
        device.release_cache()
        assert device.read().reserved_bytes == 0


@contextmanager
def charge_without_storage(device: Any) -> Iterator[None]:
    block = device._allocator.allocate(512)
    yield
    device._allocator.free(block)


@contextmanager
def storage_without_charge(device: Any) -> Iterator[None]:
    held = storage.new_storage(64, lambda: None)
    yield
    assert held.nbytes == 64


@contextmanager
def miscounted(device: Any) -> Iterator[None]:
    device._allocator.allocated_bytes += 1
    yield
    device._allocator.allocated_bytes -= 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (charge_without_storage, "1536 bytes are charged, and the storages that are alive have 1"),
        (storage_without_charge, "1024 bytes are charged, .* have 1088"),
        (miscounted, "1025 allocated bytes are booked, 1024 are there"),
    ],
)
def test_damage_is_found(damage: Callable[[Any], Any], message: str):
    with small(allocator="exact") as device:
        held = take(device, 1024)
        with damage(device), pytest.raises(DeviceIntegrityError, match=message):
            device.check_integrity()
        device.check_integrity()
        assert held.nbytes == 1024


def test_a_run_on_a_catalogued_card_has_its_total():
    card: Card = find_card("RTX 5090")
    with SimulatedCard(card) as device:
        assert device.torch_device == torch.device("simgpu", 0)
        assert device.read().total_bytes == card.total_bytes
        assert device.read().context_bytes == CONTEXT_BYTES
