"""How fast copies are: a plain one, and those of layers in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from residency.offload.clocks import measure_bandwidth
from residency.offload.device import Device
from residency.offload.errors import HostMemoryError
from residency.offload.host_memory import HostBudget, HostMemory, chunks
from residency.offload.layers import CopyStream
from residency.offload.layerwise import LayerwiseOffload

from ..layered import Layers
from ..notes import Notes
from ..target import Target

LEAST_SHARE = 0.8
"""Of a plain pinned copy's rate, that layers are to reach."""
_PASSES = 4


def run(target: Target, notes: Notes) -> None:
    scale = target.scale
    with target.device() as device, torch.no_grad():
        pinned = measure_bandwidth(device, scale.copy_bytes, pinned=True)
        pageable = measure_bandwidth(device, scale.copy_bytes, pinned=False)
        notes.note("plain_copy_bytes", scale.copy_bytes)
        notes.note("plain_pinned_bytes_per_s", pinned)
        notes.note("plain_pageable_bytes_per_s", pageable)

        layers = Layers(scale.width, scale.layers)
        notes.note("layer_bytes", layers.layer_bytes)
        stream = _stream_rate(device, layers)
        notes.note("copy_stream_bytes_per_s", stream)
        notes.note("copy_stream_share", stream / pinned)
        for prefetch in (1, 2):
            rate = _layer_rate(device, layers, prefetch, HostBudget(_host_bytes()))
            notes.note(f"layerwise_prefetch_{prefetch}_bytes_per_s", rate)
            notes.note(f"layerwise_prefetch_{prefetch}_share", rate / pinned)
            notes.require(
                rate / pinned >= LEAST_SHARE,
                f"layers with {prefetch} fetched ahead are copied at {rate / pinned:.0%} of a "
                f"plain pinned copy's rate, and {LEAST_SHARE:.0%} is the least",
            )
        rate = _layer_rate(device, layers, 1, None)
        notes.note("layerwise_pageable_bytes_per_s", rate)
        notes.note("layerwise_pageable_share", rate / pageable)


def _host_bytes() -> int:
    return HostMemory.read().budget_bytes()


def _stream_rate(device: Device, layers: Layers) -> float:
    """Of `CopyStream`, each layer as one buffer from the chunks that masters are pinned in."""
    masters: list[Sequence[torch.Tensor]] = []
    for layer in layers.layers:
        whole = torch.cat([each.flatten().view(torch.uint8) for each in layer.parameters()])
        parts = whole.split_with_sizes([*chunks(whole.nbytes)])
        masters.append([device.pin(part) for part in parts])
    target = torch.empty(layers.layer_bytes, dtype=torch.uint8, device=device.torch_device)
    copies = CopyStream(device)

    def fill() -> None:
        for parts in masters:
            targets = target.split([part.nbytes for part in parts])
            copies.wait(copies.fill(zip(targets, parts, strict=True)))

    fill()
    return _rate(device, fill)


def _layer_rate(device: Device, layers: Layers, prefetch: int, pin: HostBudget | None) -> float:
    """Of layers that compute nothing, so that copies are all there is."""
    layers.repeat(0)
    offload = LayerwiseOffload(layers, device, prefetch=prefetch, pin=pin)
    try:
        offload.install()
        offload.begin_use(holds_resident_set=False, passes=_PASSES)
        x = torch.zeros(1, device=device.torch_device)
        layers(x)
        rate = _rate(device, lambda: [layers(x) for _ in range(_PASSES - 1)])
        offload.release_after_use()
        return rate
    except HostMemoryError as error:
        raise RuntimeError(f"the layers can't be pinned: {error.message}") from error
    finally:
        offload.remove()


def _rate(device: Device, work: Callable[[], object]) -> float:
    """What was copied between two marks of the compute stream, which waits for all of it."""
    device.synchronize()
    before, since = device.transfers, device.mark()
    work()
    seconds = device.seconds(since, device.mark())
    return (device.transfers - before).h2d_bytes / seconds
