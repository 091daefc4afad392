"""From what every source says of a card to one inspection of it."""

from __future__ import annotations

from collections.abc import Iterator

from ..device import (
    GIB,
    MIB,
    Finding,
    FindingKind,
    Identity,
    Inspection,
    Reading,
    Term,
    Traits,
)
from .split import TOLERANCE, Split, split
from .system import Facts, Figures, GpuProcess

UNDO_SLACK_BYTES = 64 * MIB
"""cuBLAS and its like keep workspaces that they made meanwhile."""
DRIFT_RESERVE_BYTES = GIB
"""What a desktop's programs come to take: ComfyUI's maintainers recommend 0.5 to 1 GiB."""
NOTABLE_BYTES = 256 * MIB
"""Of other processes: less is a desktop's own, or noise."""

ASYNC = "cudaMallocAsync"
_GRANULARITY_BYTES = {ASYNC: 32 * MIB}
_NATIVE_GRANULARITY_BYTES = 2 * MIB

_STATS = "torch.cuda.memory_stats"
_PROPERTIES = "device properties"


def traits_of(facts: Facts) -> Traits:
    spills = _spills(facts)
    return Traits(
        unified=facts.integrated,
        spills=spills,
        pins_on_card=spills,
        timed=True,
        undo_slack_bytes=UNDO_SLACK_BYTES,
    )


def _spills(facts: Facts) -> bool:
    model = facts.nvml.driver_model
    if facts.system.windows and model is None:
        return True
    return facts.system.wsl or model in ("WDDM", "MCDM")


def reconcile(facts: Facts, figures: Figures, first: Reading | None = None) -> Inspection:
    """`first`: an earlier reading, from which growth outside of this process is told.

    Raises DeviceError where no source gives a total.
    """
    parts = split(facts, figures)
    findings = (
        *parts.findings,
        *_absent(facts, figures),
        *_machine(facts),
        *_allocator(facts),
        *_others(facts, figures, parts, first),
    )
    desktop = any(finding.kind is FindingKind.DESKTOP for finding in findings)
    return Inspection(
        identity=Identity(facts.name, facts.uuid),
        reading=parts.reading,
        traits=traits_of(facts),
        terms=tuple(_terms(facts, figures, parts)),
        findings=findings,
        granularity_bytes=_granularity(facts),
        drift_reserve_bytes=DRIFT_RESERVE_BYTES if desktop else 0,
    )


def _granularity(facts: Facts) -> int:
    return _GRANULARITY_BYTES.get(facts.backend, _NATIVE_GRANULARITY_BYTES)


def _absent(facts: Facts, figures: Figures) -> Iterator[Finding]:
    if facts.nvml.missing is not None:
        yield Finding(FindingKind.NO_NVML, f"NVML says nothing of this card: {facts.nvml.missing}")
    if "memory" in figures.nvml.absent:
        yield Finding(
            FindingKind.NO_MEMORY, f"NVML doesn't tell memory: {figures.nvml.absent['memory']}"
        )
    if "processes" in figures.nvml.absent:
        yield Finding(
            FindingKind.NO_PROCESSES,
            f"NVML doesn't tell all processes: {figures.nvml.absent['processes']}",
        )


def _machine(facts: Facts) -> Iterator[Finding]:
    model = facts.nvml.driver_model
    if facts.system.wsl:
        yield Finding(
            FindingKind.SPILLS,
            "this is WSL: a full card goes on in host memory, and no out-of-memory error comes",
            "that an allocation succeeds says nothing here, only time refutes",
        )
    elif model in ("WDDM", "MCDM"):
        yield Finding(
            FindingKind.SPILLS,
            f"the driver model is {model}: a full card goes on in host memory, and page-locked "
            "host memory is charged to the card",
            "set the driver's CUDA sysmem fallback policy to prefer none",
        )
    elif facts.system.windows and model is None:
        yield Finding(
            FindingKind.DRIVER_MODEL,
            "the driver model isn't known, and WDDM is assumed: a full card goes on in host memory",
        )
    if facts.nvml.mig_slice or facts.nvml.mig_mode:
        yield Finding(FindingKind.SLICE, "the device is a MIG slice of a card")
        if facts.system.expandable_segments:
            yield Finding(
                FindingKind.EXPANDABLE_ON_SLICE,
                "expandable segments are on, and on a MIG slice PyTorch ends with an internal "
                "assert where it should say out of memory",
                "set PYTORCH_ALLOC_CONF=expandable_segments:False",
            )
    elif facts.nvml.virtualization == "vGPU":
        yield Finding(FindingKind.SLICE, "the device is a share of a card (vGPU)")


def _allocator(facts: Facts) -> Iterator[Finding]:
    if facts.backend != ASYNC:
        return
    yield Finding(
        FindingKind.ASYNC_ALLOCATOR,
        f"PyTorch allocates with {ASYNC}, in steps of {_granularity(facts)} bytes: its pool loses "
        "more to fragmentation than PyTorch's own allocator, and none of it can be counted",
        "take backend:cudaMallocAsync out of PYTORCH_ALLOC_CONF"
        + (", it fails long before the pool is full on Tegra" if facts.integrated else ""),
    )
    yield Finding(FindingKind.NO_RETRIES, f"{ASYNC} counts no allocator retries: 0 is no value")


