"""With real data the card computes what the CPU computes, to the last bit."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residency.offload.cards import find_card
from residency.offload.device import Transfers
from residency.offload.simulated.card import SimulatedCard


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    with SimulatedCard(find_card("RTX 4090"), allocator="exact") as device:
        yield device
        device.check_integrity()
        assert device.read().allocated_bytes == 0


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(len(size))).to(dtype)


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert (result.device.type, result.dtype) == ("simgpu", expected.dtype)
    assert (result.size(), result.stride()) == (expected.size(), expected.stride())
    assert torch.equal(result.cpu(), expected)


def assert_same_on_both(
    device: SimulatedCard, function: Callable[..., Tensor], *inputs: Tensor
) -> None:
    """`function` makes the same on the card of inputs that were copied there."""
    expected = function(*(tensor.clone() for tensor in inputs))
    assert_same(function(*(tensor.to(device.torch_device) for tensor in inputs)), expected)


image = random(2, 8, 6, 6)
rows = random(4, 16)
words = random(2, 5, 16)


def seeded(layer: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return layer()


LAYERS = {
    "linear": (lambda: nn.Linear(16, 7), rows),
    "linear without bias": (lambda: nn.Linear(16, 7, bias=False), words),
    "conv": (lambda: nn.Conv2d(8, 4, 3, padding=1), image),
    "strided conv": (lambda: nn.Conv2d(8, 4, 3, stride=2, groups=2), image),
    "conv of channels last": (
        lambda: nn.Conv2d(8, 4, 3).to(memory_format=torch.channels_last),
        image.to(memory_format=torch.channels_last),
    ),
    "conv of volumes": (lambda: nn.Conv3d(8, 4, 2), random(1, 8, 3, 4, 4)),
    "transposed conv": (lambda: nn.ConvTranspose2d(8, 4, 2, stride=2), image),
    "group norm": (lambda: nn.GroupNorm(4, 8), image),
    "layer norm": (lambda: nn.LayerNorm(16), words),
    "rms norm": (lambda: nn.RMSNorm(16, eps=1e-6), words),
    "batch norm": (lambda: nn.BatchNorm2d(8).eval(), image),
    "embedding": (lambda: nn.Embedding(10, 16), torch.tensor([[1, 9], [0, 1]])),
    "attention": (lambda: nn.MultiheadAttention(16, 2, batch_first=True), words),
}


def call(layer: nn.Module, x: Tensor) -> Tensor:
    if isinstance(layer, nn.MultiheadAttention):
        return layer(x, x, x, need_weights=False)[0]
    return layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "x"), LAYERS.values(), ids=list(LAYERS))
def test_a_layer_gives_the_same_bits(device: SimulatedCard, make, x: Tensor, dtype: torch.dtype):
    layer = seeded(make).to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    expected = call(layer, x)
    assert_same(call(layer.to(device.torch_device), x.to(device.torch_device)), expected)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "matmul": lambda x: x @ x.mT,
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "reduction": lambda x: x.mean(0) + x.std(0) + x.amax(0),
    "cumsum": lambda x: x.cumsum(-1),
    "top k": lambda x: x.topk(3).values,
    "sort": lambda x: x.sort(-1).indices,
    "where with a host scalar": lambda x: torch.where(x > 0, x, torch.tensor(0.5)),
    "scalar arithmetic": lambda x: (2 * x + 1) / 3 - x**2,
    "index": lambda x: x[[3, 0], 1:],
    "index with a mask": lambda x: x[x[:, 0] > 0],
    "index with host indices": lambda x: x[torch.tensor([2, 0])],
    "index select": lambda x: x.index_select(1, torch.tensor([2, 0]).to(x.device)),
    "gather": lambda x: x.gather(0, torch.zeros(1, 16, dtype=torch.int64).to(x.device)),
    "index put": lambda x: x.index_put((torch.tensor([1]).to(x.device),), x[:1]),
    "masked fill": lambda x: x.masked_fill(x < 0, 7.0),
    "cat": lambda x: torch.cat((x, x.flip(0)), 1),
    "stack": lambda x: torch.stack((x, x), 1),
    "chunk": lambda x: x.chunk(3, -1)[2],
    "split": lambda x: torch.split(x, [3, 13], 1)[1],
    "unbind": lambda x: x.unbind(1)[3],
    "view": lambda x: x.view(2, 2, 4, 4),
    "reshape of a transposed one": lambda x: x.t().reshape(8, 8),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.view(2, 2, 16).permute(2, 0, 1),
    "expand": lambda x: x[:, :1].expand(4, 9),
    "unfold": lambda x: x.unfold(1, 4, 2),
    "slice with a step": lambda x: x[::2, 1::3],
    "view of other bytes": lambda x: x[1:].view(torch.int16),
    "contiguous": lambda x: x.t().contiguous(),
    "pad": lambda x: F.pad(x, (1, 2), value=3.0),
    "interpolation": lambda x: F.interpolate(x[None, None], scale_factor=2, mode="nearest"),
    "complex": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 8, 2)) * 1j),
    "fft": lambda x: torch.fft.fft(x).abs(),
    "to bfloat16": lambda x: x.to(torch.bfloat16),
    "through float16": lambda x: x.half().float(),
    "to int8": lambda x: (x * 10).to(torch.int8),
    "full like": lambda x: torch.full_like(x, 2.5) + torch.arange(16, device=x.device),
    "channels last": lambda x: x.view(1, 4, 4, 4).to(memory_format=torch.channels_last),
    "clone that keeps strides": lambda x: x.t().clone(),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_a_function_gives_the_same_bits_and_strides(device: SimulatedCard, function):
    assert_same_on_both(device, function, rows)


def write_through_view(x: Tensor) -> Tensor:
    x.view(8, 8)[2:4].fill_(5.0)
    return x


def write_through_transposed(x: Tensor) -> Tensor:
    x.t()[1] += 3
    return x


def write_with_index(x: Tensor) -> Tensor:
    x[torch.tensor([0, 2], device=x.device), 1] = 7.0
    return x


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x.add_(x),
    "silu": lambda x: F.silu(x, inplace=True),
    "copy": lambda x: x.copy_(x.flip(0)),
    "zero": lambda x: x.zero_(),
    "clamp": lambda x: x.clamp_(0, 1),
    "a view": write_through_view,
    "a transposed view": write_through_transposed,
    "an index": write_with_index,
    "transpose": lambda x: x.t_(),
    "unsqueeze": lambda x: x.unsqueeze_(0),
    "squeeze": lambda x: x.unsqueeze_(0).squeeze_(),
    "resize to as many": lambda x: x.resize_(8, 8),
    "resize to fewer": lambda x: x.resize_(5),
}


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=list(IN_PLACE))
def test_writing_in_place_writes_the_same_bits_where_they_are(device: SimulatedCard, function):
    x = rows.to(device.torch_device)
    storage = x.untyped_storage().data_ptr()
    result = function(x)
    assert_same(result, function(rows.clone()))
    assert result.untyped_storage().data_ptr() == storage
    assert device.read().allocated_bytes == rows.nbytes


def test_resize_to_more_keeps_what_is_there(device: SimulatedCard):
    x = rows.to(device.torch_device)[1:]
    assert x.resize_(5, 16).untyped_storage().nbytes() == 5 * 16 * 4
    assert torch.equal(x[:3].cpu(), rows[1:])


def test_out_is_written_where_it_is_and_resized_when_empty(device: SimulatedCard):
    x = rows.to(device.torch_device)
    out, empty = torch.zeros_like(x), torch.empty(0, device=device.torch_device)
    storage = out.untyped_storage().data_ptr()
    assert torch.add(x, x, out=out) is out
    torch.mm(x, x.t(), out=empty)
    assert out.untyped_storage().data_ptr() == storage
    assert_same(out, rows + rows)
    assert_same(empty, rows @ rows.t())


def test_a_view_shares_its_storage_and_is_charged_nothing(device: SimulatedCard):
    x = rows.to(device.torch_device)
    views = [x.view(-1), x.t(), x[1:], x.chunk(2)[1], x.expand(3, 4, 16), x.view(torch.int32)]
    assert {view.untyped_storage().data_ptr() for view in views} == {x.untyped_storage().data_ptr()}
    assert device.read().allocated_bytes == rows.nbytes


def test_a_tensor_without_elements_takes_nothing(device: SimulatedCard):
    x = torch.empty(0, 16, device=device.torch_device)
    assert (x @ x.t()).size() == torch.Size([0, 0])
    assert x.to(torch.bfloat16).view(-1).view(torch.float32).numel() == 0
    assert torch.cat((x, rows.to(x.device))).size() == rows.size()
    assert device.read().allocated_bytes == 0


CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 3:7],
    "every other": lambda x: x[::2, ::3],
    "expanded": lambda x: x[:1].expand(4, 16),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))
def test_copies_both_ways_keep_values_and_are_counted_by_the_bytes_that_cross(
    device: SimulatedCard, cut
):
    there = cut(rows).to(device.torch_device)
    back = cut(there).cpu() if cut is CUTS["whole"] else there.cpu()
    assert torch.equal(back, cut(rows))
    nbytes = cut(rows).numel() * 4
    assert device.transfers == Transfers(nbytes, 1, nbytes, 1)


@pytest.mark.parametrize("cut", CUTS.values(), ids=list(CUTS))
def test_a_view_of_the_card_is_copied_to_the_host_and_written_from_there(
    device: SimulatedCard, cut
):
    x = rows.to(device.torch_device)
    assert torch.equal(cut(x).cpu(), cut(rows))
    if cut is not CUTS["expanded"]:
        expected = rows.clone()
        cut(expected).copy_(cut(rows) * 2)
        cut(x).copy_(cut(rows) * 2)
        assert torch.equal(x.cpu(), expected)


def test_a_copy_that_converts_sends_what_arrives(device: SimulatedCard):
    there = rows.to(device.torch_device, torch.bfloat16)
    assert torch.equal(there.cpu(), rows.to(torch.bfloat16))
    assert device.transfers == Transfers(rows.numel() * 2, 1, rows.numel() * 2, 1)


def test_a_copy_on_the_card_crosses_nothing(device: SimulatedCard):
    there = rows.to(device.torch_device)
    torch.empty_like(there).copy_(there)
    assert device.transfers == Transfers(rows.nbytes, 1)


def test_reading_one_value_is_a_copy_to_the_host(device: SimulatedCard):
    there = rows.to(device.torch_device)
    assert there[0, 0].item() == rows[0, 0].item()
    assert device.transfers == Transfers(rows.nbytes, 1, 4, 1)


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda there, here: there + here,
    "add the other way": lambda there, here: here + there,
    "matmul": lambda there, here: there @ here.t(),
    "linear": F.linear,
    "cat": lambda there, here: torch.cat((there, here)),
    "in place": lambda there, here: there.add_(here),
    "embedding": lambda there, here: F.embedding(torch.tensor([1]), there),
    "out": lambda there, here: torch.add(there, there, out=here),
}


@pytest.mark.parametrize("function", MIXED.values(), ids=list(MIXED))
def test_mixing_devices_raises_as_on_cuda(device: SimulatedCard, function):
    there = rows.to(device.torch_device)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        function(there, rows.clone())


def test_scalars_from_the_host_may_be_mixed_in(device: SimulatedCard):
    assert_same_on_both(device, lambda x: x * torch.tensor(2.0) + torch.tensor(1), rows)


def test_random_numbers_are_the_cpus(device: SimulatedCard):
    torch.manual_seed(3)
    expected = torch.randn(4)
    torch.manual_seed(3)
    assert_same(torch.randn(4, device=device.torch_device), expected)


def test_autocast_that_is_off_changes_nothing(device: SimulatedCard):
    with torch.autocast("simgpu", enabled=False):
        assert_same_on_both(device, lambda x: x @ x.t(), rows)


def test_a_module_on_the_card_is_copied_deeply_with_its_ties(device: SimulatedCard):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device.torch_device)
    module[1].weight = module[0].weight
    twin = copy.deepcopy(module)
    twin[0].weight.zero_()
    assert twin[1].weight is twin[0].weight
    assert torch.equal(twin[1].weight.cpu(), torch.zeros(4, 4))
    assert module[0].weight.cpu().abs().sum() > 0
    assert device.read().allocated_bytes == 2 * (16 + 4 + 4) * 4


def test_a_parameters_data_goes_to_the_card_and_back(device: SimulatedCard):
    layer = nn.Linear(16, 4, bias=False)
    parameter, host = layer.weight, layer.weight.data
    parameter.data = host.to(device.torch_device)
    assert layer.weight is parameter
    assert_same(layer(rows.to(device.torch_device)), F.linear(rows, host))
    parameter.data = host
    assert parameter.data_ptr() == host.data_ptr()


def test_a_tensor_can_be_saved_and_shown(device: SimulatedCard, tmp_path):
    there = rows.to(device.torch_device)
    torch.save(there, tmp_path / "rows")
    assert "device='simgpu:0'" in repr(there)
    assert there.tolist() == rows.tolist()
