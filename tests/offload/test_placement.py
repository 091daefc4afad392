"""The two placements in one piece. A `Stack` is 1028 bytes in no layer and six layers of 1024."""

from collections.abc import Iterator

import pytest
import torch
from snapshot import snapshot
from stacks import ROW_BYTES, Stack, row
from torch import nn

from residency.offload.cards import custom_card
from residency.offload.errors import OffloadError
from residency.offload.placement import ComponentOffload, Placement, Resident
from residency.offload.simulated.card import SimulatedCard

REST, REST_TAKES = 1024 + 4, 1024 + 512
LAYERS = 6 * 1024


@pytest.fixture(params=[False, True], ids=["", "in order"])
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedCard]:
    with SimulatedCard(
        custom_card(1 << 20), allocator="exact", context_bytes=0, check_order=request.param
    ) as device:
        yield device
        device.check_integrity()
        assert device.read().allocated_bytes == 0


def moved(placement: Placement, device: SimulatedCard, *, keep: bool = False) -> int:
    before = device.transfers
    placement.begin_use(holds_resident_set=keep)
    result = placement.module(row().to(device.torch_device)).cpu()
    placement.release_after_use(keep_resident=keep)
    placement.check_integrity()
    assert torch.equal(result, Stack()(row()))
    return (device.transfers - before).h2d_bytes - ROW_BYTES


@pytest.mark.parametrize("kind", [Resident, ComponentOffload])
def test_a_placement_in_one_piece_weighs_every_region_by_itself(device: SimulatedCard, kind):
    placement = kind(Stack(), device)
    assert (placement.total_layers, placement.resident_layers) == (6, 6)
    assert placement.weight_bytes == REST_TAKES + LAYERS
    assert placement.non_layer_bytes == REST_TAKES
    placement.check_integrity()


@pytest.mark.parametrize("kind", [Resident, ComponentOffload])
def test_a_module_without_layers_can_be_placed_in_one_piece(device: SimulatedCard, kind):
    placement = kind(nn.Linear(16, 4), device)
    assert placement.total_layers == placement.resident_layers == 0
    assert placement.weight_bytes == placement.non_layer_bytes == 512 + 512
    placement.install()
    placement.begin_use(holds_resident_set=False)
    assert device.read().allocated_bytes == 1024
    placement.remove()


def test_resident_is_copied_once_and_stays(device: SimulatedCard):
    module = Stack()
    before = snapshot(module)
    placement = Resident(module, device)
    assert device.read().allocated_bytes == 0
    placement.install()
    assert device.read().allocated_bytes == REST_TAKES + LAYERS
    assert device.transfers.h2d_bytes == REST + LAYERS
    assert [moved(placement, device, keep=keep) for keep in (False, True)] == [0, 0]
    placement.release_all()
    assert device.read().allocated_bytes == REST_TAKES + LAYERS
    placement.remove()
    assert snapshot(module) == before


def test_a_component_comes_for_each_use_and_goes(device: SimulatedCard):
    module = Stack()
    before = snapshot(module)
    placement = ComponentOffload(module, device)
    placement.install()
    for _ in range(2):
        assert device.read().allocated_bytes == 0
        assert moved(placement, device) == REST + LAYERS
    placement.remove()
    assert snapshot(module) == before


def test_a_component_that_is_kept_is_not_copied_again(device: SimulatedCard):
    placement = ComponentOffload(Stack(), device)
    placement.install()
    moves = [moved(placement, device, keep=True) for _ in range(2)]
    assert moves[0] - moves[1] == placement.copy_bytes == REST + LAYERS
    assert device.read().allocated_bytes == placement.allocated_bytes == REST_TAKES + LAYERS
    placement.release_all()
    assert device.read().allocated_bytes == 0
    placement.remove()


@pytest.mark.parametrize("kind", [Resident, ComponentOffload])
def test_coming_twice_is_coming_once(device: SimulatedCard, kind):
    placement = kind(Stack(), device)
    for _ in range(2):
        placement.install()
        placement.begin_use(holds_resident_set=False)
    assert device.transfers.h2d_bytes == REST + LAYERS
    placement.remove()
    placement.remove()


@pytest.mark.parametrize("kind", [Resident, ComponentOffload])
def test_a_tensor_moved_behind_its_back_is_found(device: SimulatedCard, kind):
    module = Stack()
    placement = kind(module, device)
    placement.install()
    placement.begin_use(holds_resident_set=False)
    placement.check_integrity()
    module.head.to("cpu")
    with pytest.raises(OffloadError, match="should be on simgpu and is on cpu"):
        placement.check_integrity()
    placement.remove()
    placement.check_integrity()


@pytest.mark.parametrize("kind", [Resident, ComponentOffload])
def test_a_module_that_is_not_on_the_host_is_refused(device: SimulatedCard, kind):
    with pytest.raises(OffloadError, match="not on the host"):
        kind(Stack().to("meta"), device)
