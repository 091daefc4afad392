"""Masters that are pinned in chunks, on a simulated card and on hosts that refuse.

A `Stack` whose first layers have 9600 hidden elements has regions of 600 KiB there, which are
pinned as 512 KiB and 88 KiB, the latter charged 128; its 1028 bytes in no layer as 1024 and 4.
"""

from collections.abc import Iterator

import pytest
import torch
from snapshot import snapshot
from stacks import ROW_BYTES, Stack, row

from residency.offload.cards import custom_card
from residency.offload.errors import HostMemoryError, OffloadError
from residency.offload.host_memory import (
    HostBudget,
    chunked_charge_bytes,
    chunks,
    pinned_charge_bytes,
)
from residency.offload.layers import Buffers, CopyStream, Weights, regions
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload, Placement, Resident
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.storage import mark_virtual

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
REST = 1024 + 4
LARGE = 9600
"""Hidden elements of a layer of two regions of 600 KiB."""


class Host(SimulatedCard):
    """A card whose host locks no more than `lockable_bytes`, and counts how often it was asked."""

    lockable_bytes = 1 << 40
    asked = 0

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        if self.pinned_bytes + pinned_charge_bytes(host.nbytes) > self.lockable_bytes:
            raise HostMemoryError(f"the host can't lock {host.nbytes} bytes")
        return super().pin(host)


@pytest.fixture
def device() -> Iterator[Host]:
    with Host(custom_card(16 * MIB), allocator="exact", context_bytes=0) as device:
        yield device
        device.check_integrity()
        assert device.read().allocated_bytes == device.pinned_bytes == 0


def stack() -> Stack:
    return Stack(first=(LARGE, 8), second=(8,))


TOTAL = 2 * 600 * KIB + 2 * 2 * 512 + REST
CHARGE = 2 * 640 * KIB + 2 * 2 * 512 + REST

PLACEMENTS = [Resident, ComponentOffload, LayerwiseOffload]


def used(placement: Placement, device: Host) -> tuple[int, int]:
    """Bytes and copies to the device in one use, the input aside."""
    before = device.transfers
    placement.begin_use(holds_resident_set=False)
    result = placement.module(row().to(device.torch_device)).cpu()  # type: ignore[attr-defined]
    placement.release_after_use()
    placement.check_integrity()
    assert torch.equal(result, stack()(row()))
    moved = device.transfers - before
    return moved.h2d_bytes - ROW_BYTES, moved.h2d_copies - 1


@pytest.mark.parametrize("kind", PLACEMENTS)
def test_the_card_counts_what_the_budget_was_charged(device: Host, kind: type[Placement]):
    module = stack()
    before = snapshot(module)
    placement = kind(module, device)  # type: ignore[call-arg]
    budget = HostBudget(4 * MIB)
    placement.pin_masters(budget)
    assert placement.pinned_charge_bytes == CHARGE
    assert budget.charged_bytes == device.pinned_bytes == CHARGE
    placement.unpin_masters()
    assert budget.charged_bytes == device.pinned_bytes == 0
    placement.unpin_masters()
    assert snapshot(module) == before


@pytest.mark.parametrize("kind", [ComponentOffload, LayerwiseOffload])
def test_chunks_are_more_copies_of_the_same_bytes(device: Host, kind: type[Placement]):
    placement = kind(stack(), device)  # type: ignore[call-arg]
    placement.install()
    # The tied weight and the scale, and two regions of each of three layers.
    assert used(placement, device) == (TOTAL, 2 + 3 * 2)
    placement.pin_masters(HostBudget(4 * MIB))
    assert used(placement, device) == (TOTAL, 2 + 3 * 2 + 2)
    placement.remove()
    placement.unpin_masters()
    assert used_after_removal(placement)


def used_after_removal(placement: Placement) -> bool:
    return torch.equal(placement.module(row()), stack()(row()))  # type: ignore[attr-defined]


