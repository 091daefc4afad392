"""What the operating system and the environment say that bears on device memory, and what each
source says of one card, before it is compared: None where it doesn't say."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True)
class Pool:
    """PyTorch's caching allocator on the card."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    alloc_retries: int = 0


@dataclass(frozen=True, slots=True)
class NvmlMemory:
    total_bytes: int
    free_bytes: int
    used_bytes: int
    reserved_bytes: int | None
    """By the driver and firmware, and not in `used_bytes`; None from a driver that counts it in."""
    source: str


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    used_bytes: int | None
    graphics: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """What changes from moment to moment; `absent` has the reason of each that is None."""

    memory: NvmlMemory | None = None
    processes: tuple[GpuProcess, ...] | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NvmlFacts:
    """What stays; `absent` has the reason of each that is None."""

    missing: str | None = None
    """Why NVML says nothing at all of this card."""
    driver_version: str | None = None
    driver_model: str | None = None
    """WDDM, TCC or MCDM, on Windows."""
    display_active: bool | None = None
    mig_mode: bool | None = None
    mig_slice: bool = False
    virtualization: str | None = None
    pcie_generation_max: int | None = None
    pcie_width_max: int | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Facts:
    """Of the card, the driver and the machine."""

    name: str
    uuid: str
    integrated: bool
    card_bytes: int
    """By the device's properties."""
    backend: str
    """Of PyTorch's allocator."""
    nvml: NvmlFacts
    system: System


@dataclass(frozen=True, slots=True)
class Figures:
    """One instant, as far as calls that follow one another can have it."""

    total_bytes: int
    """By cudaMemGetInfo, as is the next."""
    free_bytes: int
    pool: Pool
    nvml: Sample
    ram: Ram | None = None
    """Where device memory is the host's."""
