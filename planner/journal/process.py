"""A process as it is written down for others: by its number, and on which boot of which host."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

import psutil

from ..value import Value

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessRecord(Value):
    pid: int
    host: str
    boot: str
    """Of the host's kernel, since after a reboot a number means another process."""

    @classmethod
    def current(cls) -> ProcessRecord:
        return cls(pid=os.getpid(), host=socket.gethostname(), boot=_boot())

    @property
    def may_be_alive(self) -> bool:
        """False only where it is known to have ended. A number that was given to another process
        since then, and a process of another host, may be alive."""
        if self.host != socket.gethostname():
            return True
        return self.boot == _boot() and psutil.pid_exists(self.pid)


@cache
def _boot() -> str:
    """The kernel's own name for this boot; elsewhere than on Linux the second in which it began."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return str(round(psutil.boot_time()))
