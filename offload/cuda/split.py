"""How large a card is, how much of it is free, and who has the rest, from sources that needn't
agree.

    total = free + others + context + reserved

Total and free are CUDA's; where the memory is the host's, free is what the host has available less
a reserve for the operating system. Reserved is PyTorch's. What is left is divided by NVML: this
process's use less reserved is its context, and all else is others'. Where NVML doesn't show this
process, how much of the rest others hold isn't known, and all of it is put to the context."""

from __future__ import annotations

from dataclasses import dataclass

from ..device import GIB, MIB, Finding, FindingKind, Reading
from ..errors import DeviceError
from .system import Facts, Figures, GpuProcess, NvmlMemory, Pool, Ram

TOLERANCE = 0.05
"""Of the total: what sources may differ by. Driver and firmware keep 2 % that NVML counts."""
ABSURD = 2
"""Times the total: what is said to be in use beyond that is a counter that ran over."""

_CUDA = "cudaMemGetInfo"
_PROPERTIES = "device properties"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Free may be more than fits beside what PyTorch has."""

    total_bytes: int
    free_bytes: int
    total_source: str
    free_source: str


def os_reserve_bytes(ram: Ram) -> int:
    """What is left to the operating system where device and host memory are one pool: assumed."""
    return max(2 * GIB, ram.total_bytes // 50)


def capacity(facts: Facts, figures: Figures, findings: list[Finding]) -> Capacity:
    """Adds to `findings` what doesn't add up. Raises DeviceError where no source gives a total."""
    nvml = _credible(figures.nvml.memory, findings)
    if figures.ram is not None:
        return _shared_pool(facts, figures, figures.ram, nvml, findings)
    return _own_pool(facts, figures, nvml, findings)


def _credible(memory: NvmlMemory | None, findings: list[Finding]) -> NvmlMemory | None:
    """None where what NVML says can't be."""
    if memory is None:
        return None
    total, free, used = memory.total_bytes, memory.free_bytes, memory.used_bytes
    if not total:
        findings.append(
            Finding(
                FindingKind.NO_MEMORY,
                f"{memory.source} answers 0 bytes in total, which is no value",
            )
        )
        return None
    if used > total or free > total or min(used, free) < 0:
        ran_over = ": a counter that ran over" if max(used, free) > ABSURD * total else ""
        findings.append(
            Finding(
                FindingKind.IMPOSSIBLE_MEMORY,
                f"NVML says {used} bytes used and {free} bytes free of {total} bytes{ran_over}; "
                "it is left out",
            )
        )
        return None
    apart = total - used - free - (memory.reserved_bytes or 0)
    if abs(apart) > TOLERANCE * total:
        findings.append(
            Finding(
                FindingKind.PARTS_DISAGREE,
                f"NVML says {total} bytes in total, {used} bytes used and {free} bytes free: "
                f"{abs(apart)} bytes are in {'no' if apart > 0 else 'more than one'} part; it is "
                "left out",
                "page cache counts as neither where device memory is the host's",
            )
        )
        return None
    return memory


def _own_pool(
    facts: Facts, figures: Figures, nvml: NvmlMemory | None, findings: list[Finding]
) -> Capacity:
    """Total, free and where from, for a card that has memory of its own."""
    total, free, card = figures.total_bytes, figures.free_bytes, facts.card_bytes
    if not (total > 0 and 0 <= free <= total and (card <= 0 or total <= ABSURD * card)):
        return _without_cuda(facts, figures, nvml, findings)
    if nvml is None:
        return Capacity(total, free, _CUDA, _CUDA)
    if not _near(nvml.total_bytes, total, total):
        findings.append(_totals(facts, nvml.total_bytes, total))
        return Capacity(total, free, _CUDA, _CUDA)
    if not _near(nvml.free_bytes, free, total):
        lower = min(free, nvml.free_bytes)
        findings.append(
            Finding(
                FindingKind.FREE_DISAGREES,
                f"of {total} bytes CUDA says that {free} bytes are free and NVML that "
                f"{nvml.free_bytes} bytes are; {lower} bytes are taken to be",
                "the operating system keeps a share that NVML doesn't see (WDDM), or another "
                "process takes or gives back memory right now",
            )
        )
        return Capacity(total, lower, _CUDA, _CUDA if lower == free else nvml.source)
    return Capacity(total, free, _CUDA, _CUDA)


