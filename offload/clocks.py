"""What takes time: layers and the copies that compute stands still for, and how fast copies are.

Marks are put into the compute stream and asked for their times after the use, so nothing waits for
them while it runs. Compute stands still where it waits for a copy that isn't done, and where the
host, which has to see to a copy from pageable memory itself, gives it no work meanwhile."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from .device import Device, Mark
from .errors import DeviceError, InputError
from .file import replace_file

logger = logging.getLogger(__name__)


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


_TRIES = 5
_FORMAT = 1


def measure_bandwidth(device: Device, nbytes: int, *, pinned: bool) -> float:
    """Bytes per second of a copy of `nbytes` from page-locked or from pageable host memory.

    The median of 5, after one that isn't counted. Takes `nbytes` of the device and of the host.
    Raises InputError for no bytes, DeviceError where the device has no clock or took no time,
    HostMemoryError where the host can't lock so much, torch.OutOfMemoryError.
    """
    if nbytes <= 0:
        raise InputError(f"a copy of {nbytes} bytes has no rate", hint="measure with 1 or more")
    source = torch.zeros(nbytes, dtype=torch.uint8)
    if pinned:
        source = device.pin(source)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
    taken = []
    for _ in range(1 + _TRIES):
        since = device.mark()
        target.copy_(source, non_blocking=True)
        device.count_copy(h2d_bytes=nbytes)
        taken.append(device.seconds(since, device.mark()))
    seconds = median(taken[1:])
    if seconds <= 0:
        raise DeviceError(
            f"{device.identity.name} says that copies of {nbytes} bytes take no time",
            hint="measure with more bytes",
        )
    return nbytes / seconds


def user_cache_path() -> Path:
    """Where a user's measurements are kept: in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "residency" / "bandwidth.json"


class BandwidthCache:
    """Measures a card's bandwidth once under one `driver`.

    With `path`, what was measured is there for the next process. A file that isn't there, can't be
    read, or isn't what this class writes, is taken for empty and written anew; where it can't be
    written, a warning says so.
    """

    def __init__(self, path: Path | None = None, *, driver: str = "") -> None:
        self.path = path
        self.driver = driver
        self._known: dict[str, float] = {}

    def bytes_per_s(self, device: Device, *, pinned: bool, nbytes: int) -> float:
        """As `measure_bandwidth` says, and raising what it raises."""
        kind = "pinned" if pinned else "pageable"
        key = f"{device.identity.uuid} {self.driver} {kind}"
        if key not in self._known:
            self._known = self._read() | self._known
        if key not in self._known:
            self._known[key] = measure_bandwidth(device, nbytes, pinned=pinned)
            try:
                self._write()
            except OSError as error:
                logger.warning("the next process measures the copy rate again: %s", error)
        return self._known[key]

    def _read(self) -> dict[str, float]:
        if self.path is None:
            return {}
        try:
            held = json.loads(self.path.read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(held, dict) or held.get("format") != _FORMAT:
            return {}
        rates = held.get("bytes_per_s")
        if not isinstance(rates, dict):
            return {}
        return {key: float(rate) for key, rate in rates.items() if _is_rate(rate)}

    def _write(self) -> None:
        """Raises OSError."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "bytes_per_s": self._known}, indent=2, sort_keys=True)
        replace_file(self.path, f"{text}\n".encode())


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
