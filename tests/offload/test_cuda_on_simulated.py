"""The CUDA device and all that runs on it, with a checked simulated card in the place of CUDA."""

from collections.abc import Callable, Iterator

import pytest
import torch
from snapshot import snapshot
from stacks import Stack, row
from torch import nn

from residency.offload.cards import custom_card
from residency.offload.clocks import LayerTimer, measure_bandwidth
from residency.offload.cuda.device import CudaDevice
from residency.offload.cuda.system import System
from residency.offload.device import Device
from residency.offload.errors import DeviceError, OrderError
from residency.offload.host_memory import HostBudget
from residency.offload.layers import CopyStream
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload, Placement, Resident
from residency.offload.simulated.card import InjectedError, SimulatedCard
from residency.offload.simulated.runtime import SimulatedRuntime
from residency.offload.simulated.work import Clock

MIB = 1 << 20
CLOCK = Clock(h2d_bytes_per_s=1024, pageable_bytes_per_s=512, op_s=1.0)


def cuda_on(card: SimulatedCard) -> CudaDevice:
    return CudaDevice(
        runtime=SimulatedRuntime(card),
        device_type="simgpu",
        system=System("linux", False, ()),
        page_lock=card.pin,
    )


@pytest.fixture
def card() -> Iterator[SimulatedCard]:
    with SimulatedCard(
        custom_card(1 * MIB),
        allocator="exact",
        context_bytes=1000,
        check_order=True,
        clock=CLOCK,
    ) as card:
        yield card
        card.check_integrity()
        assert card.read().allocated_bytes == card.pinned_bytes == 0


@pytest.fixture
def device(card: SimulatedCard) -> CudaDevice:
    return cuda_on(card)


def layers(module: nn.Module, device: Device) -> Placement:
    return LayerwiseOffload(module, device, resident_layers=(2, 1))


def pinned_layers(module: nn.Module, device: Device) -> Placement:
    return LayerwiseOffload(module, device, prefetch=2, pin=HostBudget(1 << 22))


PLACEMENTS = (layers, pinned_layers, ComponentOffload, Resident)


@pytest.mark.parametrize("make", PLACEMENTS)
def test_a_module_gives_the_hosts_output_and_is_put_back(card, device, make: Callable):
    module = Stack()
    before, expected = snapshot(module), module(row())
    placement = make(module, device)
    placement.install()
    for keep in (True, False):
        placement.begin_use(holds_resident_set=True, passes=2)
        x = row().to(device.torch_device)
        for _ in range(2):
            assert torch.equal(module(x).cpu(), expected)
        assert device.read() == card.read()
        placement.release_after_use(keep_resident=keep)
        placement.check_integrity()
    del x
    placement.remove()
    assert snapshot(module) == before
    assert device.read() == card.read()


def begin(placement: Placement) -> None:
    placement.install()
    placement.begin_use(holds_resident_set=True)


@pytest.mark.parametrize("make", PLACEMENTS)
def test_a_copy_that_fails_is_undone(card, device, make: Callable):
    module = Stack()
    before = snapshot(module)
    placement = make(module, device)
    card.faults.at_copy(2)
    with pytest.raises(InjectedError):
        begin(placement)
    placement.release_all()
    placement.remove()
    torch.zeros(8, device=device.torch_device)
    assert snapshot(module) == before


def test_the_bytes_that_were_copied_are_counted_where_they_are_issued(card, device):
    before = card.transfers
    assert device.transfers == before
    CopyStream(device).wait(CopyStream(device).fill([]))
    placement = ComponentOffload(Stack(), device)
    placement.begin_use(holds_resident_set=False)
    assert device.transfers == card.transfers
    assert device.transfers.h2d_bytes == placement.copy_bytes
    placement.remove()


def test_peaks_cache_and_context_read_as_the_card_does(card, device):
    held = torch.empty(1000, dtype=torch.uint8, device=device.torch_device)
    gone = torch.empty(2000, dtype=torch.uint8, device=device.torch_device)
    del gone
    device.release_cache()
    assert device.read() == card.read()
    assert device.read().peak_allocated_bytes == 3000
    assert device.read().context_bytes == 1000
    device.reset_peaks()
    assert device.read().peak_allocated_bytes == 1000
    assert device.identity == card.identity
    del held


def test_an_order_that_is_wrong_is_found_through_the_cuda_device(card, device, monkeypatch):
    monkeypatch.setattr(CopyStream, "wait", lambda self, event: None)
    placement = LayerwiseOffload(Stack(), device)
    placement.install()
    placement.begin_use(holds_resident_set=False)
    with pytest.raises(OrderError):
        placement.module(row().to(device.torch_device))
    placement.remove()


def test_marks_and_synchronizing_are_the_cards(card, device):
    since = device.mark()
    torch.zeros(8, device=device.torch_device)
    until = device.mark()
    assert card.timeline.host_s == 0
    assert device.seconds(since, until) == 1.0
    stream = device.new_stream()
    with device.on(stream):
        assert device.current_stream() == stream
        torch.zeros(8, device=device.torch_device)
        torch.zeros(8, device=device.torch_device)
    device.synchronize()
    assert card.timeline.host_s == 3.0
    assert measure_bandwidth(device, 4096, pinned=True) == pytest.approx(1024)
    assert measure_bandwidth(device, 4096, pinned=False) == pytest.approx(512)


def test_layers_are_timed_as_on_the_card(card, device):
    offload = LayerwiseOffload(Stack(), device, pin=HostBudget(1 << 22))
    offload.install()
    offload.timer = LayerTimer(device)
    offload.begin_use(holds_resident_set=False)
    offload.module(row().to(device.torch_device))
    offload.release_after_use()
    time = offload.timer.use()
    assert [each.compute_s for each in time.layers] == pytest.approx([3.0] * 6)
    assert time.copy_bytes == 1028 + 6 * 1024
    offload.remove()


def test_an_event_of_the_runtime_is_recorded_after_it_was_made(card):
    runtime = SimulatedRuntime(card)
    first, second = runtime.Event(enable_timing=True), runtime.Event(enable_timing=True)
    with pytest.raises(DeviceError, match="wasn't recorded"):
        first.elapsed_time(second)
    first.wait()
    first.synchronize()
    first.record()
    side = runtime.Stream(0)
    with runtime.stream(side):
        x = torch.zeros(8, device=card.torch_device)
    second.record(side)
    second.wait()
    assert (x + 1).sum().item() == 8
    assert first.elapsed_time(second) == 1000.0


def test_the_runtime_is_of_one_card_that_can_be_parsed(card):
    runtime = SimulatedRuntime(card)
    device = CudaDevice.parse("cuda", runtime=runtime, nvml=None, device_type="simgpu")
    assert device.read().total_bytes == 1 * MIB
    assert runtime.host_memory_stats()["active_bytes.current"] == 0
