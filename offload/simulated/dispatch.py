"""Running an operation: on CPU aliases of the card's bytes, or by its shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import VirtualDataError
from ..simulated import attention
from .storage import (
    DEVICE_TYPE,
    alias,
    as_dtype,
    as_strided,
    buffer_of,
    card,
    contiguous_strides,
    is_virtual,
    mark_virtual,
    new_storage,
    on_card,
    over_storage,
    pointer,
    span,
    watch,
)
from .work import Geometry, Traits, geometry, map_nested, tensors_in, traits_of

_aten = torch.ops.aten


def is_defined(tensor: torch.Tensor) -> bool:
    """Whether `tensor`, on the card or the host, has values and not only a shape."""
    return not _undefined(tensor)


def _undefined(tensor: torch.Tensor) -> bool:
    return buffer_of(tensor).virtual if on_card(tensor) else is_virtual(tensor)


def _empty(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    data: torch.Tensor | None = None,
) -> torch.Tensor:
    nbytes = span(size, stride) * dtype.itemsize
    flat = new_storage(nbytes, card().allocate(nbytes), data)
    if nbytes == 0:
        flat = as_strided(flat, (0,), (1,), 0)
    return as_strided(as_dtype(flat, dtype), size, stride, 0)


def _adopt(result: torch.Tensor) -> torch.Tensor:
    """A kernel's result, computed on the host, as a tensor on the card."""
    storage = result.untyped_storage()
    if result.numel() and storage.nbytes() == result.numel() * result.element_size():
        data = torch.empty(0, dtype=torch.uint8).set_(storage)
        return _empty(result.size(), result.stride(), result.dtype, data)
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(result)
    stride = result.stride() if dense else contiguous_strides(result.size())
    tensor = _empty(result.size(), stride, result.dtype)
    if result.numel():
        alias(tensor).copy_(result)
    return tensor


# Indices may come from the host, as on CUDA.
_MIXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


def dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    watcher = watch()
    if watcher is None:
        return _run(op, args, kwargs)
    result = _run(op, args, kwargs)
    watcher.ran(op, args, kwargs, result)
    return result


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = op._schema.name
    special = SPECIAL.get(name)
    if special is not None:
        return special(op, *args, **kwargs)
    inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
    traits = traits_of(op)
    if traits.is_view:
        return _view(op, args, kwargs)
    if name not in _MIXED:
        for tensor in inputs:
            if tensor.dim() > 0 and tensor.numel() > 0 and not on_card(tensor):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {DEVICE_TYPE}:0 and {tensor.device}! (when calling {name})"
                )
    if _skips(inputs):
        return _propagate(op, traits, args, kwargs)
    return _compute(op, args, kwargs)


def _skips(inputs: Sequence[torch.Tensor]) -> bool:
    limit = card().virtual_above
    return any(
        _undefined(tensor)
        or (limit is not None and tensor.numel() > limit and tensor.is_floating_point())
        for tensor in inputs
    )


