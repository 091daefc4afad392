"""What an operation touches: the storages it reads and writes, and what it moves over the bus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .geometry import traits_of
from .storage import Buffer, buffer_of, on_card


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
