"""The torch device `simgpu:0`: one slot that a simulated card is put into.

Operations run on CPU aliases of the device's bytes (real data), or only pass shapes on (virtual
data). Either way every storage they make is charged to the card in the slot. Registering the
device can't be undone, and a process has one: it happens once, when the first card is put in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ..errors import DeviceError, VirtualDataError
from . import attention
from .storage import (
    DEVICE_TYPE,
    alias,
    as_dtype,
    as_strided,
    buffer_of,
    contiguous_strides,
    new_storage,
    on_card,
    over_storage,
    pointer,
    span,
)
from .virtual import is_virtual, mark_virtual

_aten = torch.ops.aten


class Memory(Protocol):
    """What the backend asks of the card in the slot."""

    virtual_above: int | None
    """Float tensors of more elements than this aren't computed. None computes all."""

    def allocate(self, nbytes: int) -> Callable[[], None]:
        """Charge `nbytes`; the result gives them back. Raises torch.OutOfMemoryError."""

    def count_copy(self, h2d_bytes: int, d2h_bytes: int) -> None: ...

    def module(self) -> dict[str, Any]:
        """Functions that `torch.simgpu` has while this card is in the slot."""


_slot: Memory | None = None


def put_in(card: Memory | None) -> None:
    """Put `card` into the slot, or empty it with None."""
    global _slot
    if card is not None:
        _register()
    _slot = card


def card_in_slot() -> Memory | None:
    return _slot


def _card() -> Memory:
    if _slot is None:
        raise DeviceError(
            f"an operation ran on {DEVICE_TYPE}:0 and no card is in it",
            hint="keep tensors of a simulated card inside its `with` block",
        )
    return _slot


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
    flat = new_storage(nbytes, _card().allocate(nbytes), data)
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


class _Traits(NamedTuple):
    writes: tuple[int, ...]
    writes_by_name: tuple[str, ...]
    is_view: bool
    returns: int


@functools.cache
def _traits(op: Any) -> _Traits:
    schema = op._schema
    written = [
        (position, argument.name)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    aliases = any(value.alias_info is not None for value in schema.returns)
    return _Traits(
        tuple(position for position, _ in written),
        tuple(name for _, name in written),
        (aliases and not written) or schema.name == "aten::_unsafe_view",
        len(schema.returns),
    )


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_map(function, item) for item in value)
    return function(value)


# Indices may come from the host, as on CUDA.
_MIXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


def _dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name
    special = _SPECIAL.get(name)
    if special is not None:
        return special(op, *args, **kwargs)
    inputs = [*_tensors(args), *_tensors(kwargs.values())]
    traits = _traits(op)
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
    limit = _card().virtual_above
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

    host_args = _map(to_host, args)
    host_kwargs = {key: _map(to_host, value) for key, value in kwargs.items()}
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
                    tensor, value.dtype, value.size(), value.stride(), value.storage_offset()
                )
        return _adopt(value)

    return _map(to_card, out)


class _Geometry(NamedTuple):
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


