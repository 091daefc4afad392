"""Weights for models that are built from a config alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def virtual_weights(
    construct: Callable[[], torch.nn.Module], dtype: torch.dtype
) -> torch.nn.Module:
    """The module with parameters of the right shapes, whose memory is reserved and not touched.

    Parameters are marked virtual; buffers, and what else the constructor computes, are real.
    """
    import torch
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    from ..offload.simulated.virtual import mark_virtual

    with _constructing(dtype), init_empty_weights(include_buffers=False):
        module = construct()
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(owner, name, torch.nn.Parameter(empty, requires_grad=False))
    # on the way through the meta device each owner of a tied weight got its own
    tie_weights = getattr(module, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    for parameter in module.parameters():
        mark_virtual(parameter)
    return module.eval().requires_grad_(False)


def seeded_weights(
    construct: Callable[[], torch.nn.Module], dtype: torch.dtype, seed: int
) -> torch.nn.Module:
    """The module with weights that depend on the seed alone, none of them zero for good.

    Matrices and kernels keep the variance of what they multiply (1/fan-in); vectors, which are
    scales and biases, stay near what the constructor made them.
    """
    import torch

    with _constructing(dtype):
        module = construct()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, math.prod(parameter.shape[1:]) ** -0.5, generator=generator)
            else:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise, alpha=0.05)
    return module.eval().requires_grad_(False)


@contextmanager
def _constructing(dtype: torch.dtype) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)
