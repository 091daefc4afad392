"""A simulated card: the device interface over the backend and a model of the allocator, and the
faults that can be injected."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Protocol

import torch

from ..cards import Card
from ..device import GIB, MIB, Device, Identity, Reading, Traits, Transfers
from ..errors import DeviceBusyError, DeviceIntegrityError, InputError
from ..host_memory import pinned_charge_bytes
from ..memory_errors import Shortfall
from .allocator import Allocator, AllocatorFull, CachingAllocator
from .backend import register
from .base import ExactAllocator
from .dispatch import is_defined
from .storage import (
    DEVICE_TYPE,
    card_in_slot,
    is_virtual,
    live_buffers,
    live_bytes,
    mark_virtual,
    put_in,
)
from .streams import Charge, HostWatch, Ordering, SimulatedEvent, SimulatedStream, Streams
from .work import Clock, Timeline

CONTEXT_BYTES = 376 * MIB
"""The CUDA context's share in the motivating case: steady memory less weights (FINDINGS, F)."""

_COMPUTED_ELEMENTS = 1 << 16
_NO_LIMIT_BYTES = 1 << 60

AllocatorKind = Literal["caching", "expandable", "exact"]


class SimulatedCard(Device):
    """`with SimulatedCard(find_card("RTX 4090")) as device:` puts the card into `simgpu:0`.

    `virtual`: large float tensors have shapes and no values. `allocator`: `caching` is PyTorch's
    default, `expandable` its expandable segments, `exact` charges bytes as asked, for pipelines so
    small that 2 MiB segments would be all there is. `context_bytes` is what the driver takes for
    the process, `others_bytes` what other processes hold; the latter may change at any time.

    `check_order`: work that isn't made to wait for what it depends on raises OrderError.
    `clock`: work takes time. `spills`: a full card goes on in host memory, as under WDDM; what is
    allocated beyond its limit stays there, and operations on it take `spill_factor` times as long.

    Raises InputError if nothing is left for tensors, or a card that spills has no clock;
    DeviceBusyError if another card's tensors are still alive when this one is put in.
    """

    def __init__(
        self,
        card: Card,
        *,
        virtual: bool = False,
        allocator: AllocatorKind = "caching",
        context_bytes: int = CONTEXT_BYTES,
        others_bytes: int = 0,
        check_order: bool = False,
        clock: Clock | None = None,
        spills: bool = False,
        spill_factor: float = 8.0,
    ) -> None:
        if context_bytes < 0 or others_bytes < 0:
            raise InputError(
                f"context is {context_bytes} and others are {others_bytes} bytes",
                hint="both are 0 or more",
            )
        if card.total_bytes <= context_bytes + others_bytes:
            raise InputError(
                f"{card.name} has {card.total_bytes / GIB:.2f} GiB, of which the context takes "
                f"{context_bytes / GIB:.2f} and others {others_bytes / GIB:.2f}: nothing is left",
                hint="name a larger card, or lower --context or --others",
            )
        if spills and clock is None:
            raise InputError(
                f"{card.name} spills and has no clock, so nothing would tell",
                hint="give it a clock: spilled memory is told by its time alone",
            )
        self.card = card
        self.faults = Faults()
        self._traits = Traits(simulated=True, spills=spills, timed=clock is not None)
        self.virtual_above = _COMPUTED_ELEMENTS if virtual else None
        self._context_bytes = context_bytes
        self._others_bytes = others_bytes
        self._allocator: Allocator
        if allocator == "exact":
            self._allocator = ExactAllocator(self._allocator_limit_bytes)
        else:
            self._allocator = CachingAllocator(
                self._allocator_limit_bytes, expandable_segments=allocator == "expandable"
            )
        self.pinned_bytes = 0
        self._transfers = Transfers()
        self.streams = Streams(
            Ordering() if check_order else None,
            None if clock is None else Timeline(clock, spill_factor=spill_factor),
        )
        self._host_watch: HostWatch | None = None

    @property
    def _limit_bytes(self) -> int:
        return max(self.card.total_bytes - self._context_bytes - self._others_bytes, 0)

    @property
    def _allocator_limit_bytes(self) -> int:
        return _NO_LIMIT_BYTES if self._traits.spills else self._limit_bytes

    @property
    def others_bytes(self) -> int:
        return self._others_bytes

    @others_bytes.setter
    def others_bytes(self, value: int) -> None:
        self._others_bytes = value
        self._allocator.limit_bytes = self._allocator_limit_bytes

    @property
    def context_bytes(self) -> int:
        return self._context_bytes

    @context_bytes.setter
    def context_bytes(self, value: int) -> None:
        self._context_bytes = value
        self._allocator.limit_bytes = self._allocator_limit_bytes

    @property
    def identity(self) -> Identity:
        return Identity(self.card.name, f"SIM-{self.card.name.replace(' ', '-')}")

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def ordering(self) -> Ordering | None:
        return self.streams.ordering

    @property
    def timeline(self) -> Timeline | None:
        return self.streams.timeline

    @property
    def watch(self) -> Streams | None:
        return self.streams if self.streams.are_watched else None

    @property
    def torch_device(self) -> torch.device:
        register()
        return torch.device(DEVICE_TYPE, 0)

    @property
    def transfers(self) -> Transfers:
        return self._transfers

    def read(self) -> Reading:
        allocator = self._allocator
        return Reading(
            total_bytes=self.card.total_bytes,
            free_bytes=max(self._limit_bytes - allocator.reserved_bytes, 0),
            others_bytes=self._others_bytes,
            context_bytes=self._context_bytes,
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            peak_allocated_bytes=allocator.peak_allocated_bytes,
            peak_reserved_bytes=allocator.peak_reserved_bytes,
            alloc_retries=allocator.alloc_retries,
        )

    def reset_peaks(self) -> None:
        self._allocator.reset_peaks()

    def release_cache(self) -> None:
        self._allocator.release_cache()

    def synchronize(self) -> None:
        self.streams.synchronize()

    def new_stream(self) -> SimulatedStream:
        return self.streams.new()

    def current_stream(self) -> SimulatedStream:
        return self.streams.current

    def on(self, stream: SimulatedStream) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.streams.on(stream)

    def mark(self) -> SimulatedEvent:
        if not self._traits.timed:
            super().mark()
        return self.streams.record(self.streams.current)

    def seconds(self, since: SimulatedEvent, until: SimulatedEvent) -> float:  # type: ignore[override]
        if since.at_s is None or until.at_s is None:
            return super().seconds(since, until)
        until.synchronize()
        return until.at_s - since.at_s

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        if is_virtual(host):
            pinned = torch.empty_like(host)
            mark_virtual(pinned)
        else:
            pinned = host.clone()
        self.streams.pin(pinned)
        charge = pinned_charge_bytes(pinned.nbytes)
        self.pinned_bytes += charge
        weakref.finalize(pinned.untyped_storage(), self._unpinned, charge).atexit = False
        return pinned

    def _unpinned(self, charge: int) -> None:
        self.pinned_bytes -= charge

    def is_defined(self, tensor: torch.Tensor) -> bool:
        return is_defined(tensor)

    def check_integrity(self) -> None:
        """Raises DeviceIntegrityError unless what is allocated is what is alive."""
        self._allocator.check_integrity()
        if self._allocator.requested_bytes != live_bytes():
            raise DeviceIntegrityError(
                f"{self._allocator.requested_bytes} bytes are charged, and the storages that are "
                f"alive have {live_bytes()}"
            )

    def allocate(self, nbytes: int) -> Callable[[], None]:
        self.faults.allocation()
        streams, allocator = self.streams, self._allocator
        ordering, stream = streams.ordering, streams.current.number
        history = None if ordering is None else ordering.allocate(nbytes, stream)
        try:
            block = allocator.allocate(nbytes, stream)
        except AllocatorFull as full:
            raise self._out_of_memory(full) from None
        if not streams.are_watched:
            return lambda: allocator.free(block)
        spilled = nbytes > 0 and allocator.allocated_bytes > self._limit_bytes

        def give_back() -> None:
            if ordering is not None and history is not None:
                ordering.free(history)
            allocator.free(block)

        return Charge(give_back, history, spilled=spilled)

    def _out_of_memory(self, full: AllocatorFull) -> torch.OutOfMemoryError:
        free = max(full.limit_bytes - full.reserved_bytes, 0)
        used = self._context_bytes + full.reserved_bytes
        error = torch.OutOfMemoryError(
            f"{DEVICE_TYPE} out of memory. Tried to allocate {_size(full.requested_bytes)}. "
            f"GPU 0 has a total capacity of {_size(self.card.total_bytes)} of which "
            f"{_size(free)} is free. Including non-PyTorch memory, this process has "
            f"{_size(used)} memory in use. Of the allocated memory {_size(full.allocated_bytes)} "
            f"is allocated by PyTorch, and {_size(full.reserved_bytes - full.allocated_bytes)} "
            "is reserved by PyTorch but unallocated."
        )
        error.shortfall = Shortfall(full.requested_bytes, free)  # type: ignore[attr-defined]
        return error

    def cross_bus(self, h2d_bytes: int, d2h_bytes: int) -> None:
        self.faults.copy()
        now = self._transfers
        if h2d_bytes:
            now = replace(now, h2d_bytes=now.h2d_bytes + h2d_bytes, h2d_copies=now.h2d_copies + 1)
        if d2h_bytes:
            now = replace(now, d2h_bytes=now.d2h_bytes + d2h_bytes, d2h_copies=now.d2h_copies + 1)
        self._transfers = now

    def module(self) -> dict[str, Any]:
        allocator = self._allocator
        return {
            "empty_cache": self.release_cache,
            "max_memory_allocated": lambda device=None: allocator.peak_allocated_bytes,
            "max_memory_reserved": lambda device=None: allocator.peak_reserved_bytes,
            "mem_get_info": lambda device=None: (self.read().free_bytes, self.card.total_bytes),
            "memory_allocated": lambda device=None: allocator.allocated_bytes,
            "memory_reserved": lambda device=None: allocator.reserved_bytes,
            "reset_peak_memory_stats": lambda device=None: self.reset_peaks(),
            "synchronize": lambda device=None: self.synchronize(),
        }

    def __enter__(self) -> SimulatedCard:
        other = card_in_slot()
        if other is not None:
            raise DeviceBusyError(
                f"{other} is in {DEVICE_TYPE}:0", hint="leave its `with` block first"
            )
        if live_buffers():
            gc.collect()
        if live_buffers():
            raise DeviceBusyError(
                f"{live_buffers()} tensors of the card that was in {DEVICE_TYPE}:0 are alive",
                hint="drop them, or move them to the host, before the next card is put in",
            )
        register()
        put_in(self)
        if self.ordering is not None:
            self._host_watch = HostWatch(self.ordering)
            self._host_watch.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._host_watch is not None:
            self._host_watch.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
            self._host_watch = None
        put_in(None)

    def __str__(self) -> str:
        return f"{self.card.name} ({self.card.total_bytes / GIB:.2f} GiB, simulated)"