def _compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_host(value: Any) -> Any:
        if on_card(value):
            given.append((value, alias(value)))
            return given[-1][1]
        if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            return torch.device("cpu")
        return value

    host_args = map_nested(to_host, args)
    host_kwargs = {key: map_nested(to_host, value) for key, value in kwargs.items()}
    out = op(*host_args, **host_kwargs)
    for tensor, host in given:
        if tensor.size() != host.size():  # out= variants resize an empty output
            tensor.data = _adopt(host.clone())

    def to_card(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for tensor, host in given:
            if value is host:
                return tensor
            if value.numel() and value.untyped_storage().data_ptr() == pointer(tensor):
                return over_storage(
                    tensor, value.dtype, value.size(), value.stride(), int(value.storage_offset())
                )
        return _adopt(value)

    return map_nested(to_card, out)


def _view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    offset = base.storage_offset() * base.element_size()

    def over_base(view: Geometry) -> torch.Tensor:
        start = offset // view.dtype.itemsize + view.offset
        if view.dtype == base.dtype:
            return as_strided(base, view.size, view.stride, start)
        return over_storage(base, view.dtype, view.size, view.stride, start)

    return map_nested(over_base, geometry(op, args, kwargs))


def _propagate(op: Any, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = [args[i] for i in traits.writes if i < len(args)]
    written += [kwargs[name] for name in traits.writes_by_name if name in kwargs]
    if traits.writes:
        if traits.returns and any(tensor.numel() == 0 for tensor in tensors_in(written)):
            made = geometry(op, args, kwargs)
            for tensor, result in zip(written, made if traits.returns > 1 else [made], strict=True):
                if tensor.size() != result.size:  # out= variants resize an empty output
                    tensor.data = _empty(result.size, result.stride, result.dtype)
        for tensor in tensors_in(written):
            if on_card(tensor):
                buffer_of(tensor).virtual = True
        if traits.returns == 0:
            return None
        return written[0] if traits.returns == 1 else tuple(written)

    def allocate(result: Any) -> Any:
        if not isinstance(result, Geometry):
            return result
        tensor = _empty(result.size, result.stride, result.dtype)
        buffer_of(tensor).virtual = True
        return tensor

    return map_nested(allocate, geometry(op, args, kwargs))


def _empty_memory_format(
    op: Any,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> torch.Tensor:
    stride: Sequence[int] = contiguous_strides(size)
    if memory_format in (torch.channels_last, torch.channels_last_3d):
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return _empty(size, stride, dtype or torch.get_default_dtype())


def _empty_strided(
    op: Any,
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> torch.Tensor:
    return _empty(size, stride, dtype or torch.get_default_dtype())


def _copy_from(
    op: Any, source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    slot, nbytes = card(), target.numel() * target.element_size()
    if on_card(target) and not on_card(source):
        slot.cross_bus(nbytes, 0)
    elif on_card(source) and not on_card(target):
        slot.cross_bus(0, nbytes)
    if _undefined(source) or (on_card(target) and _skips((target,)) and _skips((source,))):
        if on_card(target):
            buffer_of(target).virtual = True
        else:
            mark_virtual(target)
        return target
    if on_card(target) and nbytes == target.untyped_storage().nbytes():
        buffer_of(target).virtual = False
    host = alias(target) if on_card(target) else target
    host.copy_(alias(source) if on_card(source) else source)
    return target


def _copy(
    op: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    return _copy_from(op, source, target, non_blocking)


def _as_strided(
    op: Any,
    tensor: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    offset = int(tensor.storage_offset()) if storage_offset is None else storage_offset
    return as_strided(tensor, size, stride, offset)


def _resize(op: Any, tensor: torch.Tensor, size: Sequence[int], **_: Any) -> torch.Tensor:
    if list(tensor.size()) == list(size):
        return tensor
    stride, start = contiguous_strides(size), int(tensor.storage_offset())
    have_bytes = tensor.untyped_storage().nbytes() if tensor.numel() else 0
    if (start + span(size, stride)) * tensor.element_size() <= have_bytes:
        tensor.data = as_strided(tensor, size, stride, start)
        return tensor
    grown = _empty(size, stride, tensor.dtype)
    if tensor.numel():  # what is there stays, in the order of the storage
        old, new = buffer_of(tensor), buffer_of(grown)
        kept = old.data[start * tensor.element_size() :]
        new.virtual = old.virtual
        if not old.virtual:
            new.data[: kept.numel()].copy_(kept)
    tensor.data = grown
    return tensor


def _set(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def _convolution(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(_aten.convolution.default, args, kwargs)


def _local_scalar(op: Any, tensor: torch.Tensor) -> Any:
    card().cross_bus(0, tensor.element_size())
    if _undefined(tensor):
        raise VirtualDataError(
            f"the value of a {tensor.dtype} tensor that has only a shape was asked for",
            hint="the pipeline branches on computed values here; run it with real data",
        )
    return op(alias(tensor))


def _record_stream(op: Any, tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Nothing to defer: the simulated card has finished a kernel when it returns."""
    watcher = watch()
    if watcher is not None:
        watcher.record_stream(tensor, stream.stream_id)


def _fused_attention(op: Any, *args: Any, **kwargs: Any) -> Any:
    call = attention.FusedCall.of(op, args, kwargs)
    out = as_strided(
        _empty(call.out_size, contiguous_strides(call.out_size), call.query.dtype),
        *call.transposed(),
        0,
    )
    logsumexp = _empty(call.lse_size, contiguous_strides(call.lse_size), torch.float32)
    inputs = [call.query, call.key, call.value, *([] if call.bias is None else [call.bias])]
    if _skips(inputs):
        buffer_of(out).virtual = True
    else:
        alias(out).copy_(call.on_host(alias))
    return call.results(out, logsumexp)


SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::_copy_from": _copy_from,
    "aten::_copy_from_and_resize": _copy_from,
    "aten::_has_compatible_shallow_copy_type": lambda op, to, source: to.layout == source.layout,
    "aten::_local_scalar_dense": _local_scalar,
    "aten::_scaled_dot_product_efficient_attention": _fused_attention,
    "aten::_scaled_dot_product_flash_attention": _fused_attention,
    "aten::as_strided": _as_strided,
    "aten::convolution_overrideable": _convolution,
    "aten::copy_": _copy,
    "aten::empty": _empty_memory_format,
    "aten::empty_strided": _empty_strided,
    "aten::record_stream": _record_stream,
    "aten::resize_": _resize,
    "aten::set_": _set,
}
