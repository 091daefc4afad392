"""Host memory: what there is for pinned masters, the budget that they are charged to, the limit on
locked memory, and the blocks that are pinned.

The limits are those of the process's cgroup and of each above it, v1 or v2.
Which hierarchies there are, where they are mounted and what part of the tree a mount shows is read
from `mountinfo`: a container may see the whole tree, its own part of it, or its own part as if it
were the whole. Where the process's cgroup isn't under a mount, the mount's root is all that is
read.

    v2    memory.max, past which processes are killed; memory.high, past which they are stalled
          until memory was reclaimed, which pinned memory can't be
    v1    memory.limit_in_bytes; hierarchical_memory_limit, the least above, which may be out of
          sight

Swap and v1's soft limit aren't counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from .errors import HostMemoryError, InputError

_PROC = Path("/proc/self")

RESERVE_BYTES = 2 << 30
RESERVE_SHARE = 0.05
"""Of available host memory, the larger of both is left to the process: activations on the host,
the loading of files, and what others take after the reading."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that this process may still take, and what limits it."""

    available_bytes: int
    source: str
    limit_bytes: int
    """Of which the available ones are left."""

    @classmethod
    def read(cls, *, proc: Path = _PROC) -> HostMemory:
        """The least of RAM available and what each cgroup from the process's own up has left."""
        return HostLimits.read(proc=proc).binding

    def share(self, local_ranks: int) -> HostMemory:
        """What each of the processes of one node has, where each pins masters of its own.

        The reading has to be from before any of them pins. Raises InputError for no processes.
        """
        if local_ranks < 1:
            raise InputError(
                f"host memory can't be shared by {local_ranks} processes",
                hint="give the number of this node's ranks, 1 or more",
            )
        source = self.source if local_ranks == 1 else f"{self.source}, for {local_ranks} ranks"
        return HostMemory(self.available_bytes // local_ranks, source, self.limit_bytes)

    def budget_bytes(self, *, local_ranks: int = 1, unified: bool = False) -> int:
        """For the pinned masters of each rank: what is available less the reserve, shared.

        None of it where host and device memory are one pool: there a master in pinned memory takes
        from the card what it would take on the card. Raises InputError for no ranks.
        """
        reserve = max(RESERVE_BYTES, int(self.available_bytes * RESERVE_SHARE))
        left = HostMemory(max(self.available_bytes - reserve, 0), self.source, self.limit_bytes)
        return 0 if unified else left.share(local_ranks).available_bytes


@dataclass(frozen=True, slots=True)
class HostLimits:
    """All that limits host memory. `lock` is told, and no term: see `LockLimit`."""

    terms: tuple[HostMemory, ...]
    """RAM first, then cgroups from the process's own up."""
    lock: LockLimit | None

    @classmethod
    def read(cls, *, proc: Path = _PROC) -> HostLimits:
        """`proc` is the process's folder in procfs."""
        ram = psutil.virtual_memory()
        cgroups = (
            HostMemory(each.available_bytes, each.source, each.limit_bytes)
            for each in cgroup_limits(proc)
        )
        terms = (HostMemory(ram.available, "RAM available", ram.total), *cgroups)
        return cls(terms, LockLimit.read(proc=proc))

    @property
    def binding(self) -> HostMemory:
        """The term that leaves least."""
        return min(self.terms, key=lambda each: each.available_bytes)


class HostBudget:
    """Bytes for pinned host masters. Once the host refused a pin it is closed."""

    def __init__(self, available_bytes: int) -> None:
        self.available_bytes = available_bytes
        self.charged_bytes = 0
        self.refusal: str | None = None
        """What the host said when it refused a pin."""

    def charge(self, nbytes: int) -> int:
        """Take the charge for pinning `nbytes` in chunks, and return it.

        Raises HostMemoryError, having taken nothing, where it isn't left.
        """
        if self.refusal is not None:
            raise HostMemoryError(
                f"pinning {nbytes} bytes isn't tried: the host refused a pin before, with "
                f"{self.available_bytes} bytes pinned: {self.refusal}",
                hint="keep the masters pageable: after one refusal others may fail that would fit",
            )
        charge = chunked_charge_bytes(nbytes)
        left = self.available_bytes - self.charged_bytes
        if charge > left:
            raise HostMemoryError(
                f"pinning {nbytes} bytes takes {charge} of host memory after rounding to powers "
                f"of two; of {self.available_bytes} bytes {left} are left",
                hint="keep the masters pageable, or raise the memory limit of the container",
            )
        self.charged_bytes += charge
        return charge

    def give_back(self, charge: int) -> None:
        self.charged_bytes -= charge

    def close(self, refusal: HostMemoryError) -> None:
        """The host refused a pin: what is charged now is all it was seen to lock, and no more is
        tried. One refusal can make later pins of the process fail (WDDM)."""
        self.refusal = refusal.message
        self.available_bytes = self.charged_bytes


_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 tells no limit as the largest multiple of the page size that fits 63 bits."""

_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    limit_bytes: int
    used_bytes: int
    """Without the file cache that the kernel drops first (inactive_file), as kubelet counts it."""
    source: str
    """The file that says so."""

    @property
    def available_bytes(self) -> int:
        return max(self.limit_bytes - self.used_bytes, 0)


@dataclass(frozen=True, slots=True)
class _Mount:
    """Of a hierarchy with a memory controller, or of v2's, which may have one."""

    v2: bool
    root: str
    """What of the hierarchy is at `point`."""
    point: Path

    def chain(self, path: str) -> Iterator[Path]:
        """The folders under this mount of the cgroup `path`, and of those above it."""
        below = PurePosixPath(path)
        if below.is_relative_to(self.root):
            parts = below.relative_to(self.root).parts
            if ".." not in parts:
                for depth in range(len(parts), 0, -1):
                    yield self.point.joinpath(*parts[:depth])
        yield self.point


def cgroup_limits(proc: Path) -> tuple[CgroupLimit, ...]:
    """All that can be read, from the process's own cgroup up, each once.

    `proc` is the process's folder in procfs. Empty where there are no cgroups, or no limits.
    """
    own = dict(_own_cgroups(proc))
    found = (
        limit
        for mount in _mounts(proc)
        if mount.v2 in own
        for group in mount.chain(own[mount.v2])
        for limit in (_v2_limits(group) if mount.v2 else _v1_limits(group))
    )
    return tuple({limit.source: limit for limit in found}.values())


def _own_cgroups(proc: Path) -> Iterator[tuple[bool, str]]:
    """Whether v2, and the path of the process's cgroup in that hierarchy."""
    for line in _lines(proc / "cgroup"):
        match line.split(":", 2):
            case [_, "", path]:
                yield True, path
            case [_, controllers, path] if "memory" in controllers.split(","):
                yield False, path


def _mounts(proc: Path) -> Iterator[_Mount]:
    for line in _lines(proc / "mountinfo"):
        place, _, kind = line.partition(" - ")
        match place.split(), kind.split():
            case [_, _, _, root, point, *_], ["cgroup2", *_]:
                yield _Mount(True, _unescaped(root), Path(_unescaped(point)))
            case [_, _, _, root, point, *_], ["cgroup", _, options] if "memory" in options.split(
                ","
            ):
                yield _Mount(False, _unescaped(root), Path(_unescaped(point)))


def _v2_limits(group: Path) -> Iterator[CgroupLimit]:
    used = _used(group / "memory.current", _stat(group).get("inactive_file", 0))
    for name in ("memory.max", "memory.high"):
        limit = _number(group / name)
        if limit is not None:
            yield CgroupLimit(limit, used, str(group / name))


def _v1_limits(group: Path) -> Iterator[CgroupLimit]:
    stat = _stat(group)
    cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
    used = _used(group / "memory.usage_in_bytes", cached)
    limit = _number(group / "memory.limit_in_bytes")
    if limit is not None and limit < _NO_LIMIT_BYTES:
        yield CgroupLimit(limit, used, str(group / "memory.limit_in_bytes"))
    above = stat.get("hierarchical_memory_limit")
    if above is not None and above < min(limit or _NO_LIMIT_BYTES, _NO_LIMIT_BYTES):
        yield CgroupLimit(above, used, f"{group / 'memory.stat'} hierarchical_memory_limit")


def _used(usage: Path, cached: int) -> int:
    """0 where usage can't be read: then no more than the limit is left all the same."""
    return max((_number(usage) or 0) - cached, 0)


def _stat(group: Path) -> dict[str, int]:
    found = {}
    for line in _lines(group / "memory.stat"):
        match line.split():
            case [name, number] if _is_number(number):
                found[name] = int(number)
    return found


def _number(path: Path) -> int | None:
    """None for a file that can't be read, or doesn't hold a number, such as `max`."""
    lines = _lines(path)
    return int(lines[0]) if lines and _is_number(lines[0].strip()) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # not there, or not for us to read
        return []


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 8)), text)


