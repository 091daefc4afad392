"""The least that was free while something ran, sampled by a thread of its own."""

from __future__ import annotations

import threading
from types import TracebackType

from .device import Device, Reading


class FreeFloor:
    """`with FreeFloor(device, every_s=0.01) as floor:` reads the device so often, and at both ends,
    which is all where it is None.

    Torch's own peaks don't see what isn't torch's: the context's growth, and other processes. An
    error of a reading ends the sampling, and is raised when the block ends.
    """

    def __init__(self, device: Device, *, every_s: float | None) -> None:
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
