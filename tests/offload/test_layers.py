"""Layer groups, the regions of host memory under tensors, and which of them a layer owns."""

from collections.abc import Iterator

import pytest
import torch
from stacks import Block, Stack
from torch import Tensor, nn

from residency.offload.cards import custom_card
from residency.offload.errors import OffloadError
from residency.offload.layers import (
    Buffers,
    CopyStream,
    Weights,
    aligned,
    layer_groups,
    partition,
    regions,
)
from residency.offload.simulated.card import SimulatedCard


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    with SimulatedCard(custom_card(1 << 20), allocator="exact", context_bytes=0) as device:
        yield device
        device.check_integrity()
        assert device.read().allocated_bytes == 0


def names(module: nn.Module) -> dict[str, int]:
    return {group.name: len(group.layers) for group in layer_groups(module)}


def weighed(module: nn.Module) -> tuple[list[list[int]], int]:
    by_group, rest = partition(module, layer_groups(module))
    return [[weights.nbytes for weights in group] for group in by_group], rest.nbytes


@pytest.mark.parametrize(
    ("nbytes", "taken"), [(0, 0), (1, 512), (512, 512), (513, 1024), (4096, 4096)]
)
def test_a_region_takes_multiples_of_512_bytes(nbytes: int, taken: int):
    assert aligned(nbytes) == taken


def test_groups_are_the_module_lists_in_the_order_of_their_definition():
    assert names(Stack()) == {"first": 3, "second": 3}
    assert names(nn.Sequential(Stack(), Stack())) == dict.fromkeys(
        ["0.first", "0.second", "1.first", "1.second"], 3
    )


def test_only_the_outermost_module_list_counts():
    module = nn.ModuleDict({"blocks": nn.ModuleList(Stack() for _ in range(2))})
    assert names(module) == {"blocks": 2}


def test_a_list_of_lists_is_searched_since_it_has_no_layers_that_run():
    module = nn.ModuleDict({"stages": nn.ModuleList(nn.ModuleList([Block(8)]) for _ in range(2))})
    assert names(module) == {"stages.0": 1, "stages.1": 1}


def test_a_module_without_lists_or_with_empty_ones_has_no_groups():
    assert names(nn.Sequential(nn.Linear(1, 1))) == {}
    assert names(nn.ModuleDict({"blocks": nn.ModuleList()})) == {}


def test_a_tied_weight_is_charged_once():
    module = Stack()
    assert weighed(module) == ([[1024] * 3] * 2, 1024 + 4)
    module.head.weight = nn.Parameter(torch.zeros(16, 16))
    assert weighed(module) == ([[1024] * 3] * 2, 2 * 1024 + 4)


def test_parameters_of_one_storage_are_charged_once_though_they_are_two():
    module = Stack()
    module.head.weight = nn.Parameter(module.embed.weight.data)
    assert weighed(module) == ([[1024] * 3] * 2, 1024 + 4)


def test_a_weight_that_two_layers_share_is_in_no_layer():
    module = Stack()
    module.first[1].up.weight = module.first[0].up.weight
    assert weighed(module) == ([[512, 512, 1024], [1024] * 3], 1024 + 4 + 512)


def test_a_weight_that_a_layer_shares_with_what_is_in_no_layer_is_in_no_layer():
    module = Stack(first=(16, 8, 8))
    module.first[0].up.weight = module.embed.weight
    # The 1024 bytes of `up` are those of `embed` now.
    assert weighed(module) == ([[1024, 1024, 1024], [1024] * 3], 1024 + 4)


def test_a_module_that_is_in_a_layer_and_outside_is_in_no_layer():
    module = Stack()
    module.extra = module.first[0].up
    assert weighed(module) == ([[512, 1024, 1024], [1024] * 3], 1024 + 4 + 512)


def test_a_buffer_that_layers_share_is_in_no_layer():
    module = Stack()
    table = torch.zeros(10)
    for layer in module.first:
        layer.register_buffer("table", table)
    assert weighed(module) == ([[1024] * 3] * 2, 1024 + 4 + 40)


def flat(module: Stack) -> Tensor:
    """Put the weights of `first` behind each other into one storage."""
    storage = torch.zeros(3 * 256)
    start = 0
    for parameter in module.first.parameters():
        part = storage[start : start + parameter.numel()].view(parameter.shape)
        parameter.data = part.copy_(parameter)
        start += parameter.numel()
    return storage


def test_views_of_one_flat_storage_belong_to_their_layers_one_by_one():
    module = Stack()
    flat(module)
    assert weighed(module) == ([[1024] * 3] * 2, 1024 + 4)


