"""Machines with the card to themselves, slices of one, and sources that fail or contradict."""

import pynvml
from fake_cuda import Gpu
from fake_nvml import FakeNvml
from machine import (
    BLIND,
    COMPUTE,
    GRAPHICS,
    LINK,
    LOST,
    MEMORY,
    NO_FUNCTION,
    OTHER,
    PID,
    Machine,
    board,
    failing,
    gib,
)

from residency.offload.cuda.system import System
from residency.offload.device import FindingKind as Kind

CARDS: dict[str, Machine] = {
    "RTX 5090, 31.4 GiB": Machine(31.4, 31.025, FakeNvml(board(31.84, 0.375, 0.44))),
    "RTX 4090, 23.52 GiB": Machine(
        23.52, 23.145, FakeNvml(board(23.99, 0.375, 0.47)), plan="streams"
    ),
    "L4, sold as 24 GB, 22.03 GiB": Machine(
        22.03, 21.655, FakeNvml(board(22.49, 0.375, 0.46)), plan="streams"
    ),
    "a 24 GB card that says 22.06 GiB": Machine(
        22.06, 21.685, FakeNvml(board(22.49, 0.375, 0.43)), plan="streams"
    ),
    "H200, 139.8 GiB": Machine(139.8, 139.425, FakeNvml(board(140.4, 0.375, 0.6))),
    "no NVML library": Machine(
        31.4,
        31.025,
        FakeNvml(fails=failing(pynvml.NVMLError_LibraryNotFound, "nvmlInit_v2")),
        findings=BLIND,
    ),
    "library but no driver": Machine(
        31.4,
        31.025,
        FakeNvml(fails=failing(pynvml.NVMLError_DriverNotLoaded, "nvmlInit_v2")),
        findings=BLIND,
    ),
    "NVML isn't asked": Machine(31.4, 31.025, None, findings=BLIND),
    "old driver without the v2 of memory and the v3 of processes": Machine(
        31.4,
        31.025,
        FakeNvml(
            board(
                31.84,
                0.375,
                0.44,
                fails=failing(NO_FUNCTION, MEMORY[1], COMPUTE[1], GRAPHICS[1]),
            ),
            driver="470.256.02",
        ),
    ),
    "ME-04: MIG slice of 16 GB, NVML knows the whole H200": Machine(
        16.0,
        15.625,
        FakeNvml(board(141.0, 70.0, mig_mode=1, others={OTHER: 69.0})),
        system=System("linux", wsl=False, pids=(PID,), expandable_segments=True),
        findings=frozenset(
            {
                Kind.TOTALS_DISAGREE,
                Kind.SLICE,
                Kind.EXPANDABLE_ON_SLICE,
                Kind.FOREIGN,
            }
        ),
        plan="doesn't fit",
    ),
    "MIG slice of 71 GB, found by its own UUID": Machine(
        69.5,
        69.125,
        FakeNvml(
            board(69.5, 0.375, uuid="MIG-a", parent=board(140.4, uuid="GPU-whole", mig_mode=1))
        ),
        findings=frozenset({Kind.SLICE}),
    ),
    "vGPU of half an A40": Machine(
        24.0,
        23.625,
        FakeNvml(board(48.0, 0.375, virtualization=2)),
        findings=frozenset({Kind.TOTALS_DISAGREE, Kind.SLICE}),
        plan="streams",
    ),
    "two cards, the order turned by CUDA_VISIBLE_DEVICES": Machine(
        31.4,
        31.025,
        FakeNvml(
            board(23.99, 20.0, 0.47, uuid="GPU-b", shown=False, others={OTHER: 20.0}),
            board(31.84, 0.375, 0.44),
        ),
    ),
    "two cards, the second by index": Machine(
        31.4,
        31.025,
        FakeNvml(
            board(31.84, 0.375, 0.44),
            board(23.99, 20.0, 0.47, uuid="GPU-b", shown=False, others={OTHER: 20.0}),
        ),
        before=(Gpu("NVIDIA GeForce RTX 4090", "b", gib(23.52), gib(3.0)),),
    ),
    "a UUID that NVML doesn't know": Machine(
        31.4, 31.025, FakeNvml(board(31.84, uuid="GPU-b")), findings=BLIND
    ),
    "a card without a UUID": Machine(
        31.4,
        31.025,
        FakeNvml(board(31.84)),
        uuid="00000000-0000-0000-0000-000000000000",
        findings=BLIND,
    ),
    "NVML says more used than there is": Machine(
        31.4,
        31.025,
        FakeNvml(board(31.84, 40.0, free=0.0)),
        findings=frozenset({Kind.IMPOSSIBLE_MEMORY}),
    ),
    "NVML says more free than there is": Machine(
        31.4,
        31.025,
        FakeNvml(board(31.84, 0.375, free=40.0)),
        findings=frozenset({Kind.IMPOSSIBLE_MEMORY}),
    ),
    "the driver keeps more than a twentieth": Machine(
        30.5,
        30.125,
        FakeNvml(board(31.84, 0.375, 1.7, free=29.765)),
    ),
    "CUDA says nonsense of a slice, and NVML knows the whole card only": Machine(
        16.0,
        17.0,
        FakeNvml(board(141.0, 70.0, mig_mode=1)),
        right_free=0.0,
        context=0.375,
        others=15.625,
        findings=frozenset({Kind.SLICE, Kind.IMPOSSIBLE_MEMORY}),
        plan="doesn't fit",
    ),
    "nobody but NVML knows the size of the card": Machine(
        0.0,
        0.0,
        FakeNvml(board(31.84, 0.375, 0.44)),
        card_size=0.0,
        right_total=31.84,
        right_free=31.025,
        others=0.44,
        findings=frozenset({Kind.IMPOSSIBLE_MEMORY}),
    ),
    "CUDA says more free than there is": Machine(
        31.4,
        33.0,
        FakeNvml(board(31.84, 0.375, 0.44)),
        right_free=31.025,
        findings=frozenset({Kind.IMPOSSIBLE_MEMORY}),
    ),
    "CUDA says more free than there is, and NVML is silent": Machine(
        31.4,
        33.0,
        None,
        right_free=0.0,
        context=31.4,
        findings=BLIND | {Kind.IMPOSSIBLE_MEMORY},
        plan="doesn't fit",
    ),
    "CUDA says zeros": Machine(
        0.0,
        0.0,
        FakeNvml(board(31.84, 0.375, 0.44)),
        card_size=31.4,
        right_total=31.4,
        right_free=31.025,
        findings=frozenset({Kind.IMPOSSIBLE_MEMORY}),
    ),
    "CUDA's total ran over": Machine(
        17179869184.0 / 4,
        31.025,
        FakeNvml(board(31.84, 0.375, 0.44)),
        card_size=31.4,
        right_total=31.4,
        right_free=31.025,
        findings=frozenset({Kind.IMPOSSIBLE_MEMORY}),
    ),
    "GPU is lost to NVML": Machine(
        31.4,
        31.025,
        FakeNvml(board(31.84, fails=failing(LOST, *MEMORY, *COMPUTE, *GRAPHICS, *LINK))),
        findings=frozenset({Kind.NO_MEMORY, Kind.NO_PROCESSES, Kind.OTHERS_UNKNOWN}),
    ),
    "NVML knows nothing but memory": Machine(
        31.4,
        31.025,
        FakeNvml(
            board(
                31.84,
                0.375,
                0.44,
                fails=failing(
                    pynvml.NVMLError_Unknown,
                    *COMPUTE,
                    *GRAPHICS,
                    *LINK,
                    "nvmlDeviceGetDisplayActive",
                    "nvmlDeviceGetMigMode",
                    "nvmlDeviceGetVirtualizationMode",
                    "nvmlDeviceIsMigDeviceHandle",
                ),
            ),
            fails=failing(pynvml.NVMLError_Unknown, "nvmlSystemGetDriverVersion"),
        ),
        findings=frozenset({Kind.NO_PROCESSES, Kind.OTHERS_UNKNOWN}),
    ),
    "NVML and CUDA disagree on what is free": Machine(
        31.4,
        31.025,
        FakeNvml(board(31.84, 5.0, 0.44, own=0.375)),
        right_free=26.4,
        others=4.625,
        findings=frozenset({Kind.FREE_DISAGREES}),
        plan="streams",
    ),
    "AL-02: cudaMallocAsync, 54.14 of 79.35 GiB allocated and 27 MiB free": Machine(
        79.35,
        0.0266,
        FakeNvml(board(79.65, 79.3234, 0.3, own=79.3234)),
        reserved=78.9,
        allocated=54.14,
        backend="cudaMallocAsync",
        context=0.4234,
        findings=frozenset({Kind.ASYNC_ALLOCATOR, Kind.NO_RETRIES}),
        granularity=32 / 1024,
    ),
    "AL-04: 1.83 GiB in pieces on 79.18": Machine(
        79.18,
        1.09,
        FakeNvml(board(79.6, 78.09, 0.42, own=78.09)),
        reserved=77.14,
        allocated=75.31,
        context=0.95,
    ),
}
