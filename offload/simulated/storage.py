"""Device storages made of host memory.

A DLPack capsule of the extension device type wraps host bytes into a plain `torch.Tensor` on
`simgpu:0` with a storage of its own. Kernels work on a CPU alias of the same bytes.

Virtual data has a shape and a storage, and no values: its address space is reserved and never
touched, so a pipeline of 54 GiB costs next to nothing. There is one slot for a card in a process.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch.utils.dlpack import from_dlpack

from ..errors import DeviceError

DEVICE_TYPE = "simgpu"

_aten = torch.ops.aten
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_EXTENSION_DEVICE = 12  # kDLExtDev
_UINT = 1  # kDLUInt


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("tensor", _DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
# The deleter is libc's free, so that no Python runs inside ~StorageImpl: a ctypes callback there
# would drop the exception in flight, and an OOM would surface as a SystemError.
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Buffer:
    """The host bytes under one device storage. `virtual`: they hold no values. `charge` is what
    the card was asked for them with, and is called when the storage dies."""

    __slots__ = ("charge", "data", "nbytes", "virtual")

    def __init__(self, data: torch.Tensor, nbytes: int, charge: Callable[[], None]) -> None:
        self.data = data
        self.nbytes = nbytes
        self.charge = charge
        self.virtual = False


_buffers: dict[int, Buffer] = {}


def live_buffers() -> int:
    """Device storages that are alive, those of zero bytes included."""
    return len(_buffers)


def live_bytes() -> int:
    return sum(buffer.nbytes for buffer in _buffers.values())


def on_card(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE_TYPE


def pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def buffer_of(tensor: torch.Tensor) -> Buffer:
    return _buffers[tensor.untyped_storage().data_ptr()]


def new_storage(
    nbytes: int, charge: Callable[[], None], data: torch.Tensor | None = None
) -> torch.Tensor:
    """A uint8 tensor over a new device storage; `charge` is called when the storage dies.

    `data`: host bytes, of a storage that nobody else writes, to be the device's.
    """
    if data is None:
        data = torch.empty(max(nbytes, 1), dtype=torch.uint8, device="cpu")
    buffer = Buffer(data, nbytes, charge)
    size = ctypes.sizeof(_DLManagedTensor)
    address = _libc.malloc(size + 16)
    extents = (ctypes.c_int64 * 2).from_address(address + size)
    extents[0], extents[1] = buffer.data.numel(), 1
    managed = _DLManagedTensor.from_address(address)
    managed.tensor = _DLTensor(
        buffer.data.data_ptr(),
        _DLDevice(_EXTENSION_DEVICE, 0),
        1,
        _DLDataType(_UINT, 8, 1),
        address + size,
        address + size + 8,
        0,
    )
    managed.context = None
    managed.deleter = _FREE
    key = buffer.data.data_ptr()
    _buffers[key] = buffer
    tensor: torch.Tensor = from_dlpack(_new_capsule(address, b"dltensor", None))
    # CPython keeps the exception in flight around a weakref callback, which the deleter does not.
    weakref.finalize(tensor.untyped_storage(), _release, key).atexit = False
    return tensor


def _release(key: int) -> None:
    _buffers.pop(key).charge()


def as_strided(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """`torch.as_strided`, bypassing the card's own dispatch: a view moves no bytes."""
    view: torch.Tensor = _aten.as_strided.default.redispatch(
        _CPU_KEYS, tensor, list(size), list(stride), offset
    )
    return view


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if tensor.dtype == dtype:
        return tensor
    view: torch.Tensor = _aten.view.dtype.redispatch(_CPU_KEYS, tensor, dtype)
    return view


def over_storage(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """A tensor of any geometry over the storage of `tensor`, both on the card."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = as_dtype(as_strided(tensor, (elements,), (1,), 0), dtype)
    return as_strided(flat, size, stride, offset)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same bytes."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    storage = buffer_of(tensor).data.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        storage, tensor.storage_offset(), tensor.size(), tensor.stride()
    )


def contiguous_strides(size: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return strides[::-1]


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a strided tensor reaches; 0 for an empty one."""
    reach = 1
    for extent, step in zip(size, stride, strict=True):
        if extent == 0:
            return 0
        reach += (extent - 1) * step
    return reach


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


class Watch(Protocol):
    """Who is told of every operation that a card has run."""

    def ran(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None: ...


class Memory(Protocol):
    """What the backend asks of the card in the slot."""

    virtual_above: int | None
    """Float tensors of more elements than this aren't computed. None computes all."""

    @property
    def watch(self) -> Watch | None:
        """None where nobody wants to know what ran."""

    def allocate(self, nbytes: int) -> Callable[[], None]:
        """Charge `nbytes`; the result gives them back. Raises torch.OutOfMemoryError."""

    def cross_bus(self, h2d_bytes: int, d2h_bytes: int) -> None:
        """Count a copy that is about to run."""

    def module(self) -> dict[str, Any]:
        """Functions that `torch.simgpu` has while this card is in the slot."""


_card: Memory | None = None
_watch: Watch | None = None


def put_in(card: Memory | None) -> None:
    """Put `card` into the slot, or empty it with None."""
    global _card, _watch
    _card = card
    _watch = None if card is None else card.watch


def card_in_slot() -> Memory | None:
    return _card


def watch() -> Watch | None:
    """Who watches the card in the slot."""
    return _watch


def card() -> Memory:
    """The card that charges what runs now. Raises DeviceError if the slot is empty."""
    if _card is None:
        raise DeviceError(
            f"an operation ran on {DEVICE_TYPE}:0 and no card is in it",
            hint="keep tensors of a simulated card inside its `with` block",
        )
    return _card
