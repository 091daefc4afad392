"""Whether a request makes the same bits, wherever its weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from residency.offload.device import Device
from residency.offload.host_memory import HostMemory
from residency.phases.component import declare
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.warmup import TensorOutput
from residency.phases.host import Failure
from residency.phases.schedule import Schedule

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
            with _opened(device, pipeline, source, way) as host:
                made[name] = _outputs(target, host)
                if name != RESIDENT:
                    _follow(host, _scheduled(host, way, retains=True))
                    made[f"{name}, retained"] = _outputs(target, host)
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


def _follow(host: DiffusersHost, schedule: Schedule) -> None:
    for step in host.steps(schedule):
        step.apply()


def _outputs(target: Target, host: DiffusersHost) -> list[torch.Tensor]:
    made = []
    for _ in range(target.scale.requests):
        request = host.run(target.source().shape)
        if isinstance(request, Failure):
            raise RuntimeError(request.detail)
        assert isinstance(request.output, TensorOutput), "the values aren't virtual"
        made.append(request.output.value)
    return made


def _scheduled(host: DiffusersHost, way: _Way, *, retains: bool) -> Schedule:
    """What is streamed, its resident set held in every use, and across every gap or not."""
    declared = {each.name: tuple(sorted(each.declared)) for each in host.components()}
    return Schedule(
        uses=tuple(
            each.model_copy(
                update={
                    "retain_resident_layers": retains,
                    "resident_set": declared[each.component],
                    "retained_set": declared[each.component] if retains else (),
                    "pinned": way.pinned,
                }
            )
            for each in host.baseline.uses
        )
    )


@contextmanager
def _opened(
    device: Device, pipeline: DiffusersPipeline, source: Source, way: _Way
) -> Iterator[DiffusersHost]:
    host = DiffusersHost(
        pipeline,
        device,
        (source.shape,),
        declare(pipeline.components, way.residency, way.resident_layers),
        prefetch=way.prefetch,
        host_bytes=HostMemory.read().budget_bytes() if way.pinned else None,
    )
    try:
        failure = host.open()
        if failure is not None:
            raise RuntimeError(failure.detail)
        _follow(host, _scheduled(host, way, retains=False))
        yield host
    finally:
        host.close()
