"""What an operation makes, without making it: sizes, strides and dtypes from its meta kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ..errors import VirtualDataError
from .storage import DEVICE_TYPE


class Traits(NamedTuple):
    """Which arguments an operation writes, and whether its results are views."""

    writes: tuple[int, ...]
    writes_by_name: tuple[str, ...]
    is_view: bool
    returns: int


@functools.cache
def traits_of(op: Any) -> Traits:
    schema = op._schema
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    aliases = any(value.alias_info is not None for value in schema.returns)
    return Traits(
        tuple(position for position, _ in written),
        tuple(name for _, name in written),
        (aliases and not written) or schema.name == "aten::_unsafe_view",
        len(schema.returns),
    )


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of each value in nested lists and tuples; a `Geometry` is a value."""
    if isinstance(value, list | tuple) and not isinstance(value, Geometry):
        return type(value)(map_nested(function, item) for item in value)
    return function(value)


class Geometry(NamedTuple):
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


_shapes: dict[Any, Any] = {}
_SHAPES_KEPT = 50_000


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.size(), value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple(map(_signature, value))
    return (type(value), value)


def geometry(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results' geometry, from the operation's meta kernel. Layers repeat, so it is kept."""
    key = (op, _signature(args), tuple((name, _signature(v)) for name, v in kwargs.items()))
    try:
        return _shapes[key]
    except KeyError:
        pass

    def to_meta(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(
                value.size(), value.stride(), dtype=value.dtype, device="meta"
            )
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            return torch.device("meta")
        return value

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Geometry(value.size(), value.stride(), int(value.storage_offset()), value.dtype)
        return value

    try:
        out = op(
            *map_nested(to_meta, args),
            **{name: map_nested(to_meta, v) for name, v in kwargs.items()},
        )
    except (NotImplementedError, DataDependentOutputException, DynamicOutputShapeException) as no:
        raise VirtualDataError(
            f"{op._schema.name} needs the values of a tensor that has only a shape",
            hint="run this pipeline with real data, or at a scale where that tensor is small",
        ) from no
    if op is torch.ops.aten.convolution.default:
        out = out.contiguous(memory_format=_convolved(*args[:2]))
    if len(_shapes) >= _SHAPES_KEPT:
        _shapes.clear()
    _shapes[key] = map_nested(describe, out)
    return _shapes[key]


def _convolved(image: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """As cuDNN and the CPU do it: channels last if either is. The meta kernel doesn't tell."""
    formats = [torch._prims_common.suggest_memory_format(t) for t in (image, weight)]
    return next((f for f in formats if f != torch.contiguous_format), torch.contiguous_format)
