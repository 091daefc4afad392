"""Virtual data: host tensors that have a shape and a storage, and no values.

Their address space is reserved and never touched, so a pipeline of 54 GiB costs next to nothing.
The simulated card propagates shapes through any operation that reads one.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# data pointer -> the finalizer of the storage that stands there; address space is reused, and a
# finalizer forgets its own storage only
_marks: dict[int, weakref.finalize[..., torch.UntypedStorage]] = {}


def mark_virtual(tensor: torch.Tensor) -> None:
    """Declare that the host storage under `tensor` holds no values."""
    storage = tensor.untyped_storage()
    pointer = storage.data_ptr()
    if pointer == 0 or pointer in _marks:
        return
    _marks[pointer] = weakref.finalize(storage, _marks.pop, pointer, None)
    _marks[pointer].atexit = False


def is_virtual(tensor: torch.Tensor) -> bool:
    """Whether the host storage under `tensor` was declared to hold no values."""
    return tensor.untyped_storage().data_ptr() in _marks