def _without_cuda(
    facts: Facts, figures: Figures, nvml: NvmlMemory | None, findings: list[Finding]
) -> Capacity:
    total, card = figures.total_bytes, facts.card_bytes
    said = f"CUDA says {figures.free_bytes} bytes free of {total} bytes, which can't be"
    if nvml is not None and (card <= 0 or _near(nvml.total_bytes, card, card)):
        size, told = (card, _PROPERTIES) if card > 0 else (nvml.total_bytes, nvml.source)
        findings.append(Finding(FindingKind.IMPOSSIBLE_MEMORY, f"{said}; NVML's figures are taken"))
        return Capacity(size, nvml.free_bytes, told, nvml.source)
    if card <= 0:
        raise DeviceError(
            f"{said}, and no other source knows the size of {facts.name}",
            hint="see nvidia-smi; the driver may need a restart",
        )
    findings.append(
        Finding(
            FindingKind.IMPOSSIBLE_MEMORY, f"{said}; all of the card counts as taken", "probe again"
        )
    )
    return Capacity(card, 0, _PROPERTIES, "none is taken to be")


def _shared_pool(
    facts: Facts, figures: Figures, ram: Ram, nvml: NvmlMemory | None, findings: list[Finding]
) -> Capacity:
    """The same where device memory is the host's. CUDA counts page cache as taken there."""
    total, told = figures.total_bytes, _CUDA
    if not 0 < total <= ram.total_bytes:
        total, told = ram.total_bytes, "MemTotal"
    reserve = os_reserve_bytes(ram)
    free = max(ram.available_bytes - reserve, 0)
    if nvml is not None and not _near(nvml.total_bytes, total, total):
        findings.append(_totals(facts, nvml.total_bytes, total))
    findings += (
        Finding(
            FindingKind.UNIFIED,
            f"device and host memory are one pool: the host has {ram.available_bytes} bytes "
            f"available, where CUDA says {figures.free_bytes} bytes free and counts page cache as "
            "taken; the rest is what programs hold, this one's host memory included",
            "copies to the host free nothing here",
        ),
        Finding(
            FindingKind.OS_RESERVE,
            f"{reserve} bytes of what is available are left to the operating system",
        ),
    )
    return Capacity(total, free, told, "MemAvailable less a reserve")


def _totals(facts: Facts, nvml_bytes: int, total: int) -> Finding:
    if facts.integrated:
        why = "NVML knows a carve-out of the host's memory only"
    elif facts.nvml.mig_slice or facts.nvml.mig_mode:
        why = "the device is a MIG slice of the card"
    elif facts.nvml.virtualization == "vGPU":
        why = "the device is a share of the card (vGPU)"
    else:
        why = "the device may be a share of the card"
    return Finding(
        FindingKind.TOTALS_DISAGREE,
        f"NVML says {nvml_bytes} bytes in total and CUDA {total} bytes: {why}; CUDA's is taken",
    )


def _near(one: int, other: int, total: int) -> bool:
    return abs(one - other) <= TOLERANCE * total


_OWN_SLACK_BYTES = 64 * MIB
"""What the allocator may have taken since NVML was asked."""
_CONTAINER = (
    "a container numbers processes by itself: start it with the host's numbers (--pid=host)"
)


@dataclass(frozen=True, slots=True)
class Split:
    reading: Reading
    capacity: Capacity
    own_bytes: int | None
    """This process's use by NVML; None where NVML doesn't show it, or not how much."""
    foreign_bytes: int | None
    """What NVML shows of other processes; None where it is silent on any of them."""
    findings: tuple[Finding, ...]


