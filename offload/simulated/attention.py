"""Attention as a CUDA build would run it.

Without this, a device that isn't CUDA decomposes attention into matrix products, and a matrix of
sequence by sequence is charged that no CUDA kernel ever allocates: 24,645 MiB instead of 985 MiB
for the Qwen-Image denoiser at 1664 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F

_aten = torch.ops.aten

_FLASH_HEAD_DIM = 256
_MASK_ALIGNMENT = 16


class Kernel(Enum):
    FLASH = "flash"
    EFFICIENT = "efficient"
    MATH = "math"


def choose(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> Kernel:
    """The kernel for (batch, heads, sequence, head dim) inputs, in the priority of a CUDA build.

    Flash wants half precision, no mask and one head dim of at most 256; memory-efficient a head
    dim that fills 16-byte rows. cuDNN attention, first on some Hopper and Blackwell builds, needs
    no more memory than flash and isn't told apart.
    """
    if any(t.dim() != 4 or t.numel() == 0 for t in (query, key, value)):
        return Kernel.MATH
    half = query.dtype in (torch.float16, torch.bfloat16)
    head_dim = query.size(-1)
    if half and mask is None and head_dim <= _FLASH_HEAD_DIM and head_dim == value.size(-1):
        return Kernel.FLASH
    aligned = 8 if half else 4
    if query.dtype != torch.float64 and all(t.size(-1) % aligned == 0 for t in (query, value)):
        return Kernel.EFFICIENT
    return Kernel.MATH


def dispatch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on the card."""
    kernel = choose(query, key, value, attn_mask)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = _additive(attn_mask, query)
    if enable_gqa and kernel is not Kernel.FLASH and key.size(-3) != query.size(-3):
        groups = query.size(-3) // key.size(-3)
        key, value = (t.repeat_interleave(groups, -3) for t in (key, value))
    if kernel is Kernel.FLASH:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kernel is Kernel.EFFICIENT:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        out = _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, False, dropout_p, is_causal, scale=scale
        )
        return out[0]  # type: ignore[no-any-return]
    math = _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )
    return math[0]  # type: ignore[no-any-return]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    head_dim = query.size(-1)
    padding = -head_dim % 8
    if padding:
        query, key, value = (F.pad(t, (0, padding)) for t in (query, key, value))
        scale = head_dim**-0.5 if scale is None else scale
    out = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head_dim] if padding else out  # type: ignore[no-any-return]


def _additive(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The bias that the memory-efficient kernel reads: same extents as the mask, aligned rows, and
    expanded without copying."""
    width = mask.size(-1)
    if padding := -width % _MASK_ALIGNMENT:
        mask = F.pad(mask, (0, padding))[..., :width]
    return mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))


@dataclass(frozen=True, slots=True)
class FusedCall:
    """One call of a fused kernel: what it allocates, and how the host computes the same."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    bias: torch.Tensor | None
    is_causal: bool
    scale: float | None
    efficient: bool

    @classmethod
    def of(cls, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FusedCall:
        given = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        return cls(
            given["query"],
            given["key"],
            given["value"],
            given.get("attn_bias"),
            given.get("is_causal", False),
            given.get("scale"),
            "efficient" in op.name(),
        )

    @property
    def out_size(self) -> tuple[int, int, int, int]:
        """Kernels write (batch, sequence, heads, head dim)."""
        batch, heads, sequence, _ = self.query.shape
        return batch, sequence, heads, self.value.shape[-1]

    @property
    def lse_size(self) -> tuple[int, ...]:
        """The log-sum-exp of each row; the memory-efficient kernel writes it for training only."""
        batch, heads, sequence, _ = self.query.shape
        return (0,) if self.efficient else (batch, heads, sequence)

    def transposed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and stride of the output as callers see it: (batch, heads, sequence, head dim)."""
        batch, sequence, heads, dim = self.out_size
        return (batch, heads, sequence, dim), (sequence * heads * dim, dim, heads * dim, 1)

    def on_host(self, alias: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return F.scaled_dot_product_attention(
            alias(self.query),
            alias(self.key),
            alias(self.value),
            attn_mask=None if self.bias is None else alias(self.bias),
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.query.shape[1] != self.key.shape[1],
        )

    def results(self, out: torch.Tensor, logsumexp: torch.Tensor) -> tuple[Any, ...]:
        seed = torch.empty(0, dtype=torch.int64)
        if self.efficient:
            return out, logsumexp, seed, seed
        rows, columns = self.query.shape[2], self.key.shape[2]
        return out, logsumexp, None, None, rows, columns, seed, seed, seed
