"""Which kernel a CUDA build would run, and what that kernel allocates."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from residency.offload.cards import find_card
from residency.offload.simulated.attention import Kernel, choose
from residency.offload.simulated.card import SimulatedCard

HALF, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def device() -> Iterator[SimulatedCard]:
    with SimulatedCard(find_card("RTX 4090"), allocator="exact") as device:
        yield device
        device.check_integrity()
        assert device.read().allocated_bytes == 0


def tensor(*size: int, dtype: torch.dtype = FULL) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "mask", "kernel"),
    [
        (BF16, 64, 64, None, Kernel.FLASH),
        (HALF, 256, 256, None, Kernel.FLASH),
        (BF16, 40, 40, None, Kernel.FLASH),
        (BF16, 63, 63, None, Kernel.FLASH),  # padded to 64
        (BF16, 264, 264, None, Kernel.EFFICIENT),
        (BF16, 512, 512, None, Kernel.EFFICIENT),
        (BF16, 257, 257, None, Kernel.MATH),
        (BF16, 64, 128, None, Kernel.EFFICIENT),
        (BF16, 64, 64, torch.bool, Kernel.EFFICIENT),
        (BF16, 64, 64, BF16, Kernel.EFFICIENT),
        (BF16, 63, 63, BF16, Kernel.MATH),
        (FULL, 64, 64, None, Kernel.EFFICIENT),
        (FULL, 4, 4, torch.bool, Kernel.EFFICIENT),
        (FULL, 6, 6, None, Kernel.MATH),
        (FULL, 8, 6, None, Kernel.MATH),
        (DOUBLE, 64, 64, None, Kernel.MATH),
    ],
)
def test_the_inputs_choose_the_kernel(dtype, head_dim, value_dim, mask, kernel):
    query, value = torch.empty(1, 2, 5, head_dim), torch.empty(1, 2, 5, value_dim)
    given = None if mask is None else torch.zeros(5, 5, dtype=mask)
    query, value = query.to(dtype), value.to(dtype)
    assert choose(query, query, value, given) is kernel


@pytest.mark.parametrize("size", [(2, 5, 64), (1, 2, 0, 64)])
def test_inputs_that_are_not_four_dimensional_or_empty_go_through_math(size):
    query = torch.empty(size, dtype=BF16)
    assert choose(query, query, query, None) is Kernel.MATH


def peak_above(device: SimulatedCard, *inputs: Tensor | None, **options: object) -> int:
    before = device.read().allocated_bytes
    device.reset_peaks()
    F.scaled_dot_product_attention(*inputs, **options)  # type: ignore[arg-type]
    return device.read().peak_allocated_bytes - before


LENGTH = 4096
HEADS, DIM = 2, 64


def virtual_inputs(device: SimulatedCard, dtype: torch.dtype, head_dim: int = DIM) -> Tensor:
    return torch.empty(1, HEADS, LENGTH, head_dim, dtype=dtype, device=device.torch_device)


@pytest.fixture
def virtual() -> Iterator[SimulatedCard]:
    with SimulatedCard(find_card("RTX 4090"), allocator="exact", virtual=True) as device:
        yield device


def test_flash_takes_its_output_and_a_log_sum_exp_a_row(virtual: SimulatedCard):
    x = virtual_inputs(virtual, BF16)
    output_bytes = 1 * HEADS * LENGTH * DIM * 2
    logsumexp_bytes = 1 * HEADS * LENGTH * 4
    matrix_bytes = 1 * HEADS * LENGTH * LENGTH * 2
    taken = peak_above(virtual, x, x, x)
    assert taken == output_bytes + logsumexp_bytes == 1_081_344
    assert taken < matrix_bytes / 60


def test_memory_efficient_takes_its_output_and_no_log_sum_exp(virtual: SimulatedCard):
    x = virtual_inputs(virtual, FULL)
    assert peak_above(virtual, x, x, x) == HEADS * LENGTH * DIM * 4


def test_memory_efficient_takes_a_bias_for_a_bool_mask_of_the_masks_extent(virtual: SimulatedCard):
    x = virtual_inputs(virtual, BF16)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=virtual.torch_device)
    bias_bytes = LENGTH * LENGTH * 2
    output_bytes = HEADS * LENGTH * DIM * 2
    assert peak_above(virtual, x, x, x, mask) == bias_bytes + output_bytes


def test_a_mask_whose_rows_are_not_aligned_is_padded_to_16(device: SimulatedCard):
    x = tensor(1, 2, 5, 8).to(device.torch_device)
    mask = torch.zeros(1, 1, 5, 5, device=device.torch_device)
    padded_bytes = 5 * 16 * 4
    assert peak_above(device, x, x, x, mask) == padded_bytes + 2 * 5 * 8 * 4


def test_math_takes_a_matrix_of_sequence_by_sequence(virtual: SimulatedCard):
    x = virtual_inputs(virtual, BF16, head_dim=257)
    assert peak_above(virtual, x, x, x) > HEADS * LENGTH * LENGTH * 2


def test_flash_pads_a_head_dim_that_is_no_multiple_of_eight(virtual: SimulatedCard):
    x = virtual_inputs(virtual, BF16, head_dim=63)
    row_bytes = HEADS * LENGTH * 2
    padded_inputs_and_output, logsumexp = (3 + 1) * 64 * row_bytes, HEADS * LENGTH * 4
    assert peak_above(virtual, x, x, x) == padded_inputs_and_output + logsumexp


CALLS = {
    "flash": ({"dtype": BF16}, {}),
    "flash, causal": ({"dtype": BF16}, {"is_causal": True}),
    "flash, scaled": ({"dtype": HALF}, {"scale": 0.3}),
    "flash, padded": ({"dtype": BF16, "head_dim": 7}, {}),
    "flash, grouped queries": ({"dtype": BF16, "groups": 2}, {"enable_gqa": True}),
    "efficient": ({}, {}),
    "efficient, causal": ({}, {"is_causal": True}),
    "efficient, grouped queries": ({"groups": 2}, {"enable_gqa": True}),
    "math": ({"head_dim": 6}, {}),
    "math, grouped queries": ({"head_dim": 6, "groups": 2}, {"enable_gqa": True}),
}


@pytest.mark.parametrize(("inputs", "options"), CALLS.values(), ids=list(CALLS))
def test_every_kernel_gives_what_the_cpu_gives(device: SimulatedCard, inputs, options):
    dtype, head_dim = inputs.get("dtype", FULL), inputs.get("head_dim", 8)
    heads = 4 // inputs.get("groups", 1)
    query = tensor(2, 4, 5, head_dim, dtype=dtype)
    key, value = (tensor(2, heads, n, head_dim, dtype=dtype)[:, :, :7] for n in (7, 8))
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    there = [t.to(device.torch_device) for t in (query, key, value)]
    result = F.scaled_dot_product_attention(*there, **options).cpu()
    # Padding a row, and not fusing, change the order of sums.
    tolerance = 0.0 if head_dim == 8 else 0.01 if dtype == BF16 else 1e-5
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


MASKS = {
    "bool": torch.ones(2, 1, 5, 7).tril(2).bool(),
    "bool for every row": torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool().expand(2, 1, 1, 7),
    "bool in two dimensions": torch.ones(5, 7).tril(2).bool(),
    "additive": tensor(2, 4, 5, 7),
}


@pytest.mark.parametrize("head_dim", [8, 6], ids=["efficient", "math"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_a_mask_masks_as_on_the_cpu(device: SimulatedCard, mask: Tensor, head_dim: int):
    query, key = tensor(2, 4, 5, head_dim), tensor(2, 4, 7, head_dim)
    expected = F.scaled_dot_product_attention(query, key, key, mask)
    there = [t.to(device.torch_device) for t in (query, key, key, mask)]
    result = F.scaled_dot_product_attention(*there)
    assert torch.allclose(result.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_the_output_has_the_strides_that_kernels_write(virtual: SimulatedCard):
    x = virtual_inputs(virtual, BF16)
    out = F.scaled_dot_product_attention(x, x, x)
    assert out.size() == x.size()
    assert out.transpose(1, 2).is_contiguous()
    assert not virtual.is_defined(out)
