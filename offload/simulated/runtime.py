"""`torch.cuda`, in the shape that a CUDA device uses, over a simulated card."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..errors import DeviceError
from .card import SimulatedCard
from .streams import SimulatedEvent, SimulatedStream


@dataclass(frozen=True, slots=True)
class SimulatedProperties:
    name: str
    uuid: str
    total_memory: int
    is_integrated: int = 0
    major: int = 8
    minor: int = 9


class RuntimeEvent:
    """An event that is recorded after it was made, as `torch.cuda.Event` is."""

    def __init__(self, card: SimulatedCard) -> None:
        self._card = card
        self._recorded: SimulatedEvent | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        self._recorded = (stream or self._card.current_stream()).record_event()

    def wait(self, stream: SimulatedStream | None = None) -> None:
        """An event that was never recorded has nothing before it."""
        if self._recorded is not None:
            (stream or self._card.current_stream()).wait_event(self._recorded)

    def synchronize(self) -> None:
        if self._recorded is not None:
            self._recorded.synchronize()

    def elapsed_time(self, end: RuntimeEvent) -> float:
        """Milliseconds. Raises DeviceError where either wasn't recorded, or there is no clock."""
        if self._recorded is None or end._recorded is None:
            raise DeviceError("an event that wasn't recorded has no time", hint="record both")
        return self._card.seconds(self._recorded, end._recorded) * 1000


class SimulatedRuntime:
    """One device, whose index is 0. The card has to be in its `with` block for tensors."""

    def __init__(self, card: SimulatedCard) -> None:
        self.card = card

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def get_device_properties(self, device: int) -> Any:
        identity = self.card.identity
        return SimulatedProperties(identity.name, identity.uuid, self.card.card.total_bytes)

    def mem_get_info(self, device: int) -> tuple[int, int]:
        reading = self.card.read()
        return reading.free_bytes, reading.total_bytes

    def memory_stats(self, device: int) -> dict[str, Any]:
        reading = self.card.read()
        return {
            "allocated_bytes.all.current": reading.allocated_bytes,
            "allocated_bytes.all.peak": reading.peak_allocated_bytes,
            "reserved_bytes.all.current": reading.reserved_bytes,
            "reserved_bytes.all.peak": reading.peak_reserved_bytes,
            "num_alloc_retries": reading.alloc_retries,
        }

    def host_memory_stats(self) -> dict[str, Any]:
        pinned = self.card.pinned_bytes
        return {"active_bytes.current": pinned, "allocated_bytes.current": pinned}

    def get_allocator_backend(self) -> str:
        return "native"

    def reset_peak_memory_stats(self, device: int) -> None:
        self.card.reset_peaks()

    def empty_cache(self) -> None:
        self.card.release_cache()

    def synchronize(self, device: int) -> None:
        self.card.synchronize()

    def current_stream(self, device: int) -> Any:
        return self.card.current_stream()

    def Stream(self, device: int) -> Any:
        return self.card.new_stream()

    def Event(self, enable_timing: bool) -> Any:
        return RuntimeEvent(self.card)

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return self.card.on(stream)