def _size(nbytes: int) -> str:
    """Bytes in the text of CUDA's own error."""
    if nbytes > GIB:
        return f"{nbytes / GIB:.2f} GiB"
    if nbytes > MIB:
        return f"{nbytes / MIB:.2f} MiB"
    return f"{nbytes / 1024:.2f} KiB" if nbytes > 1024 else f"{nbytes} bytes"


Fault = Callable[[], BaseException | None]
"""What to raise; None where something else happens and the work goes on."""


class InjectedError(RuntimeError):
    """Stands for any error that a driver may raise in the middle of a copy."""


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("simgpu out of memory (injected)")


def driver_error() -> BaseException:
    return InjectedError("the copy failed (injected)")


def neighbour_grows(card: Neighboured, nbytes: int) -> Fault:
    """Another process takes so much more of the card."""

    def grow() -> None:
        card.others_bytes += nbytes

    return grow


def hang(seconds: float) -> Fault:
    """The host is held up for so long, by the wall clock."""
    return lambda: time.sleep(seconds)


class Neighboured(Protocol):
    """A card with other processes on it."""

    others_bytes: int


@dataclass(slots=True)
class Faults:
    """Counts allocations and copies, and lets the n-th after `at_…` was called go wrong. Each
    once."""

    allocations: int = 0
    copies: int = 0
    _allocation_faults: dict[int, Fault] = field(default_factory=dict)
    _copy_faults: dict[int, Fault] = field(default_factory=dict)

    def at_allocation(self, n: int, fault: Fault = out_of_memory) -> None:
        """At the n-th allocation from now; the next one is 1."""
        self._allocation_faults[self.allocations + n] = fault

    def at_copy(self, n: int, fault: Fault = driver_error) -> None:
        """At the n-th copy between host and device from now; the next one is 1."""
        self._copy_faults[self.copies + n] = fault

    def clear(self) -> None:
        self._allocation_faults.clear()
        self._copy_faults.clear()

    def allocation(self) -> None:
        self.allocations += 1
        _happen(self._allocation_faults.pop(self.allocations, None))

    def copy(self) -> None:
        self.copies += 1
        _happen(self._copy_faults.pop(self.copies, None))


def _happen(fault: Fault | None) -> None:
    error = None if fault is None else fault()
    try:
        if error is not None:
            raise error
    finally:
        del error  # it has this frame, which would have it
