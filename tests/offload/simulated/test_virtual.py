"""Virtual data: shapes, strides and bytes as with real data, and no values."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residency.offload.cards import find_card
from residency.offload.errors import VirtualDataError
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.storage import is_virtual, mark_virtual

LARGE = 1 << 17
"""Elements of a tensor that isn't computed."""


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    with SimulatedCard(find_card("RTX 4090"), allocator="exact", virtual=True) as device:
        yield device
        gc.collect()  # a caught error and its frame hold each other
        device.check_integrity()
        assert device.read().allocated_bytes == 0


def without_values(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    tensor = torch.empty(size, dtype=dtype)
    mark_virtual(tensor)
    return tensor


VALUES: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0, 0].item(),
    "branch": lambda x: bool((x > 0).all()),
    "list": lambda x: x.tolist(),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "repr": repr,
}


@pytest.mark.parametrize("ask", VALUES.values(), ids=list(VALUES))
def test_asking_for_a_value_that_is_not_there_raises_with_a_hint(device: SimulatedCard, ask):
    x = without_values(4, 4).to(device.torch_device)
    with pytest.raises(VirtualDataError) as caught:
        ask(x)
    assert "only a shape" in caught.value.message
    assert "real data" in str(caught.value.hint)


def test_what_is_made_of_virtual_data_is_virtual(device: SimulatedCard):
    x = without_values(4, 4).to(device.torch_device)
    y = torch.ones(4, 4, device=device.torch_device)
    assert not device.is_defined(x + y)
    assert not device.is_defined(y.add_(x))
    assert not device.is_defined(x.cpu())
    assert is_virtual(x.cpu())


def test_large_floats_are_virtual_small_ones_and_integers_are_not(device: SimulatedCard):
    at = device.torch_device
    assert not device.is_defined(torch.zeros(LARGE, device=at))
    assert not device.is_defined(torch.ones(LARGE).to(at))
    assert device.is_defined(torch.zeros(LARGE, device=at, dtype=torch.int64))
    assert torch.ones(8, device=at).add_(1).tolist() == [2.0] * 8


def test_overwriting_all_of_it_makes_a_tensor_defined_again(device: SimulatedCard):
    x = without_values(8).to(device.torch_device)
    x[:4].copy_(torch.ones(4))
    assert not device.is_defined(x)
    x.copy_(torch.ones(8))
    assert x.tolist() == [1.0] * 8


def test_a_mark_ends_with_its_storage():
    tensor = without_values(1000)
    pointer = tensor.data_ptr()
    del tensor
    others = [torch.empty(1000) for _ in range(50)]
    assert not any(map(is_virtual, others)), pointer


def test_views_of_a_virtual_tensor_are_virtual():
    assert is_virtual(without_values(4, 4)[1:].t())


def test_an_error_in_the_shapes_is_found_without_values(device: SimulatedCard):
    x = without_values(2, 3).to(device.torch_device)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        x @ x
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(2, 3)


def test_an_empty_out_takes_the_shape_of_the_result(device: SimulatedCard):
    x = without_values(2, 3).to(device.torch_device)
    out = torch.empty(0, device=device.torch_device)
    torch.mm(x, x.t(), out=out)
    assert out.size() == torch.Size([2, 2])
    assert device.read().allocated_bytes == x.nbytes + out.nbytes


GEOMETRIES: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(8, -1),
    "transposed": lambda x: x.t() + 1,
    "in place transposed": lambda x: x.t_(),
    "resized": lambda x: x.resize_(7, 3),
    "cat": lambda x: torch.cat((x, x), 1),
    "chunk": lambda x: x.chunk(3, 1)[1],
    "expand": lambda x: x[:1].expand(5, 256, 512),
    "channels last": lambda x: F.pad(
        x.view(1, 2, 256, 256).to(memory_format=torch.channels_last), (1, 1)
    ),
    "other dtype": lambda x: x.to(torch.bfloat16).view(torch.float16),
    "reduction": lambda x: x.sum(0, keepdim=True),
    "norm": lambda x: F.layer_norm(x, (512,)),
}


@pytest.mark.parametrize("function", GEOMETRIES.values(), ids=list(GEOMETRIES))
def test_results_have_the_shapes_and_strides_of_real_ones(device: SimulatedCard, function):
    expected = function(torch.zeros(256, 512))
    result = function(without_values(256, 512).to(device.torch_device))
    assert (result.size(), result.stride(), result.dtype) == (
        expected.size(),
        expected.stride(),
        expected.dtype,
    )
    assert not device.is_defined(result)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(4, 32, 3, padding=1)
        self.norm = nn.GroupNorm(8, 32)
        self.leave = nn.Conv2d(32, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        x = x + F.silu(self.norm(x))
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.leave(x.to(memory_format=torch.channels_last)).clamp(-1, 1)


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(128)
        self.qkv = nn.Linear(128, 3 * 128)
        self.out = nn.Linear(128, 128)
        self.mlp = nn.Sequential(
            nn.RMSNorm(128), nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, 32)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mlp(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "size"), [(ConvNet, (1, 4, 64, 64)), (TransformerBlock, (1, 1024, 128))]
)
def test_a_model_takes_the_same_bytes_with_virtual_data_as_with_real(make, size, dtype):
    def run(virtual: bool) -> tuple[object, ...]:
        with SimulatedCard(find_card("RTX 4090"), allocator="exact", virtual=virtual) as device:
            model = make().to(dtype).to(device.torch_device)
            x = torch.zeros(size, dtype=dtype).to(device.torch_device)
            out = model(x)
            reading = device.read()
            assert device.is_defined(out) == (not virtual)
            return (
                reading.peak_allocated_bytes,
                reading.allocated_bytes,
                device.faults.allocations,
                device.transfers,
                out.stride(),
            )

    assert run(virtual=True) == run(virtual=False)
