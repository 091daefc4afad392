"""A use that fails anywhere is undone in full: the module is as it was, and the device empty."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from snapshot import snapshot
from stacks import Stack, row
from torch import nn

from residency.offload.cards import custom_card
from residency.offload.host_memory import HostBudget
from residency.offload.layers import Region
from residency.offload.layerwise import LayerwiseOffload
from residency.offload.placement import ComponentOffload, Placement, Resident
from residency.offload.simulated.card import InjectedError, SimulatedCard


@pytest.fixture(params=[False, True], ids=["", "in order"])
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedCard]:
    with SimulatedCard(
        custom_card(1 << 20), allocator="exact", context_bytes=0, check_order=request.param
    ) as device:
        yield device
        device.check_integrity()
        assert device.read().allocated_bytes == 0


Make = Callable[[nn.Module, SimulatedCard], Placement]

PLACEMENTS: dict[str, Make] = {
    "streamed": lambda module, device: LayerwiseOffload(module, device, prefetch=1),
    "far ahead": lambda module, device: LayerwiseOffload(module, device, prefetch=3),
    "with a set": lambda module, device: LayerwiseOffload(module, device, resident_layers=(2, 1)),
    "pinned": lambda module, device: LayerwiseOffload(
        module, device, resident_layers=(1, 1), pin=HostBudget(1 << 20)
    ),
    "whole": ComponentOffload,
    "resident": Resident,
}


def request(placement: Placement, module: nn.Module, device: SimulatedCard) -> list[Any]:
    """Install, and use twice with the set retained in between."""
    placement.install()
    results = []
    for passes in (2, 1):
        placement.begin_use(holds_resident_set=True, passes=passes)
        x = row().to(device.torch_device)
        results += [module(x).cpu() for _ in range(passes)]
        placement.release_after_use(keep_resident=True)
        placement.check_integrity()
    return results


def counted(make: Make, device: SimulatedCard) -> tuple[int, int]:
    """How many allocations and copies a request has."""
    module = Stack()
    allocations, copies = device.faults.allocations, device.faults.copies
    placement = make(module, device)
    request(placement, module, device)
    placement.remove()
    return device.faults.allocations - allocations, device.faults.copies - copies


def assert_undone(
    module: nn.Module, before: dict[str, Any], placement: Placement, device: SimulatedCard
) -> None:
    placement.release_all()
    if not isinstance(placement, Resident):
        assert device.read().allocated_bytes == 0
        placement.check_integrity()
    placement.remove()
    assert snapshot(module) == before
    assert device.read().allocated_bytes == device.pinned_bytes == 0
    device.check_integrity()


@pytest.mark.parametrize("kind", ["allocation", "copy"])
@pytest.mark.parametrize("make", PLACEMENTS.values(), ids=list(PLACEMENTS))
def test_a_failure_anywhere_in_a_request_is_undone_and_the_next_one_works(device, make, kind: str):
    module = Stack()
    before, expected = snapshot(module), module(row())
    placement = make(module, device)
    count = counted(make, device)[kind == "copy"]
    assert count > 15
    inject = device.faults.at_copy if kind == "copy" else device.faults.at_allocation
    for n in range(1, count + 1):
        inject(n)
        failed = True
        with suppress(InjectedError, torch.OutOfMemoryError):
            request(placement, module, device)
            failed = False
        assert failed, n
        assert_undone(module, before, placement, device)
    results = request(placement, module, device)
    assert all(torch.equal(result, expected) for result in results)
    assert_undone(module, before, placement, device)


def test_a_layer_that_raises_is_undone_as_well(device: SimulatedCard):
    module = Stack()
    before = snapshot(module)
    offload = LayerwiseOffload(module, device, prefetch=2)
    offload.install()
    offload.begin_use(holds_resident_set=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        module(torch.zeros(1, 3).to(device.torch_device))
    module.path = (0, 99)
    with pytest.raises(IndexError):
        module(row().to(device.torch_device))
    module.path = range(6)
    device.synchronize()
    before[".path"] = snapshot(module)[".path"]
    assert_undone(module, before, offload, device)


def test_a_card_that_is_too_small_is_undone(device: SimulatedCard):
    module = Stack()
    before = snapshot(module)
    offload = LayerwiseOffload(module, device, resident_layers=(3, 3))
    offload.install()
    device.others_bytes = (1 << 20) - 5000
    with pytest.raises(torch.OutOfMemoryError):
        offload.begin_use(holds_resident_set=True)
    assert_undone(module, before, offload, device)


def add_hook(module: Stack) -> None:
    module.second[2].down.register_forward_hook(lambda *_: None)


def leave_forward(module: Stack) -> None:
    module.first[0].forward = module.first[0].forward


def untie(module: Stack) -> None:
    module.head.weight = nn.Parameter(module.embed.weight.data)


def copy_storage(module: Stack) -> None:
    module.first[1].up.weight.data = module.first[1].up.weight.data.clone()


def change_stride(module: Stack) -> None:
    weight = module.embed.weight
    weight.data = weight.data.t().contiguous().t()


def change_dtype(module: Stack) -> None:
    module.scale.data = module.scale.data.double()


def change_value(module: Stack) -> None:
    module.second[0].up.weight[0, 0] += 1


def freeze(module: Stack) -> None:
    module.embed.weight.requires_grad_(False)


def stop_training(module: Stack) -> None:
    module.first[2].eval()


@pytest.mark.parametrize(
    "damage",
    [
        add_hook,
        leave_forward,
        untie,
        copy_storage,
        change_stride,
        change_dtype,
        change_value,
        freeze,
        stop_training,
    ],
)
def test_what_an_undo_may_miss_is_seen(damage: Callable[[Stack], None]):
    module = Stack()
    before = snapshot(module)
    assert snapshot(module) == before
    damage(module)
    assert snapshot(module) != before


def test_an_undo_that_forgets_a_tensor_is_seen(device, monkeypatch: pytest.MonkeyPatch):
    module = Stack()
    before = snapshot(module)
    offload = LayerwiseOffload(module, device)
    offload.install()
    offload.begin_use(holds_resident_set=False)
    with monkeypatch.context() as broken:
        broken.setattr(Region, "unbind", lambda region: None)
        offload.remove()
    assert snapshot(module) != before
    assert device.read().allocated_bytes > 0
    offload.remove()
    assert snapshot(module) == before
