"""How long each layer of a use computed, and how long compute stood still for copies.

Marks are put into the compute stream and asked for their times after the use, so nothing waits for
them while it runs. Compute stands still where it waits for a copy that isn't done, and where the
host, which has to see to a copy from pageable memory itself, gives it no work meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device, Mark
from .errors import DeviceError


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One run of one layer. `copy_bytes` are those copied for it, 0 where it was there.

    `stall_s` ends where the layer begins. Before that its copy is waited for, and the layers to
    come are fetched.
    """

    layer: int
    stall_s: float
    compute_s: float
    copy_bytes: int


@dataclass(frozen=True, slots=True)
class UseTime:
    """One use: its layers in the order in which they ran, and what came before and between."""

    layers: tuple[LayerTime, ...]
    outside_stall_s: float = 0.0
    outside_copy_bytes: int = 0
    """Of the weights in no layer."""

    @property
    def stall_s(self) -> float:
        return self.outside_stall_s + sum(each.stall_s for each in self.layers)

    @property
    def compute_s(self) -> float:
        return sum(each.compute_s for each in self.layers)

    @property
    def copy_bytes(self) -> int:
        return self.outside_copy_bytes + sum(each.copy_bytes for each in self.layers)

    def exposed_share(self, bytes_per_s: float) -> float:
        """Of the time that the copies take at `bytes_per_s`, that in which compute stood still; 0
        where nothing was copied."""
        return self.stall_s * bytes_per_s / self.copy_bytes if self.copy_bytes else 0.0


@dataclass(slots=True)
class _Run:
    layer: int | None
    copy_bytes: int
    reached: Mark
    started: Mark
    ended: Mark | None = None


class LayerTimer:
    """Times the uses of the one `LayerwiseOffload` that has it as its `timer`.

    Raises DeviceError where the device has no clock.
    """

    def __init__(self, device: Device) -> None:
        if not device.traits.timed:
            raise DeviceError(
                f"the layers can't be timed: {device.identity.name} has no clock",
                hint="a simulated card has one where it is given a Clock",
            )
        self.device = device
        self._runs: list[_Run] = []
        self._reached: Mark | None = None

    def use(self) -> UseTime:
        """The use under way, or the last, as far as its layers have ended. Waits for them."""
        seconds = self.device.seconds
        layers = []
        stall_s, copy_bytes = 0.0, 0
        for run in self._runs:
            if run.layer is None:
                stall_s += seconds(run.reached, run.started)
                copy_bytes += run.copy_bytes
            elif run.ended is not None:
                stall, compute = seconds(run.reached, run.started), seconds(run.started, run.ended)
                layers.append(LayerTime(run.layer, stall, compute, run.copy_bytes))
        return UseTime(tuple(layers), stall_s, copy_bytes)

    def begin(self) -> None:
        """A use begins: the times of the one before are gone."""
        self._runs.clear()

    def reach(self) -> None:
        """Compute has no more to do before the next `start`."""
        self._reached = self.device.mark()

    def start(self, layer: int | None, copy_bytes: int) -> None:
        """Compute goes on, with `layer` or with what isn't one's."""
        assert self._reached is not None, "start comes after reach"
        self._runs.append(_Run(layer, copy_bytes, self._reached, self.device.mark()))
        self._reached = None

    def end(self, layer: int) -> None:
        """`layer` has been given to compute in whole."""
        if self._runs and self._runs[-1].layer == layer:
            self._runs[-1].ended = self.device.mark()
