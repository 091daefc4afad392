"""What hooks cost a layer call, and how much of the copies compute hides."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

from residency.offload.clocks import LayerTimer, UseTime, measure_bandwidth
from residency.offload.device import Device
from residency.offload.host_memory import HostBudget, HostMemory
from residency.offload.layerwise import LayerwiseOffload

from ..layered import Layers
from ..notes import Notes
from ..target import Target

LEAST_HIDDEN = 0.7
"""Of the time that copies take, where computing takes `COMPUTE` times as long as they do."""
COMPUTE = 1.5
_CALLED_LAYERS = 64
_PASSES = 4


class _Idle(nn.Module):
    """Layers that do nothing, so that calls are all there is."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(_CALLED_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def run(target: Target, notes: Notes) -> None:
    with target.device() as device, torch.no_grad():
        _overhead(target, device, notes)
        _overlap(target, device, notes)


def _overhead(target: Target, device: Device, notes: Notes) -> None:
    """Seconds of the host: the bare module and the hooked one take turns."""
    x = torch.zeros(1, device=device.torch_device)
    bare, rounds = _Idle().to(device.torch_device), target.scale.calls
    hooked = LayerwiseOffload(_Idle(), device, resident_layers=(_CALLED_LAYERS,))
    streamed = LayerwiseOffload(_Idle(), device)
    offloads = (hooked, streamed)
    try:
        for offload in offloads:
            offload.install()
            offload.begin_use(holds_resident_set=True, passes=rounds + 2)
        modules = {"bare": bare, "resident": hooked.module, "streamed": streamed.module}
        seconds: dict[str, list[float]] = {name: [] for name in modules}
        for _ in range(rounds + 1):
            for name, module in modules.items():
                seconds[name].append(_host_seconds(device, lambda m=module: m(x)))
    finally:
        for offload in offloads:
            offload.remove()
    calls = {name: median(each[1:]) / _CALLED_LAYERS for name, each in seconds.items()}
    for name, each in calls.items():
        notes.note(f"call_{name}_s", each)
    notes.note("hooks_of_resident_layer_s", calls["resident"] - calls["bare"])


def _host_seconds(device: Device, call: Callable[[], object]) -> float:
    device.synchronize()
    start = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - start


def _overlap(target: Target, device: Device, notes: Notes) -> None:
    scale = target.scale
    layers = Layers(scale.width, scale.layers)
    rate = measure_bandwidth(device, scale.copy_bytes, pinned=True)
    copy_s = layers.layer_bytes / rate
    offload = LayerwiseOffload(
        layers, device, prefetch=1, pin=HostBudget(HostMemory.read().budget_bytes())
    )
    offload.install()
    offload.timer = LayerTimer(device)
    try:
        layers.repeat(1)
        _timed_use(target, device, offload)
        once = _timed_use(target, device, offload)
        once_s = median(each.compute_s for each in once.layers)
        repeats = max(1, math.ceil(COMPUTE * copy_s / once_s))
        layers.repeat(repeats)
        use = _timed_use(target, device, offload)
    finally:
        offload.timer = None
        offload.remove()
    hidden = 1 - _exposed(use, rate)
    notes.note("copies_s", use.copy_bytes / rate)
    notes.note("compute_s", use.compute_s)
    notes.note("stall_s", use.stall_s)
    notes.note("layer_runs", len(use.layers))
    notes.note("hidden_share_of_copies", hidden)
    # The first copy of a use has nothing before it to hide behind.
    notes.note("most_that_can_be_hidden", 1 - 1 / len(use.layers))
    notes.note("hidden_with_one_repeat", 1 - _exposed(once, rate))
    notes.require(
        hidden >= LEAST_HIDDEN,
        f"{hidden:.0%} of copies are hidden behind {COMPUTE} times their time of compute, and "
        f"{LEAST_HIDDEN:.0%} is the least",
    )


def _exposed(use: UseTime, bytes_per_s: float) -> float:
    """Of the time that the copies take, that in which compute stood still."""
    return use.stall_s * bytes_per_s / use.copy_bytes


def _timed_use(target: Target, device: Device, offload: LayerwiseOffload) -> UseTime:
    scale = target.scale
    x = torch.zeros(scale.tokens, scale.width, dtype=torch.bfloat16, device=device.torch_device)
    device.synchronize()
    offload.begin_use(holds_resident_set=False, passes=_PASSES)
    for _ in range(_PASSES):
        offload.module(x)
    timer = offload.timer
    assert timer is not None
    use = timer.use()
    offload.release_after_use()
    return use
