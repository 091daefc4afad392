"""After a run that ended out of memory."""

from __future__ import annotations

import gc
from collections import deque

from ...offload.device import Device


def reclaim(device: Device) -> None:
    """Give back to the card what nothing holds any more. Not to be called inside `except`: what
    the error there holds is held."""
    gc.collect()
    device.synchronize()
    device.release_cache()


class OomWindow:
    """Runs that ended out of memory, among the last `length` that were begun."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._begun = 0
        self._at: deque[int] = deque()

    def begin(self) -> None:
        self._begun += 1
        if self._at and self._at[0] <= self._begun - self._length:
            self._at.popleft()

    def add(self) -> None:
        """The run that was begun last ended out of memory."""
        self._at.append(self._begun)

    def __len__(self) -> int:
        return len(self._at)
