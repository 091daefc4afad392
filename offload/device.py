"""The interface of a device: what the rest of `residency` needs to know and do, and no more.

A `Device` is a real card or a simulated one. Whoever holds one can read its memory, order work on
its streams and count what crossed the bus; tensors get there through torch, on `torch_device`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Identity:
    """Which card this is: two cards of a kind differ in `uuid`."""

    name: str
    uuid: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Device memory at one instant. Peaks are since the last `reset_peaks`.

    total = free + others + context + reserved; allocated is the part of reserved that tensors hold.
    """

    total_bytes: int
    free_bytes: int
    others_bytes: int
    context_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    alloc_retries: int

    @property
    def usable_bytes(self) -> int:
        """What this process may take with tensors: total less others and context."""
        return self.total_bytes - self.others_bytes - self.context_bytes


@dataclass(frozen=True, slots=True)
class Transfers:
    """Bytes that crossed the bus since the device was made, and in how many copies."""

    h2d_bytes: int = 0
    h2d_copies: int = 0
    d2h_bytes: int = 0
    d2h_copies: int = 0

    def __sub__(self, earlier: Transfers) -> Transfers:
        return Transfers(
            self.h2d_bytes - earlier.h2d_bytes,
            self.h2d_copies - earlier.h2d_copies,
            self.d2h_bytes - earlier.d2h_bytes,
            self.d2h_copies - earlier.d2h_copies,
        )


class Event(Protocol):
    """A point in a stream's work."""

    def synchronize(self) -> None:
        """Block the host until the work before the event is done."""


class Stream(Protocol):
    """A queue of device work that runs in order."""

    def record_event(self) -> Event: ...

    def wait_event(self, event: Event) -> None:
        """Later work of this stream starts only after `event`."""


class Device(ABC):
    """One card. Out of device memory is `torch.OutOfMemoryError` on every device."""

    @property
    @abstractmethod
    def identity(self) -> Identity: ...

    @property
    @abstractmethod
    def torch_device(self) -> torch.device: ...

    @property
    @abstractmethod
    def transfers(self) -> Transfers: ...

    @abstractmethod
    def read(self) -> Reading: ...

    @abstractmethod
    def reset_peaks(self) -> None: ...

    @abstractmethod
    def release_cache(self) -> None:
        """Give cached blocks that no tensor uses back to the driver."""

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def new_stream(self) -> Stream: ...

    @abstractmethod
    def current_stream(self) -> Stream: ...

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Work issued inside goes to `stream`."""

    @abstractmethod
    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """A page-locked copy of `host`, which lives as long as the result.

        Raises HostMemoryError where the host can't lock so much.
        """

    @abstractmethod
    def is_defined(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has values, and not only a shape."""
