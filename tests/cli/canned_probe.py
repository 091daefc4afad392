"""Machines as `residency probe` may find them."""

from residency.cli.survey import Machine, ProbedCard, Unreadable, host_figures, probed_card
from residency.offload.cuda.reconcile import reconcile
from residency.offload.cuda.system import (
    Facts,
    Figures,
    GpuProcess,
    NvmlFacts,
    NvmlMemory,
    Pool,
    Ram,
    Sample,
    System,
)
from residency.offload.host_memory import HostLimits, HostMemory, LockLimit

GIB = 1 << 30
PID = 4242


def gib(size: float) -> int:
    return round(size * GIB)


def machine(*cards: ProbedCard, **more: object) -> Machine:
    limits = HostLimits(
        (
            HostMemory(gib(48), "RAM available", gib(64)),
            HostMemory(gib(30), "/sys/fs/cgroup/memory.max", gib(32)),
        ),
        LockLimit(8 << 20, 0),
    )
    values = {
        "residency_version": "0.1.0",
        "torch_version": "2.13.0+cu130",
        "cards": cards,
        "unreadable": (),
        "no_card": None,
        "hint": None,
        "no_nvml": None,
        "host": tuple(host_figures(limits, any(card.unified for card in cards))),
    }
    return Machine.model_validate(values | more)


def _facts(name: str, card_gib: float, nvml: NvmlFacts, **more: object) -> Facts:
    values = {
        "name": name,
        "uuid": "GPU-8a5b1c2d-0000-4000-8000-1234567890ab",
        "integrated": False,
        "card_bytes": gib(card_gib),
        "backend": "native",
        "nvml": nvml,
        "system": System("linux", wsl=False, pids=(PID,)),
    }
    return Facts(**(values | more))  # type: ignore[arg-type]


_PRESENT = {
    "driver_version": "580.65.06",
    "display_active": False,
    "virtualization": "none",
    "pcie_generation_max": 5,
    "pcie_width_max": 16,
}
_ABSENT = {
    "driver_model": "nvmlDeviceGetDriverModel_v1: Not Supported",
    "mig_mode": "nvmlDeviceGetMigMode: Not Supported",
}

DESKTOP = probed_card(
    "cuda:0",
    reconcile(
        _facts(
            "NVIDIA GeForce RTX 5090",
            31.4,
            NvmlFacts(**(_PRESENT | {"display_active": True}), absent=_ABSENT),  # type: ignore[arg-type]
        ),
        Figures(
            gib(31.4),
            gib(28.5),
            Pool(gib(0.4), gib(0.5), gib(0.4), gib(0.5)),
            Sample(
                NvmlMemory(
                    gib(31.84), gib(28.5), gib(2.9), gib(0.44), "nvmlDeviceGetMemoryInfo v2"
                ),
                (
                    GpuProcess(PID, gib(0.9)),
                    GpuProcess(1200, gib(1.5), graphics=True),
                    GpuProcess(1300, gib(0.5), graphics=True),
                ),
            ),
        ),
    ),
)
SLICE = probed_card(
    "cuda:1",
    reconcile(
        _facts(
            "NVIDIA H200 MIG 1g.18gb",
            16.0,
            NvmlFacts(**_PRESENT, mig_mode=True, absent={"driver_model": "Not Supported"}),  # type: ignore[arg-type]
            uuid="GPU-0f0e0d0c-0000-4000-8000-ba0987654321",
            backend="cudaMallocAsync",
            system=System("linux", wsl=False, pids=(PID,), expandable_segments=True),
        ),
        Figures(
            gib(16.0),
            gib(15.6),
            Pool(),
            Sample(
                NvmlMemory(gib(141.0), gib(70.0), gib(71.0), None, "nvmlDeviceGetMemoryInfo"),
                absent={
                    "processes": "nvmlDeviceGetComputeRunningProcesses_v2: Insufficient Permissions"
                },
            ),
        ),
    ),
)
UNIFIED = probed_card(
    "cuda:0",
    reconcile(
        _facts(
            "NVIDIA GB10",
            121.0,
            NvmlFacts(missing="nvmlInit: NVML Shared Library Not Found"),
            uuid="",
            integrated=True,
        ),
        Figures(gib(121.0), gib(41.52), Pool(), Sample(), Ram(gib(121.0), gib(115.65))),
    ),
)

TWO_CARDS = machine(DESKTOP, SLICE)
ONE_POOL = machine(UNIFIED, no_nvml="nvmlInit: NVML Shared Library Not Found")
LOST = machine(
    unreadable=(
        Unreadable(
            device="cuda:0",
            message="cuda:0 doesn't say its memory: CUDA error: GPU is lost",
            hint="its driver may need a restart: see nvidia-smi",
        ),
    ),
)
NO_CARD = machine(
    torch_version="2.13.0+cpu",
    no_card="torch 2.13.0+cpu has no CUDA compiled in",
    hint="install a build of torch for CUDA, or simulate a card with --card",
    no_nvml="nvmlInit: NVML Shared Library Not Found",
)