def test_views_that_overlap_are_charged_what_they_cover():
    storage = torch.zeros(1000)
    # Elements 0 to 599 and 400 to 899 cover 900; 950 to 999 are on their own.
    found = regions([storage[400:900], storage[950:], storage[:600]])
    assert sorted(region.nbytes for region in found) == [50 * 4, 900 * 4]


def test_a_view_inside_another_adds_nothing():
    storage = torch.zeros(1000)
    assert [region.nbytes for region in regions([storage, storage[10:20]])] == [4000]


def test_neighbours_that_only_touch_are_regions_of_their_own():
    storage = torch.zeros(1000)
    assert len(regions([storage[:500], storage[500:]])) == 2


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.zeros(4, 6).t(), 96),
        (torch.zeros(4, 6)[:, 1:3], (3 * 6 + 1 + 1) * 4),
        (torch.zeros(1).expand(5, 5), 4),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), 2 * 3 * 16 * 4),
        (torch.zeros(0, 3), 0),
        (torch.zeros((), dtype=torch.complex64), 8),
    ],
    ids=["transposed", "columns", "expanded", "channels last", "empty", "scalar"],
)
def test_a_region_reaches_from_the_first_byte_to_the_last(
    device: SimulatedCard, tensor: Tensor, nbytes: int
):
    weights = Weights(regions([tensor]))
    assert weights.nbytes == nbytes
    size, stride, host = tensor.size(), tensor.stride(), tensor.data_ptr()
    weights.onload(CopyStream(device), Buffers(device))
    assert (tensor.device.type, tensor.size(), tensor.stride()) == ("simgpu", size, stride)
    assert device.read().allocated_bytes == aligned(nbytes)
    weights.offload()
    assert (tensor.device.type, tensor.data_ptr(), tensor.stride()) == ("cpu", host, stride)


@pytest.mark.parametrize("in_one_buffer", [False, True])
def test_values_arrive_in_tensors_that_overlap_as_they_did(
    device: SimulatedCard, in_one_buffer: bool
):
    storage = torch.arange(100, dtype=torch.float32)
    tensors = [storage[10:50], storage[40:90].view(5, 10).t(), storage[95:]]
    expected = [tensor.clone() for tensor in tensors]
    weights, copies = Weights(regions(tensors)), CopyStream(device)
    if in_one_buffer:
        buffer = torch.empty(weights.buffer_bytes, dtype=torch.uint8, device=device.torch_device)
        weights.onload_into(buffer, copies)
    else:
        weights.onload(copies, Buffers(device))
    assert all(torch.equal(t.cpu(), e) for t, e in zip(tensors, expected, strict=True))
    tensors[0][-1] = -7.0  # element 49, which the second has in its first column
    assert tensors[1][9, 0].item() == -7.0
    weights.offload()


def test_views_of_different_dtypes_keep_their_places(device: SimulatedCard):
    """The region begins at a byte where no float32 may stand."""
    storage = torch.arange(64, dtype=torch.uint8)
    signed, floats = storage[2:22].view(torch.int8), storage[4:36].view(torch.float32)
    expected = signed.clone(), floats.clone()
    weights = Weights(regions([signed, floats]))
    weights.onload(CopyStream(device), Buffers(device))
    assert torch.equal(signed.cpu(), expected[0])
    assert torch.equal(floats.cpu().view(torch.uint8), expected[1].view(torch.uint8))
    weights.offload()


def test_the_copy_of_a_region_that_fails_leaves_all_on_the_host(device: SimulatedCard):
    tensors = [torch.zeros(10), torch.zeros(20)]
    weights = Weights(regions(tensors))
    device.faults.at_copy(2)
    with pytest.raises(RuntimeError, match="injected"):
        weights.onload(CopyStream(device), Buffers(device))
    weights.check_on(None)
    with pytest.raises(OffloadError, match=r"\(10,\)\) should be on simgpu and is on cpu"):
        weights.check_on(device)


def test_a_tensor_on_a_device_is_refused(device: SimulatedCard):
    with pytest.raises(OffloadError, match="simgpu:0, not on the host") as caught:
        regions([torch.zeros(3, device=device.torch_device)])
    assert "components on the CPU" in str(caught.value.hint)
    del caught


def test_a_tensor_without_memory_is_refused():
    with pytest.raises(OffloadError, match="is on meta, not on the host"):
        regions([torch.zeros(3, device="meta")])


class Wrapper(torch.Tensor):
    """A tensor that consists of another, as quantized weights do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype)
        made.inner = inner
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize("tensor", [Wrapper(torch.zeros(3)), torch.zeros(3).to_sparse()])
def test_a_tensor_that_is_not_plain_and_strided_is_refused(tensor: Tensor):
    with pytest.raises(OffloadError, match="is no plain strided tensor") as caught:
        regions([tensor])
    assert "without quantisation" in str(caught.value.hint)