def _geometry(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            return _Geometry(value.size(), value.stride(), value.storage_offset(), value.dtype)
        return value

    try:
        out = op(*_map(to_meta, args), **{name: _map(to_meta, v) for name, v in kwargs.items()})
    except (NotImplementedError, DataDependentOutputException, DynamicOutputShapeException) as no:
        raise VirtualDataError(
            f"{op._schema.name} needs the values of a tensor that has only a shape",
            hint="run this pipeline with real data, or at a scale where that tensor is small",
        ) from no
    if len(_shapes) >= _SHAPES_KEPT:
        _shapes.clear()
    _shapes[key] = _map_geometry(describe, out)
    return _shapes[key]


def _map_geometry(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple) and not isinstance(value, _Geometry):
        return type(value)(_map_geometry(function, item) for item in value)
    return function(value)


def _view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    offset = base.storage_offset() * base.element_size()

    def over_base(view: _Geometry) -> torch.Tensor:
        start = offset // view.dtype.itemsize + view.offset
        if view.dtype == base.dtype:
            return as_strided(base, view.size, view.stride, start)
        return over_storage(base, view.dtype, view.size, view.stride, start)

    return _map_geometry(over_base, _geometry(op, args, kwargs))


def _propagate(op: Any, traits: _Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = [args[i] for i in traits.writes if i < len(args)]
    written += [kwargs[name] for name in traits.writes_by_name if name in kwargs]
    if traits.writes:
        for tensor in _tensors(written):
            if on_card(tensor):
                buffer_of(tensor).virtual = True
        if traits.returns == 0:
            return None
        return written[0] if traits.returns == 1 else tuple(written)

    def allocate(result: Any) -> Any:
        if not isinstance(result, _Geometry):
            return result
        tensor = _empty(result.size, result.stride, result.dtype)
        buffer_of(tensor).virtual = True
        return tensor

    return _map_geometry(allocate, _geometry(op, args, kwargs))


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
    card, nbytes = _card(), target.numel() * target.element_size()
    if on_card(target) and not on_card(source):
        card.count_copy(nbytes, 0)
    elif on_card(source) and not on_card(target):
        card.count_copy(0, nbytes)
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
    offset = tensor.storage_offset() if storage_offset is None else storage_offset
    return as_strided(tensor, size, stride, offset)


def _resize(op: Any, tensor: torch.Tensor, size: Sequence[int], **_: Any) -> torch.Tensor:
    if list(tensor.size()) != list(size):
        tensor.data = _empty(size, contiguous_strides(size), tensor.dtype)
    return tensor


def _set(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def _convolution(op: Any, *args: Any, **kwargs: Any) -> Any:
    return _dispatch(_aten.convolution.default, *args, **kwargs)


def _local_scalar(op: Any, tensor: torch.Tensor) -> Any:
    _card().count_copy(0, tensor.element_size())
    if _undefined(tensor):
        raise VirtualDataError(
            f"the value of a {tensor.dtype} tensor that has only a shape was asked for",
            hint="the pipeline branches on computed values here; run it with real data",
        )
    return op(alias(tensor))


def _record_stream(op: Any, tensor: torch.Tensor, stream: Any) -> None:
    """Nothing to defer: the simulated card has finished a kernel when it returns."""


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


_SPECIAL: dict[str, Callable[..., Any]] = {
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


class _Module:
    """`torch.simgpu`."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Random numbers are drawn by the CPU kernels, from the CPU generator."""

    manual_seed = manual_seed_all

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def __getattr__(self, name: str) -> Any:
        functions = _slot.module() if _slot is not None else {}
        if name not in functions:
            raise AttributeError(f"torch.{DEVICE_TYPE} has no attribute {name!r}")
        return functions[name]


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Register the device with torch. The libraries returned keep the kernels registered."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    try:
        _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Module())
    except RuntimeError as taken:
        raise DeviceError(
            "torch's one slot for an external device is taken, so no card can be simulated here",
            hint="simulate in a process that imports no other out-of-tree torch backend",
        ) from taken
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_dispatch, "PrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("scaled_dot_product_attention", attention.dispatch, "PrivateUse1")
    for key in ("CPU", "PrivateUse1"):  # `parameter.data = …` across the two devices
        kernels.impl("_has_compatible_shallow_copy_type", _same_layout, key)
    kernels.impl(
        "convolution_overrideable",
        functools.partial(_convolution, _aten.convolution_overrideable.default),
        "PrivateUse1",
    )
    for name in _preempted():
        op = getattr(getattr(_aten, name), "default", None)
        if op is not None:
            kernels.impl(name, functools.partial(_dispatch, op), "PrivateUse1")
    _patch_deepcopy()
    return fallback, kernels


def _same_layout(tensor: torch.Tensor, source: torch.Tensor) -> bool:
    return tensor.layout == source.layout


def _preempted() -> Iterator[str]:
    """Operations whose composite kernel would come before the fallback, and isn't CUDA's choice.

    Group norm through its composite differs from the fused kernel in the last bit.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, base = name.partition("::")
        if namespace != "aten" or "." in base or name in _SPECIAL:
            continue
        if has(name, "CPU") and has(name, "CompositeExplicitAutograd"):
            yield base


def _patch_deepcopy() -> None:
    """`UntypedStorage.clone` needs a C++ allocator of the device, which this one doesn't have."""
    original = torch.UntypedStorage.__deepcopy__

    def deepcopy(storage: torch.UntypedStorage, memo: dict[int, Any]) -> torch.UntypedStorage:
        if storage.device.type != DEVICE_TYPE:
            return original(storage, memo)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole.clone().untyped_storage()

    torch.UntypedStorage.__deepcopy__ = deepcopy  # type: ignore[method-assign]