def _others(
    facts: Facts, figures: Figures, parts: Split, first: Reading | None
) -> Iterator[Finding]:
    own = facts.system.pids
    drawing = [p for p in figures.nvml.processes or () if p.graphics and p.pid not in own]
    if facts.nvml.display_active or drawing:
        yield Finding(
            FindingKind.DESKTOP,
            f"the card draws a desktop, whose programs {_holdings(drawing)} and may take more "
            f"between two requests: {DRIFT_RESERVE_BYTES} bytes should be left to them",
            "put the display on another card, or raise the margin",
        )
    foreign = parts.foreign_bytes
    drawn = sum(each.used_bytes or 0 for each in drawing)
    if foreign is not None and foreign - drawn >= NOTABLE_BYTES:
        yield Finding(
            FindingKind.FOREIGN,
            f"other processes hold {foreign - drawn} bytes, and may be loading still",
            "start what shares a card one after the other, or give each its share",
        )
    others = parts.reading.others_bytes
    whole = all(finding.kind is not FindingKind.TOTALS_DISAGREE for finding in parts.findings)
    if whole and foreign is not None and foreign - others > TOLERANCE * parts.reading.total_bytes:
        yield Finding(
            FindingKind.PROCESSES_DISAGREE,
            f"other processes hold {foreign} bytes by NVML, and no more than {others} bytes are "
            "neither free nor this process's; the latter is taken",
        )
    grown = 0 if first is None else parts.reading.outside_bytes - first.outside_bytes
    if grown >= NOTABLE_BYTES and not facts.integrated:
        seen = parts.own_bytes is not None
        yield Finding(
            FindingKind.FOREIGN_GROWTH,
            f"what isn't PyTorch's on the card has grown by {grown} bytes since the first reading"
            + ("" if seen else ", by other processes or by this one's libraries"),
            "plan again, with a margin that holds it",
        )


def _holdings(programs: list[GpuProcess]) -> str:
    if not programs:
        return "aren't listed"
    sizes = [each.used_bytes for each in programs if each.used_bytes is not None]
    if len(sizes) < len(programs):
        return "hold what NVML doesn't tell"
    return f"({len(programs)}) hold {sum(sizes)} bytes"


def _terms(facts: Facts, figures: Figures, parts: Split) -> Iterator[Term]:
    reading, nvml, system = parts.reading, facts.nvml, facts.system
    left = "what is left of the total"

    def size(name: str, value: int | None, source: str) -> Term:
        return Term(name, value, "bytes", source)

    yield size("total", reading.total_bytes, parts.capacity.total_source)
    yield size("free", reading.free_bytes, parts.capacity.free_source)
    divided = parts.own_bytes is not None and figures.ram is None
    yield size("others", reading.others_bytes, left)
    by_nvml = "this process's use by NVML, less reserved"
    yield size("context", reading.context_bytes, by_nvml if divided else left)
    yield size("reserved", reading.reserved_bytes, _STATS)
    yield size("allocated", reading.allocated_bytes, _STATS)
    yield size("free by CUDA", figures.free_bytes, "cudaMemGetInfo")
    yield size("total by CUDA", figures.total_bytes, "cudaMemGetInfo")
    yield size("size of the card", facts.card_bytes, _PROPERTIES)

    memory = figures.nvml.memory
    silent = nvml.missing or figures.nvml.absent.get("memory", "")
    source = silent if memory is None else memory.source
    yield size("total by NVML", None if memory is None else memory.total_bytes, source)
    yield size("free by NVML", None if memory is None else memory.free_bytes, source)
    yield size("used by NVML", None if memory is None else memory.used_bytes, source)
    kept = None if memory is None else memory.reserved_bytes
    told = source if memory is None or kept is not None else f"{source}, which counts it as used"
    yield size("reserved by the driver", kept, told)
    listed = nvml.missing or figures.nvml.absent.get("processes", "NVML's processes")
    yield size("this process by NVML", parts.own_bytes, listed)
    yield size("other processes by NVML", parts.foreign_bytes, listed)
    if figures.ram is not None:
        yield size("host total", figures.ram.total_bytes, "MemTotal")
        yield size("host available", figures.ram.available_bytes, "MemAvailable")

    yield Term("allocator", facts.backend, "", "torch.cuda.get_allocator_backend")
    yield size("allocator granularity", _granularity(facts), "the allocator's documents")
    yield Term("expandable segments", _yes(system.expandable_segments), "", "environment")
    for name, value, unit, field in (
        ("driver", nvml.driver_version, "", "driver_version"),
        ("driver model", nvml.driver_model, "", "driver_model"),
        ("display active", _yes(nvml.display_active), "", "display_active"),
        ("MIG", _yes(nvml.mig_mode), "", "mig_mode"),
        ("virtualization", nvml.virtualization, "", "virtualization"),
        ("PCIe generation at most", nvml.pcie_generation_max, "", "pcie_generation_max"),
        ("PCIe lanes at most", nvml.pcie_width_max, "lanes", "pcie_width_max"),
    ):
        yield Term(name, value, unit, nvml.missing or nvml.absent.get(field, "NVML"))
    yield Term("WSL", _yes(system.wsl), "", "kernel release and /dev/dxg")


def _yes(value: bool | None) -> str | None:
    return None if value is None else "yes" if value else "no"
