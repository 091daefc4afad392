"""Copies from host memory on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .device import Device, Event, Stream

if TYPE_CHECKING:
    import torch


class CopyStream:
    """Fills device buffers that were allocated on the compute stream, the device's current one.

    A copy starts only after the compute issued so far, so it can't overtake the last reader of
    whatever the buffer's memory held before.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stream = device.new_stream()
        self._computed_on: list[Stream] = []

    def fill(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Issue (target, source) copies; compute has to wait for the event before it reads."""
        compute = self.device.current_stream()
        self._stream.wait_event(compute.record_event())
        try:
            with self.device.on(self._stream):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                    self.device.count_copy(h2d_bytes=source.nbytes)
        except BaseException:
            # The targets are about to be freed, and their memory used again.
            compute.wait_event(self._stream.record_event())
            raise
        return self._stream.record_event()

    def wait(self, event: Event) -> None:
        """Compute issued from now on starts after `event`."""
        self.device.current_stream().wait_event(event)

    def join(self) -> None:
        """Put the streams that compute was ever on in order, where it was on several: each goes on
        after what all were given so far.

        So a use can read what another has left on the device, and buffers can be freed that were
        allocated on one stream and read on another.
        """
        compute = self.device.current_stream()
        if compute not in self._computed_on:
            self._computed_on.append(compute)
        others = [stream for stream in self._computed_on if stream != compute]
        for other in others:
            compute.wait_event(other.record_event())
        for other in others:
            other.wait_event(compute.record_event())
