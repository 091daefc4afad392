"""How much of its copies' time each phase of a baseline stood still for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from ..offload.device import Device
from ..offload.layerwise import LayerwiseOffload
from ..offload.placement import Placement
from ..offload.timing import LayerTimer
from ..phases.warmup import Sweep


@contextmanager
def timed(placements: list[Placement], device: Device) -> Iterator[None]:
    """Inside, the uses of components are timed, where the device has a clock."""
    if device.traits.timed:
        for placement in placements:
            if isinstance(placement, LayerwiseOffload):
                placement.timer = LayerTimer(device)
    try:
        yield
    finally:
        for placement in placements:
            placement.timer = None


def exposures(sweep: Sweep, bytes_per_s: float) -> dict[str, float]:
    """By phase: the share of the time of its copies, at that rate, that compute stood still for,
    0 to 1. Of the request in the steady state that stood still the longest; phases in which nothing
    was timed or copied are left out."""
    worst: dict[str, float] = {}
    for run in sweep.runs:
        stall_s: dict[str, float] = defaultdict(float)
        copied: dict[str, int] = defaultdict(int)
        for (phase, _), use in run.traces[-1].use_times.items():
            stall_s[phase] += use.stall_s
            copied[phase] += use.copy_bytes
        for phase, nbytes in copied.items():
            if nbytes:
                share = min(max(stall_s[phase] * bytes_per_s / nbytes, 0.0), 1.0)
                worst[phase] = max(worst.get(phase, 0.0), share)
    return worst
