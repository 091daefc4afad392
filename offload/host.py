"""The host memory budget: what pinned masters may take, and what they are charged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from .errors import HostMemoryError

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 tells no limit as the largest multiple of the page size that fits 63 bits."""


def pinned_charge_bytes(nbytes: int) -> int:
    """What pinning takes: PyTorch's caching host allocator rounds up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that this process may still take, and what limits it."""

    available_bytes: int
    source: str

    @classmethod
    def read(cls, *, cgroups: Path = _CGROUPS, own_cgroup: Path = _OWN_CGROUP) -> HostMemory:
        """The least of RAM available and what each cgroup from the process's own up has left."""
        found = [cls(psutil.virtual_memory().available, "RAM available")]
        found += _cgroups(cgroups, own_cgroup)
        return min(found, key=lambda each: each.available_bytes)


class HostBudget:
    """Bytes for pinned host masters."""

    def __init__(self, available_bytes: int) -> None:
        self.available_bytes = available_bytes
        self.charged_bytes = 0

    def charge(self, nbytes: int) -> int:
        """Take the charge for pinning `nbytes`, and return it.

        Raises HostMemoryError, having taken nothing, where it isn't left.
        """
        charge = pinned_charge_bytes(nbytes)
        left = self.available_bytes - self.charged_bytes
        if charge > left:
            raise HostMemoryError(
                f"pinning {nbytes} bytes takes {charge} of host memory after rounding to a power "
                f"of two; of {self.available_bytes} bytes {left} are left",
                hint="keep the masters pageable, or raise the memory limit of the container",
            )
        self.charged_bytes += charge
        return charge

    def give_back(self, charge: int) -> None:
        self.charged_bytes -= charge


def _cgroups(root: Path, own: Path) -> Iterator[HostMemory]:
    """What is left in the process's memory cgroup and each above it, v1 or v2."""
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder = root / "memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts), -1, -1):
            group = folder.joinpath(*parts[:depth])
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and used is not None and most < _NO_LIMIT_BYTES:
                yield HostMemory(max(most - used, 0), f"{group / limit}")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no cgroups on this system
        return []


def _number(path: Path) -> int | None:
    """None for a file that isn't there, or says `max`."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None