@pytest.mark.parametrize("in_one_buffer", [False, True])
def test_values_arrive_from_chunks_in_their_places(device: Host, in_one_buffer: bool):
    # An odd start, three pieces of the first region, and a second region behind it.
    storage = torch.arange(250_000, dtype=torch.float32)
    tensors = [storage[1:206_901], storage[240_000:]]
    expected = [tensor.clone() for tensor in tensors]
    weights, copies, budget = Weights(regions(tensors)), CopyStream(device), HostBudget(2 * MIB)
    weights.pin(device, budget)
    assert [len(region.masters) for region in weights.regions] == [3, 1]
    # 206,900 floats are 808.2 KiB: 512, 256 and 40.2, which is charged 64 as the other region is.
    assert budget.charged_bytes == device.pinned_bytes == (512 + 256 + 64 + 64) * KIB
    if in_one_buffer:
        buffer = torch.empty(weights.buffer_bytes, dtype=torch.uint8, device=device.torch_device)
        weights.onload_into(buffer, copies)
    else:
        weights.onload(copies, Buffers(device))
    device.synchronize()
    assert device.transfers.h2d_bytes == weights.nbytes == 206_900 * 4 + 40_000
    assert all(torch.equal(t.cpu(), e) for t, e in zip(tensors, expected, strict=True))
    weights.offload()
    weights.unpin(budget)
    assert all(torch.equal(t, e) for t, e in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("nbytes", [1, 6 * KIB, 600 * KIB, 3 * MIB, 3 * MIB + 7])
def test_a_region_is_pinned_in_the_chunks_of_its_size(device: Host, nbytes: int):
    weights, budget = (
        Weights(regions([torch.zeros(nbytes, dtype=torch.uint8)])),
        HostBudget(8 * MIB),
    )
    weights.pin(device, budget)
    assert [master.nbytes for master in weights.regions[0].masters] == [*chunks(nbytes)]
    assert budget.charged_bytes == device.pinned_bytes == chunked_charge_bytes(nbytes)
    weights.pin(device, budget)
    assert budget.charged_bytes == device.pinned_bytes == chunked_charge_bytes(nbytes)
    weights.unpin(budget)


def test_an_empty_tensor_pins_and_copies_nothing(device: Host):
    weights, budget = Weights(regions([torch.zeros(0, 3)])), HostBudget(0)
    weights.pin(device, budget)
    weights.onload(CopyStream(device), Buffers(device))
    assert (device.asked, device.transfers.h2d_copies) == (0, 0)
    weights.offload()


def test_chunks_of_virtual_masters_are_virtual(device: Host):
    tensor = torch.empty(600 * KIB, dtype=torch.uint8)
    mark_virtual(tensor)
    weights, budget = Weights(regions([tensor])), HostBudget(MIB)
    weights.pin(device, budget)
    assert not any(device.is_defined(master) for master in weights.regions[0].masters)
    assert budget.charged_bytes == device.pinned_bytes == 640 * KIB
    weights.unpin(budget)


def test_layers_that_a_block_each_leaves_no_room_for_are_pinned_in_chunks():
    """HM-01: layers of 1.2 GiB, of which 41.22 GiB fit 20 in one block each, and 34 in chunks."""
    layer = torch.empty(round(1.2 * GIB), dtype=torch.uint8)
    mark_virtual(layer)
    layers = [Weights(regions([layer])) for _ in range(35)]
    budget = HostBudget(round(41.22 * GIB))
    with Host(custom_card(16 * MIB), allocator="exact", context_bytes=0) as device:
        for weights in layers[:34]:
            weights.pin(device, budget)
        with pytest.raises(HostMemoryError, match="are left"):
            layers[34].pin(device, budget)
        assert budget.charged_bytes == device.pinned_bytes == 34 * (1228 * MIB + 832 * KIB)
        for weights in layers:
            weights.unpin(budget)
        assert device.pinned_bytes == 0


# What the host has to lock for CHARGE: nothing, the first chunk, the first region, most of all.
@pytest.mark.parametrize("lockable", [0, 600 * KIB, 700 * KIB, CHARGE - 1])
@pytest.mark.parametrize("kind", PLACEMENTS)
def test_a_host_that_refuses_in_the_middle_leaves_nothing_pinned(
    device: Host, kind: type[Placement], lockable: int
):
    module = stack()
    before = snapshot(module)
    placement = kind(module, device)  # type: ignore[call-arg]
    budget = HostBudget(4 * MIB)
    device.lockable_bytes = lockable
    with pytest.raises(HostMemoryError, match="the host can't lock") as caught:
        placement.pin_masters(budget)
    # Given back while the error, and with it the frames that it passed, is alive.
    assert budget.charged_bytes == device.pinned_bytes == 0
    del caught
    assert 0 <= budget.available_bytes <= lockable
    assert snapshot(module) == before
    placement.install()
    assert used(placement, device)[0] == (0 if kind is Resident else TOTAL)
    placement.remove()


def test_after_a_refusal_the_host_is_not_asked_again(device: Host):
    first, second = ComponentOffload(stack(), device), ComponentOffload(stack(), device)
    budget = HostBudget(8 * MIB)
    first.pin_masters(budget)
    device.lockable_bytes = device.pinned_bytes
    with pytest.raises(HostMemoryError, match="the host can't lock"):
        second.pin_masters(budget)
    asked, device.lockable_bytes = device.asked, 1 << 40
    for _ in range(2):
        with pytest.raises(HostMemoryError, match=f"isn't tried: .* with {CHARGE} bytes pinned"):
            second.pin_masters(budget)
    assert device.asked == asked
    # What is pinned stays so.
    assert budget.charged_bytes == device.pinned_bytes == budget.available_bytes == CHARGE
    first.unpin_masters()


def test_a_budget_that_is_too_small_stays_open(device: Host):
    placement = ComponentOffload(stack(), device)
    budget = HostBudget(CHARGE - 1)
    with pytest.raises(HostMemoryError, match="are left"):
        placement.pin_masters(budget)
    assert budget.refusal is None
    budget.available_bytes += 1
    placement.pin_masters(budget)
    assert budget.charged_bytes == budget.available_bytes
    placement.unpin_masters()


def test_an_error_that_is_not_the_hosts_leaves_the_budget_open(device: Host, monkeypatch):
    placement = ComponentOffload(stack(), device)
    budget = HostBudget(4 * MIB)

    def broken(host: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the driver is gone")

    with monkeypatch.context() as patch:
        patch.setattr(device, "pin", broken)
        with pytest.raises(RuntimeError, match="driver is gone"):
            placement.pin_masters(budget)
    assert (budget.charged_bytes, budget.refusal) == (0, None)
    placement.pin_masters(budget)
    placement.unpin_masters()


def test_masters_are_charged_to_one_budget(device: Host):
    placement = ComponentOffload(stack(), device)
    first, second = HostBudget(4 * MIB), HostBudget(4 * MIB)
    placement.pin_masters(first)
    placement.pin_masters(first)
    with pytest.raises(OffloadError, match="under another budget"):
        placement.pin_masters(second)
    assert (first.charged_bytes, second.charged_bytes) == (CHARGE, 0)
    placement.unpin_masters()
    placement.pin_masters(second)
    assert (first.charged_bytes, second.charged_bytes) == (0, CHARGE)
    placement.unpin_masters()