_LOCKED = re.compile(r"^VmLck:\s*([0-9]+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LockLimit:
    """What the process may lock with `mlock`, and has.

    A GPU's driver locks pages by itself, and as a rule isn't held to this limit. So nothing is
    refused by it: it is told. A process with CAP_IPC_LOCK, such as root's, isn't held to it either.
    """

    limit_bytes: int | None
    """None is no limit."""
    locked_bytes: int

    @classmethod
    def read(cls, *, proc: Path) -> LockLimit | None:
        """None on a system that has no such limit. `proc` is the process's folder in procfs."""
        try:
            import resource
        except ImportError:  # Windows
            return None
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(None if soft == resource.RLIM_INFINITY else soft, _locked_bytes(proc))


def _locked_bytes(proc: Path) -> int:
    """Locked with `mlock`; what drivers lock isn't in it."""
    try:
        status = (proc / "status").read_text(errors="replace")
    except OSError:  # no procfs on this system
        return 0
    found = _LOCKED.search(status)
    return int(found[1]) << 10 if found else 0


LEAST_CHUNK_BYTES = 256 << 10
"""What is left below it is one block: its copy would take no longer than its launch."""

LARGEST_CHUNK_BYTES = 1 << 30
"""Drivers refuse a large block though as many bytes in small ones can be had."""


def pinned_charge_bytes(nbytes: int) -> int:
    """What one pinned block takes: PyTorch's host allocator rounds it up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def chunked_charge_bytes(nbytes: int) -> int:
    """What pinning takes in `chunks`: less than half of `LEAST_CHUNK_BYTES` more than `nbytes`."""
    left = nbytes % LEAST_CHUNK_BYTES
    return nbytes - left + pinned_charge_bytes(left)


def chunks(nbytes: int) -> Iterator[int]:
    """The sizes, largest first, of the blocks that `nbytes` are pinned in.

    All but the last are powers of two, and the last rounds up to one, so that together they are
    charged `chunked_charge_bytes`, and are the fewest blocks that are: up to 13, and one more for
    each `LARGEST_CHUNK_BYTES`. Where the allocator is set not to round, they take no more.
    """
    charge, left = chunked_charge_bytes(nbytes), nbytes
    while left:
        block = min(1 << (charge.bit_length() - 1), LARGEST_CHUNK_BYTES)
        yield min(block, left)
        charge -= block
        left -= min(block, left)
