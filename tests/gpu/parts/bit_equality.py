"""Whether a request makes the same bits, wherever its weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from residency.offload.device import Device
from residency.offload.host import HostBudget, HostMemory
from residency.offload.layerwise import LayerwiseOffload
from residency.phases.declaration import declare
from residency.phases.diffusers import DiffusersPipeline
from residency.phases.warmup import Failure
from residency.planner.installation import Installation

from ..notes import Notes
from ..pipelines import Source
from ..target import Target

_STREAMED = {"dit": "layerwise-offload", "text_encoder": "layerwise-offload"}
_HALF = {"dit": "0.5", "text_encoder": "0.65"}


@dataclass(frozen=True, slots=True)
class _Way:
    residency: Mapping[str, str]
    resident_layers: Mapping[str, str] = field(default_factory=dict)
    prefetch: int = 1
    pinned: bool = False


RESIDENT = "resident"
WAYS = {
    RESIDENT: _Way({"all": "resident"}),
    "layerwise": _Way(_STREAMED, _HALF),
    "layerwise, pinned": _Way(_STREAMED, _HALF, pinned=True),
    "layerwise, pinned, 2 ahead": _Way(_STREAMED, _HALF, prefetch=2, pinned=True),
}


def run(target: Target, notes: Notes) -> None:
    source = target.source()
    pipeline = source.build()
    notes.note("pipeline", source.name)
    notes.note("shape", str(source.shape))
    made: dict[str, list[torch.Tensor]] = {}
    with target.device() as device:
        for name, way in WAYS.items():
            with _installed(device, pipeline, source, way) as installation:
                made[name] = _outputs(target, installation)
                if name != RESIDENT:
                    _retain(installation)
                    made[f"{name}, retained"] = _outputs(target, installation)
        notes.note("left_allocated_bytes", device.read().allocated_bytes)
    first = made[RESIDENT][0]
    notes.note("output", list(first.shape))
    notes.note("finite_share", float(first.isfinite().float().mean()))
    notes.note("distinct_values", int(first.unique().numel()))
    repeats = all(same_bits(first, each) for each in made[RESIDENT])
    notes.note("resident_repeats_itself", repeats)
    notes.require(repeats, "resident weights don't make the same bits twice")
    for name, outputs in made.items():
        equal = [same_bits(first, each) for each in outputs]
        notes.note(f"equal: {name}", equal)
        if not all(equal):
            notes.note(f"furthest: {name}", max(_apart(first, each) for each in outputs))
        if repeats:
            notes.require(all(equal), f"{name} doesn't make the bits that resident weights make")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaNs among them."""
    return one.dtype == other.dtype and torch.equal(
        one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).abs().nan_to_num(0.0).max())


def _outputs(target: Target, installation: Installation) -> list[torch.Tensor]:
    made = []
    for _ in range(target.scale.requests):
        request = installation.warmup.request(target.source().shape)
        if isinstance(request, Failure):
            raise RuntimeError(request.detail)
        assert request.output is not None, "the values aren't virtual"
        made.append(request.output)
    return made


def _retain(installation: Installation) -> None:
    """What is streamed, its resident set across every gap."""
    streamed = [
        use
        for use in installation.graph.uses
        if isinstance(installation.placements[use.component], LayerwiseOffload)
    ]
    installation.assign(replace(use, retain_resident_layers=True) for use in streamed)


@contextmanager
def _installed(
    device: Device, pipeline: DiffusersPipeline, source: Source, way: _Way
) -> Iterator[Installation]:
    declarations = declare(pipeline.components, way.residency, way.resident_layers)
    installation = Installation(
        pipeline, device, declarations, (source.shape,), prefetch=way.prefetch
    )
    transaction = installation.transaction()
    try:
        transaction.apply()
        if way.pinned:
            host = HostBudget(HostMemory.read().budget_bytes())
            for placement in installation.placements.values():
                if isinstance(placement, LayerwiseOffload):
                    placement.pin_masters(host)
        failure = installation.warmup.discover()
        if failure is not None:
            raise RuntimeError(failure.detail)
        yield installation
    finally:
        transaction.rollback()
