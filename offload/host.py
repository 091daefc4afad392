"""Host memory: what there is for pinned masters, and the budget that they are charged to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from .cgroup import cgroup_limits
from .errors import HostMemoryError, InputError
from .memlock import LockLimit
from .pinning import chunked_charge_bytes

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
