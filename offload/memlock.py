"""The limit on locked memory, RLIMIT_MEMLOCK."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LOCKED = re.compile(r"^VmLck:\s*([0-9]+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LockLimit:
    """What the process may lock with `mlock`, and has.

    A GPU's driver locks pages by itself, and as a rule isn't held to this limit. So nothing is
    refused by it beforehand: it is told, and may explain a pin that fails. A process with
    CAP_IPC_LOCK, such as root's, isn't held to it either.
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

    def explains(self, *, pinned_bytes: int, failed_bytes: int) -> bool:
        """Whether it can be why `failed_bytes` couldn't be pinned on top of `pinned_bytes`.

        Where more is pinned than it admits, pinning isn't held to it.
        """
        if self.limit_bytes is None:
            return False
        left = self.limit_bytes - self.locked_bytes
        return pinned_bytes <= left < pinned_bytes + failed_bytes


def _locked_bytes(proc: Path) -> int:
    """Locked with `mlock`; what drivers lock isn't in it."""
    try:
        status = (proc / "status").read_text(errors="replace")
    except OSError:  # no procfs on this system
        return 0
    found = _LOCKED.search(status)
    return int(found[1]) << 10 if found else 0
