"""`torch.cuda` as a CUDA device uses it, over made-up cards and no driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class Gpu:
    name: str
    uuid: str
    total_bytes: int
    free_bytes: int
    card_bytes: int | None = None
    """By its properties: the total, unless it is given."""
    integrated: bool = False
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    alloc_retries: int = 0


class FakeEvent:
    def __init__(self, enable_timing: bool) -> None:
        self.enable_timing = enable_timing
        self.at_ms: float | None = None
        self.waited = False

    def record(self, stream: FakeStream) -> None:
        self.at_ms = stream.ms

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.enable_timing
        assert end.waited, "the later event isn't done"
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


@dataclass
class FakeStream:
    device: int
    ms: float = 0.0


@dataclass
class FakeCuda:
    gpus: list[Gpu] = field(default_factory=list)
    backend: str = "native"
    initialized: bool = True
    """Before it is, PyTorch's statistics are empty."""
    error: Exception | None = None
    """What the driver answers to all questions on memory."""
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams = [FakeStream(index) for index in range(len(self.gpus))]
        self.pinned: dict[str, int] = {}

    def is_available(self) -> bool:
        return bool(self.gpus)

    def device_count(self) -> int:
        return len(self.gpus)

    def get_device_properties(self, device: int) -> Any:
        gpu = self.gpus[device]
        return SimpleNamespace(
            name=gpu.name,
            uuid=gpu.uuid,
            total_memory=gpu.total_bytes if gpu.card_bytes is None else gpu.card_bytes,
            is_integrated=int(gpu.integrated),
            major=9,
            minor=0,
        )

    def mem_get_info(self, device: int) -> tuple[int, int]:
        if self.error is not None:
            raise self.error
        return self.gpus[device].free_bytes, self.gpus[device].total_bytes

    def memory_stats(self, device: int) -> dict[str, Any]:
        if not self.initialized:
            return {}
        gpu = self.gpus[device]
        return {
            "allocated_bytes.all.current": gpu.allocated_bytes,
            "allocated_bytes.all.peak": gpu.peak_allocated_bytes,
            "reserved_bytes.all.current": gpu.reserved_bytes,
            "reserved_bytes.all.peak": gpu.peak_reserved_bytes,
            "num_alloc_retries": gpu.alloc_retries,
            "allocated_bytes.large_pool.current": 1,
        }

    def host_memory_stats(self) -> dict[str, Any]:
        return self.pinned

    def get_allocator_backend(self) -> str:
        return self.backend

    def reset_peak_memory_stats(self, device: int) -> None:
        self.calls.append(("reset_peak_memory_stats", device))
        gpu = self.gpus[device]
        gpu.peak_allocated_bytes = gpu.allocated_bytes
        gpu.peak_reserved_bytes = gpu.reserved_bytes

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))

    def synchronize(self, device: int) -> None:
        self.calls.append(("synchronize", device))

    def current_stream(self, device: int) -> Any:
        return self.streams[device]

    def Stream(self, device: int) -> Any:
        return FakeStream(device)

    def Event(self, enable_timing: bool) -> Any:
        return FakeEvent(enable_timing)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        outer, self.streams[stream.device] = self.streams[stream.device], stream
        try:
            yield
        finally:
            self.streams[stream.device] = outer


def out_of_memory(text: str = "CUDA error: out of memory") -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(text)
