"""The part of `torch.cuda` that a CUDA device uses: where tests put something else."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class Runtime(Protocol):
    """`torch.cuda` has this shape. Devices are given as indices of what this process sees."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...

    def get_device_properties(self, device: int) -> Any:
        """`name`, `uuid`, `total_memory`, `is_integrated`, `major`, `minor`."""

    def mem_get_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes, by the driver."""

    def memory_stats(self, device: int) -> dict[str, Any]: ...

    def host_memory_stats(self) -> dict[str, Any]: ...

    def get_allocator_backend(self) -> str: ...

    def reset_peak_memory_stats(self, device: int) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self, device: int) -> None: ...

    def current_stream(self, device: int) -> torch.Stream: ...

    def Stream(self, device: int) -> torch.Stream: ...

    def Event(self, enable_timing: bool) -> torch.Event: ...

    def stream(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Work issued inside goes to `stream`."""
