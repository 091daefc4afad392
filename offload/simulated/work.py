"""What an operation makes and touches, told without making it: sizes, strides and dtypes from its
meta kernel, the storages that it reads and writes, what it moves over the bus, and on a card with a
clock how long that takes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ..errors import InputError, VirtualDataError
from .storage import DEVICE_TYPE, Buffer, buffer_of, on_card


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


@dataclass(frozen=True, slots=True)
class BusCopy:
    """A copy between the card and the tensor `host`. `blocking`: the host waits for it."""

    host: torch.Tensor
    nbytes: int
    to_card: bool
    blocking: bool


@dataclass(frozen=True, slots=True)
class Work:
    """One operation. `nbytes` is what its tensors on the card span; `joins`: the host waits."""

    name: str
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    nbytes: int
    joins: bool
    copy: BusCopy | None = None


_TOUCHES_NOTHING = {
    "aten::_has_compatible_shallow_copy_type",
    "aten::empty",
    "aten::empty_strided",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
}
_COPIES = {"aten::_copy_from", "aten::_copy_from_and_resize", "aten::copy_"}

# The size or the value of their result is known to the host when they return.
_JOINS = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::equal",
    "aten::masked_select",
    "aten::nonzero",
}


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def describe(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Work | None:
    """What `op` did, now that it has run; None for one that touches no bytes."""
    name = op._schema.name
    if name in _TOUCHES_NOTHING:
        return None
    if name in _COPIES:
        return _describe_copy(name, *args, **kwargs)
    traits = traits_of(op)
    if traits.is_view:
        return None
    targets = [args[i] for i in traits.writes if i < len(args)]
    targets += [kwargs[key] for key in traits.writes_by_name if key in kwargs]
    written = _by_buffer([*tensors_in(targets), *tensors_in((result,))])
    read = _by_buffer(tensors_in((*args, *kwargs.values())))
    nbytes = sum((read | written).values())
    if name == "aten::_local_scalar_dense":
        scalar = args[0]
        nbytes = scalar.element_size()
    reads = tuple(buffer for buffer in read if buffer not in written)
    return Work(name, reads, tuple(written), nbytes, name in _JOINS)


def _by_buffer(tensors: Any) -> dict[Buffer, int]:
    """The bytes that tensors on the card reach in each storage, as far as one tensor goes."""
    found: dict[Buffer, int] = {}
    for tensor in tensors:
        if on_card(tensor) and tensor.numel():
            buffer = buffer_of(tensor)
            nbytes = tensor.numel() * tensor.element_size()
            found[buffer] = max(found.get(buffer, 0), nbytes)
    return found


def _describe_copy(
    name: str, first: torch.Tensor, second: torch.Tensor, non_blocking: bool = False
) -> Work:
    source, target = (second, first) if name == "aten::copy_" else (first, second)
    read, written = _by_buffer([source]), _by_buffer([target])
    nbytes = target.numel() * target.element_size()
    copy = None
    if not (on_card(source) and on_card(target)):
        to_card = on_card(target)
        copy = BusCopy(source if to_card else target, nbytes, to_card, not non_blocking)
    reads = tuple(buffer for buffer in read if buffer not in written)
    return Work(
        name,
        reads,
        tuple(written),
        sum((read | written).values()),
        copy is not None and copy.blocking,
        copy,
    )


@dataclass(frozen=True, slots=True)
class Clock:
    """How long work takes. All of it is assumed, none measured.

    A copy over the bus takes its bytes at the rate of its direction; one from or to pageable
    memory takes them at `pageable_bytes_per_s`, and the host waits for it. There is one copy engine
    for each direction. Any other operation takes `op_s`, and the bytes of its tensors at
    `bytes_per_s`, the rate of the card's own memory. The host takes `issue_s` to issue one.
    """

    h2d_bytes_per_s: float
    pageable_bytes_per_s: float
    op_s: float = 0.0
    bytes_per_s: float = float("inf")
    d2h_bytes_per_s: float | None = None
    """None: as the other direction."""
    issue_s: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_rate = field.name.endswith("bytes_per_s")
            if value is not None and not (value > 0 if is_rate else value >= 0):
                raise InputError(
                    f"{field.name} of a clock is {value}",
                    hint="a rate is above 0" if is_rate else "a time is 0 or more",
                )

    def rate(self, *, to_card: bool, pinned: bool) -> float:
        if not pinned:
            return self.pageable_bytes_per_s
        if to_card or self.d2h_bytes_per_s is None:
            return self.h2d_bytes_per_s
        return self.d2h_bytes_per_s


class Timeline:
    """How far each stream, each copy engine and the host have come, in seconds.

    `spill_factor`: how much longer an operation takes on memory that the card has spilled.
    """

    def __init__(self, clock: Clock, *, spill_factor: float = 1.0) -> None:
        self.clock = clock
        self.spill_factor = spill_factor
        self.host_s = 0.0
        self._streams_s: dict[int, float] = {}
        self._engines_s = {True: 0.0, False: 0.0}

    def now(self, stream: int) -> float:
        """When the work that `stream` has so far is done, or the host would issue more."""
        return max(self._streams_s.get(stream, 0.0), self.host_s)

    def wait(self, stream: int, until_s: float) -> None:
        self._streams_s[stream] = max(self.now(stream), until_s)

    def host_waits(self, until_s: float) -> None:
        self.host_s = max(self.host_s, until_s)

    def host_waits_for_all(self) -> None:
        self.host_s = max(self.host_s, *self._streams_s.values(), *self._engines_s.values())

    def run(self, work: Work, stream: int, *, pinned: bool) -> None:
        clock, copy = self.clock, work.copy
        self.host_s += clock.issue_s
        start_s = self.now(stream)
        if copy is None:
            duration_s = clock.op_s + work.nbytes / clock.bytes_per_s
        else:
            start_s = max(start_s, self._engines_s[copy.to_card])
            duration_s = copy.nbytes / clock.rate(to_card=copy.to_card, pinned=pinned)
        if any(getattr(each.charge, "spilled", False) for each in (*work.reads, *work.writes)):
            duration_s *= self.spill_factor
        end_s = self._streams_s[stream] = start_s + duration_s
        if copy is not None:
            self._engines_s[copy.to_card] = end_s
        if work.joins or (copy is not None and not pinned):
            self.host_s = end_s
