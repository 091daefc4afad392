"""How fast copies from host memory to a device are: measured, and kept by card and driver."""

from __future__ import annotations

import json
import math
import os
import tempfile
from pathlib import Path
from statistics import median

import torch

from .device import Device
from .errors import DeviceError, InputError

_TRIES = 5
_FORMAT = 1
_COPY_BYTES = 256 << 20


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

    With `path`, what was measured is there for the next process. A file that isn't there, or isn't
    what this class writes, is taken for empty and written anew.
    """

    def __init__(self, path: Path | None = None, *, driver: str = "") -> None:
        self.path = path
        self.driver = driver
        self._known: dict[str, float] = {}

    def bytes_per_s(self, device: Device, *, pinned: bool, nbytes: int = _COPY_BYTES) -> float:
        """As `measure_bandwidth` says, and raising what it raises."""
        kind = "pinned" if pinned else "pageable"
        key = f"{device.identity.uuid} {self.driver} {kind}"
        if key not in self._known:
            self._known = self._read() | self._known
        if key not in self._known:
            self._known[key] = measure_bandwidth(device, nbytes, pinned=pinned)
            self._write()
        return self._known[key]

    def _read(self) -> dict[str, float]:
        if self.path is None:
            return {}
        try:
            held = json.loads(self.path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        if not isinstance(held, dict) or held.get("format") != _FORMAT:
            return {}
        rates = held.get("bytes_per_s")
        if not isinstance(rates, dict):
            return {}
        return {key: float(rate) for key, rate in rates.items() if _is_rate(rate)}

    def _write(self) -> None:
        """Replace the file in one step: who reads it sees the old one or the new."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": _FORMAT, "bytes_per_s": self._known}, indent=2, sort_keys=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=self.path.parent, prefix=self.path.name, delete=False
        ) as file:
            file.write(text + "\n")
        try:
            Path(file.name).replace(self.path)
        except BaseException:
            Path(file.name).unlink()
            raise


def _is_rate(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
