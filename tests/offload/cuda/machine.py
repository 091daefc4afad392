"""A machine: what each source says there, in GiB, and what is right."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pynvml
from fake_cuda import FakeCuda, Gpu
from fake_nvml import Board, FakeNvml

from residency.offload.cuda.device import CudaDevice
from residency.offload.cuda.nvml import Nvml
from residency.offload.cuda.system import Ram, System
from residency.offload.device import FindingKind as Kind

MIB = 1 << 20
GIB = 1 << 30
PID = 4242
"""This process's, as it knows itself."""
OTHER = 977

LINUX = System("linux", wsl=False, pids=(PID,))
WSL = System("linux", wsl=True, pids=(PID,))
WINDOWS = System("win32", wsl=False, pids=(PID,))
WDDM, TCC, MCDM = 0, 1, 2

NOT_SUPPORTED = pynvml.NVMLError_NotSupported
NO_PERMISSION = pynvml.NVMLError_NoPermission
NO_FUNCTION = pynvml.NVMLError_FunctionNotFound
LOST = pynvml.NVMLError_GpuIsLost

Plan = Literal["retains", "streams", "doesn't fit", "no offload"]
"""What becomes of the text encoder's set; `no offload` is for machines of one pool."""

MEMORY = ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")
COMPUTE = tuple(f"nvmlDeviceGetComputeRunningProcesses_v{n}" for n in (2, 3))
GRAPHICS = tuple(f"nvmlDeviceGetGraphicsRunningProcesses_v{n}" for n in (2, 3))
LINK = tuple(
    f"nvmlDeviceGet{which}PcieLink{what}"
    for which in ("Curr", "Max")
    for what in ("Generation", "Width")
)


def gib(size: float) -> int:
    return round(size * GIB)


def failing(error: type[Exception], *names: str) -> dict[str, type[Exception]]:
    return dict.fromkeys(names, error)


def board(
    total: float,
    used: float = 0.0,
    reserved: float = 0.0,
    *,
    uuid: str = "GPU-a",
    free: float | None = None,
    own: float | None = 0.375,
    shown: bool = True,
    pid: int = PID,
    others: Mapping[int, float | None] = {},
    graphics: Mapping[int, float | None] = {},
    used_bytes: int | None = None,
    **more: object,
) -> Board:
    """`own` is this process's use, which NVML lists under `pid` if it is `shown`."""
    compute = {**({pid: own} if shown else {}), **others}
    return Board(
        uuid,
        gib(total),
        gib(used) if used_bytes is None else used_bytes,
        gib(reserved),
        None if free is None else gib(free),
        [(number, None if size is None else gib(size)) for number, size in compute.items()],
        [(number, None if size is None else gib(size)) for number, size in graphics.items()],
        **more,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Machine:
    """CUDA's figures, NVML's boards, the system; and behind `right` what should come of them."""

    total: float
    free: float
    nvml: FakeNvml | None = None
    reserved: float = 0.0
    allocated: float = 0.0
    card: str = "NVIDIA card"
    uuid: str = "a"
    card_size: float | None = None
    system: System = LINUX
    ram: Ram | None = None
    backend: str = "native"
    neighbour: float = 0.0
    """What another process takes between the first reading and the second."""
    before: tuple[Gpu, ...] = ()
    """Cards that CUDA counts before this one."""

    right_total: float | None = None
    """As CUDA says, unless it is given; so is the next."""
    right_free: float | None = None
    others: float = 0.0
    context: float | None = 0.375
    """None for all that is neither free nor PyTorch's: the host's programs hold it too."""
    findings: frozenset[Kind] = frozenset()
    plan: Plan = "retains"
    spills: bool = False
    drift: float = 0.0
    granularity: float = 2 / 1024

    def device(self) -> CudaDevice:
        gpu = Gpu(
            self.card,
            self.uuid,
            gib(self.total),
            gib(self.free + self.neighbour),
            None if self.card_size is None else gib(self.card_size),
            self.ram is not None,
            gib(self.reserved),
            gib(self.allocated),
        )
        library = copy.deepcopy(self.nvml)
        if library is not None and self.neighbour:
            grown = library.boards[f"GPU-{self.uuid}"]
            grown.used_bytes -= gib(self.neighbour)
        cuda = FakeCuda([*self.before, gpu], self.backend)
        device = CudaDevice(
            len(self.before),
            runtime=cuda,
            nvml=None if library is None else Nvml(library),
            system=self.system,
            ram=self._ram,
        )
        gpu.free_bytes = gib(self.free)
        if library is not None and self.neighbour:
            grown.used_bytes += gib(self.neighbour)
        return device

    def _ram(self) -> Ram:
        return self.ram or Ram(gib(64), gib(48))


POOL = frozenset({Kind.UNIFIED, Kind.OS_RESERVE})
"""Found on every machine whose device memory is the host's."""
BLIND = frozenset({Kind.NO_NVML, Kind.OTHERS_UNKNOWN})
"""Found where NVML says nothing."""
