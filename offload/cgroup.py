"""The memory limits of the process's cgroup and of each above it, v1 or v2.

Which hierarchies there are, where they are mounted and what part of the tree a mount shows is read
from `mountinfo`: a container may see the whole tree, its own part of it, or its own part as if it
were the whole. Where the process's cgroup isn't under a mount, the mount's root is all that is
read.

    v2    memory.max, past which processes are killed; memory.high, past which they are stalled
          until memory was reclaimed, which pinned memory can't be
    v1    memory.limit_in_bytes; hierarchical_memory_limit, the least above, which may be out of
          sight

Swap and v1's soft limit aren't counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
