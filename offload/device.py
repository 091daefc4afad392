"""The interface of a device: what the rest of `residency` needs to know and do, and no more.

A `Device` is a real card or a simulated one. Whoever holds one can read its memory, order work on
its streams and count what crossed the bus; tensors get there through torch, on `torch_device`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .errors import DeviceError

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
    def outside_bytes(self) -> int:
        """What others and the context take."""
        return self.others_bytes + self.context_bytes

    @property
    def usable_bytes(self) -> int:
        """What this process may take with tensors: total less others and context."""
        return self.total_bytes - self.outside_bytes


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


@dataclass(frozen=True, slots=True)
class Traits:
    """In what devices differ in kind."""

    unified: bool = False
    """Device and host memory are one pool: a copy from one to the other takes its bytes twice."""
    spills: bool = False
    """A full card goes on in host memory, 5 to 10 times slower, and no out-of-memory error comes
    (WDDM and WSL2): only time refutes there."""
    pins_on_card: bool = False
    """Page-locked host memory is charged to the card as well (WDDM)."""
    simulated: bool = False
    timed: bool = False
    """Work takes time, and `mark` can tell how much."""
    undo_slack_bytes: int = 0
    """What may be allocated after an undo and wasn't before: libraries keep workspaces."""


class Mark(Protocol):
    """A point in a stream's work whose time is taken."""


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
    def traits(self) -> Traits:
        return Traits()

    @property
    def driver(self) -> str | None:
        """The version of the driver; None where there is none, or it can't be read."""
        return None

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

    def mark(self) -> Mark:
        """The end of what the current stream was given so far.

        Raises DeviceError where the device isn't `traits.timed`.
        """
        raise DeviceError(f"{self.identity.name} has no clock")

    def seconds(self, since: Mark, until: Mark) -> float:
        """Device time between two marks, waiting for the later one."""
        raise DeviceError(f"{self.identity.name} has no clock")

    def count_copy(self, h2d_bytes: int = 0, d2h_bytes: int = 0) -> None:
        """A copy over the bus was issued. A device that sees copies itself has counted it."""
        return

    @abstractmethod
    def pin(self, host: torch.Tensor) -> torch.Tensor:
        """A page-locked copy of `host`, which lives as long as the result.

        Raises HostMemoryError where the host can't lock so much.
        """

    @abstractmethod
    def is_defined(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` has values, and not only a shape."""