def split(facts: Facts, figures: Figures) -> Split:
    """Raises DeviceError where no source gives a total."""
    findings: list[Finding] = []
    size = capacity(facts, figures, findings)
    total = size.total_bytes
    pool = _within(figures.pool, total, findings)
    free = min(size.free_bytes, total - pool.reserved_bytes)
    rest = total - free - pool.reserved_bytes

    own, foreign = _attributed(facts, figures, pool, total, findings)
    context = rest
    if own is not None and figures.ram is None:
        context = min(max(own - pool.reserved_bytes, 0), rest)
    elif figures.ram is None:
        findings.append(_unknown_others(facts, figures, rest))
    reading = Reading(
        total_bytes=total,
        free_bytes=free,
        others_bytes=rest - context,
        context_bytes=context,
        allocated_bytes=pool.allocated_bytes,
        reserved_bytes=pool.reserved_bytes,
        peak_allocated_bytes=pool.peak_allocated_bytes,
        peak_reserved_bytes=pool.peak_reserved_bytes,
        alloc_retries=pool.alloc_retries,
    )
    return Split(reading, size, own, foreign, tuple(findings))


def _within(pool: Pool, total: int, findings: list[Finding]) -> Pool:
    """The allocator's figures, no more than the card has."""
    reserved = min(max(pool.reserved_bytes, 0), total)
    if pool.reserved_bytes > total:
        findings.append(
            Finding(
                FindingKind.ALLOCATOR_ABOVE_CARD,
                f"PyTorch holds {pool.reserved_bytes} bytes of a card of {total} bytes: it goes on "
                "in host memory",
                "release some; that an allocation succeeds says nothing on this machine",
            )
        )
    return Pool(
        min(max(pool.allocated_bytes, 0), reserved),
        reserved,
        max(pool.peak_allocated_bytes, 0),
        max(pool.peak_reserved_bytes, 0),
        pool.alloc_retries,
    )


def _attributed(
    facts: Facts, figures: Figures, pool: Pool, total: int, findings: list[Finding]
) -> tuple[int | None, int | None]:
    """What NVML shows of this process, and of others: that too only where it shows this one, which
    else may be any of them."""
    seen = {
        each.pid: _sane(each, total, figures, findings) for each in figures.nvml.processes or ()
    }
    for pid in facts.system.pids:
        if pid not in seen:
            continue
        used = seen[pid]
        if used is None or used + _OWN_SLACK_BYTES >= pool.reserved_bytes:
            others = [size for other, size in seen.items() if other != pid]
            known = [size for size in others if size is not None]
            return used, sum(known) if len(known) == len(others) else None
        findings.append(
            Finding(
                FindingKind.NOT_OWN_PROCESS,
                f"process {pid} holds {used} bytes by NVML, and PyTorch alone has "
                f"{pool.reserved_bytes} bytes: it is another process with this one's number",
                _CONTAINER,
            )
        )
    return None, None


def _sane(process: GpuProcess, total: int, figures: Figures, findings: list[Finding]) -> int | None:
    used = process.used_bytes
    memory = figures.nvml.memory
    most = ABSURD * max(total, 0 if memory is None else memory.total_bytes)
    if used is None or 0 <= used <= most:
        return used
    findings.append(
        Finding(
            FindingKind.IMPOSSIBLE_PROCESS,
            f"NVML says that process {process.pid} holds {used} bytes of a card of {total} bytes: "
            "a counter that ran over; it is left out",
        )
    )
    return None


def _unknown_others(facts: Facts, figures: Figures, rest: int) -> Finding:
    hint = None
    if facts.nvml.missing is not None:
        why = f"there is no NVML: {facts.nvml.missing}"
    elif figures.nvml.processes is None:
        why = f"NVML shows no processes: {figures.nvml.absent.get('processes', 'no reason given')}"
    elif any(each.pid in facts.system.pids for each in figures.nvml.processes):
        why = "NVML shows this process and not what it holds"
    else:
        pids = " or ".join(map(str, facts.system.pids))
        why = f"{pids} isn't among the {len(figures.nvml.processes)} processes that NVML shows"
        hint = _CONTAINER
    return Finding(
        FindingKind.OTHERS_UNKNOWN,
        f"{rest} bytes are neither free nor PyTorch's, and how much of it others hold isn't known "
        f"({why}); all of it counts as the context's",
        hint,
    )
