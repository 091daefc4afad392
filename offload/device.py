"""The interface of a device: what the rest of `residency` needs to know and do, and no more.

A `Device` is a real card or a simulated one. Whoever holds one can read its memory, order work on
its streams and count what crossed the bus; tensors get there through torch, on `torch_device`.

An `Inspection` is what a machine says of its card: every figure with its source, and what doesn't
add up. A `FreeFloor` is the least that was free while something ran."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from .errors import DeviceError

if TYPE_CHECKING:
    import torch


MIB, GIB = 1 << 20, 1 << 30


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


@dataclass(frozen=True, slots=True)
class Term:
    """One figure. `value` is None where the source doesn't say; `source` then tells why."""

    name: str
    value: int | str | None
    unit: str
    """`bytes`, or what the number counts; empty for a word."""
    source: str


class Nature(StrEnum):
    CONTRADICTION = "contradiction"
    """Two sources disagree, or one is impossible: which was taken is said."""
    ABSENCE = "absence"
    """What can't be read."""
    ASSUMPTION = "assumption"
    """What was decided and not read."""
    CONDITION = "condition"
    """What holds on this machine and not on every one."""


class FindingKind(StrEnum):
    """For explaining; what is decided by is in the reading and the traits."""

    TOTALS_DISAGREE = "totals disagree"
    FREE_DISAGREES = "free disagrees"
    PARTS_DISAGREE = "parts disagree"
    IMPOSSIBLE_MEMORY = "impossible memory"
    IMPOSSIBLE_PROCESS = "impossible process"
    ALLOCATOR_ABOVE_CARD = "allocator above card"
    NOT_OWN_PROCESS = "not own process"
    PROCESSES_DISAGREE = "processes disagree"
    NO_NVML = "no NVML"
    NO_MEMORY = "no memory by NVML"
    NO_PROCESSES = "no processes by NVML"
    OTHERS_UNKNOWN = "others unknown"
    NO_RETRIES = "no retries counted"
    OS_RESERVE = "reserve of the operating system"
    DRIVER_MODEL = "driver model assumed"
    UNIFIED = "unified memory"
    SPILLS = "spills"
    SLICE = "slice of a card"
    EXPANDABLE_ON_SLICE = "expandable segments on a slice"
    ASYNC_ALLOCATOR = "cudaMallocAsync"
    DESKTOP = "desktop"
    FOREIGN = "other processes"
    FOREIGN_GROWTH = "growth outside"

    @property
    def nature(self) -> Nature:
        return _NATURES.get(self, Nature.CONDITION)


_NATURES = {
    FindingKind.TOTALS_DISAGREE: Nature.CONTRADICTION,
    FindingKind.FREE_DISAGREES: Nature.CONTRADICTION,
    FindingKind.PARTS_DISAGREE: Nature.CONTRADICTION,
    FindingKind.IMPOSSIBLE_MEMORY: Nature.CONTRADICTION,
    FindingKind.IMPOSSIBLE_PROCESS: Nature.CONTRADICTION,
    FindingKind.ALLOCATOR_ABOVE_CARD: Nature.CONTRADICTION,
    FindingKind.NOT_OWN_PROCESS: Nature.CONTRADICTION,
    FindingKind.PROCESSES_DISAGREE: Nature.CONTRADICTION,
    FindingKind.NO_NVML: Nature.ABSENCE,
    FindingKind.NO_MEMORY: Nature.ABSENCE,
    FindingKind.NO_PROCESSES: Nature.ABSENCE,
    FindingKind.OTHERS_UNKNOWN: Nature.ABSENCE,
    FindingKind.NO_RETRIES: Nature.ABSENCE,
    FindingKind.OS_RESERVE: Nature.ASSUMPTION,
    FindingKind.DRIVER_MODEL: Nature.ASSUMPTION,
}


@dataclass(frozen=True, slots=True)
class Finding:
    kind: FindingKind
    message: str
    hint: str | None = None

    @property
    def nature(self) -> Nature:
        return self.kind.nature


@dataclass(frozen=True, slots=True)
class Inspection:
    """A reading with all that it was made of."""

    identity: Identity
    reading: Reading
    traits: Traits
    terms: tuple[Term, ...]
    findings: tuple[Finding, ...]
    granularity_bytes: int
    """The allocator takes device memory in multiples of this."""
    drift_reserve_bytes: int = 0
    """What programs of a desktop may come to take between two requests: for a plan's margin."""

    def of(self, kind: FindingKind) -> Finding | None:
        return next((finding for finding in self.findings if finding.kind is kind), None)


class Readable(Protocol):
    """What can be read: a device, or a host that is on one."""

    def read(self) -> Reading: ...


class FreeFloor:
    """`with FreeFloor(device, every_s=0.01) as floor:` reads the device so often, and at both ends,
    which is all where it is None.

    Torch's own peaks don't see what isn't torch's: the context's growth, and other processes. An
    error of a reading ends the sampling, and is raised when the block ends.
    """

    def __init__(self, device: Readable, *, every_s: float | None) -> None:
        self.device = device
        self.every_s = every_s
        self.least_free_bytes = 0
        self.most_others_bytes = 0
        self.most_context_bytes = 0
        self.most_outside_bytes = 0
        """Of both together at one time."""
        self.samples = 0
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="free floor", daemon=True)

    def __enter__(self) -> FreeFloor:
        self._take(self.device.read())
        if self.every_s is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self.every_s is not None:
            self._thread.join()
        if error is None:
            if self._error is not None:
                raise self._error
            self._take(self.device.read())

    def _sample(self) -> None:
        try:
            while not self._done.wait(self.every_s):
                self._take(self.device.read())
        except Exception as error:
            self._error = error

    def _take(self, reading: Reading) -> None:
        if not self.samples or reading.free_bytes < self.least_free_bytes:
            self.least_free_bytes = reading.free_bytes
        self.most_others_bytes = max(self.most_others_bytes, reading.others_bytes)
        self.most_context_bytes = max(self.most_context_bytes, reading.context_bytes)
        self.most_outside_bytes = max(self.most_outside_bytes, reading.outside_bytes)
        self.samples += 1
