"""Device memory split into who has it, from figures that needn't agree.

    total = free + others + context + reserved

Total and free are CUDA's; where the memory is the host's, free is what the host has available less
a reserve for the operating system. Reserved is PyTorch's. What is left is divided by NVML: this
process's use less reserved is its context, and all else is others'. Where NVML doesn't show this
process, how much of the rest others hold isn't known, and all of it is put to the context.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..device import Reading
from ..inspection import Finding, FindingKind
from .capacity import ABSURD, Capacity, capacity
from .figures import Facts, Figures, GpuProcess, Pool

MIB = 1 << 20

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
