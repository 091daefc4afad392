"""What the machine says of its card, and whether readings follow what is allocated."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import torch

from residency.offload.device import Nature
from residency.offload.host_memory import HostMemory

from ..notes import Notes
from ..target import Target

_PACKAGES = ("triton", "diffusers", "transformers", "accelerate", "nvidia-ml-py", "highspy")


def run(target: Target, notes: Notes) -> None:
    with target.device() as device:
        found = device.inspect()
        notes.note("reading", asdict(found.reading))
        notes.note("traits", asdict(found.traits))
        notes.note(
            "terms", {term.name: [term.value, term.unit, term.source] for term in found.terms}
        )
        notes.note("findings", [f"{each.kind}: {each.message}" for each in found.findings])
        host = HostMemory.read()
        notes.note("host_available_bytes", host.available_bytes)
        notes.note("host_limited_by", host.source)
        notes.note("cuda", torch.version.cuda)
        notes.note("packages", {name: _installed(name) for name in _PACKAGES})

        reading = found.reading
        parts = reading.free_bytes + reading.outside_bytes + reading.reserved_bytes
        notes.require(
            parts == reading.total_bytes,
            f"free, others, context and reserved are {parts} bytes, the total is "
            f"{reading.total_bytes}",
        )
        notes.require(device.traits.timed, "the device has no clock")
        contradictions = [each for each in found.findings if each.nature is Nature.CONTRADICTION]
        notes.require(not contradictions, "; ".join(each.message for each in contradictions))

        before = device.read()
        nbytes = target.scale.copy_bytes
        held = torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device)
        during = device.read()
        del held
        device.release_cache()
        after = device.read()
        taken = during.allocated_bytes - before.allocated_bytes
        notes.note("asked_bytes", nbytes)
        notes.note("allocated_bytes", taken)
        notes.note("free_fell_by_bytes", before.free_bytes - during.free_bytes)
        notes.note("free_came_back_bytes", after.free_bytes - during.free_bytes)
        notes.require(taken == nbytes, f"{taken} bytes were allocated for {nbytes}")
        given_back = during.reserved_bytes - after.reserved_bytes
        became_free = after.free_bytes - during.free_bytes
        notes.require(
            abs(became_free - given_back) <= found.granularity_bytes,
            f"the allocator gave {given_back} bytes back, and {became_free} became free",
        )


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"
