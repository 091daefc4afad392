"""What the operating system and the environment say that bears on device memory."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_DXG = Path("/dev/dxg")
_CONFS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class Ram:
    total_bytes: int
    available_bytes: int
    """What programs may take without swapping; page cache counts as free."""

    @classmethod
    def read(cls) -> Ram:
        memory = psutil.virtual_memory()
        return cls(memory.total, memory.available)


@dataclass(frozen=True, slots=True)
class System:
    platform: str
    """As `sys.platform`."""
    wsl: bool
    pids: tuple[int, ...]
    """This process's, in each PID namespace that can be seen, the outermost first."""
    expandable_segments: bool = False
    """As the environment sets it: what a program sets later isn't seen."""

    @property
    def windows(self) -> bool:
        return self.platform == "win32"

    @classmethod
    def read(
        cls,
        *,
        release: str | None = None,
        status: Path = _STATUS,
        dxg: Path = _DXG,
        environment: Mapping[str, str] | None = None,
    ) -> System:
        release = platform.release() if release is None else release
        environment = os.environ if environment is None else environment
        settings = ",".join(environment.get(name, "") for name in _CONFS).lower()
        return cls(
            sys.platform,
            "microsoft" in release.lower() or dxg.exists(),
            tuple(dict.fromkeys([*_namespace_pids(status), os.getpid()])),
            re.search(r"expandable_segments\s*:\s*true", settings) is not None,
        )


def _namespace_pids(status: Path) -> list[int]:
    try:
        text = status.read_text()
    except OSError:  # no /proc on this system
        return []
    found = re.search(r"^NSpid:(.*)$", text, re.MULTILINE)
    return [int(pid) for pid in found[1].split()] if found else []
