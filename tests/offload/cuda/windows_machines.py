"""Machines where the operating system pages device memory: WDDM and MCDM, WSL; and TCC."""

import pynvml
from fake_nvml import FakeNvml
from machine import (
    BLIND,
    MCDM,
    NO_FUNCTION,
    OTHER,
    TCC,
    WDDM,
    WINDOWS,
    WSL,
    Machine,
    board,
    failing,
    gib,
)

from residency.offload.device import FindingKind as Kind

PAGED: dict[str, Machine] = {
    "WS-05: WSL, 30 GiB allocated on a card of 15.99, and counters that ran over": Machine(
        15.99,
        0.0,
        FakeNvml(
            board(
                15.99,
                used_bytes=(1 << 64) - gib(14.01),
                free=0.0,
                own=17179869184 - 14.01,
            )
        ),
        system=WSL,
        reserved=30.0,
        allocated=30.0,
        context=0.0,
        findings=frozenset(
            {
                Kind.SPILLS,
                Kind.IMPOSSIBLE_MEMORY,
                Kind.IMPOSSIBLE_PROCESS,
                Kind.ALLOCATOR_ABOVE_CARD,
                Kind.OTHERS_UNKNOWN,
            }
        ),
        plan="doesn't fit",
        spills=True,
    ),
    "WSL, all in order": Machine(
        31.4,
        29.8,
        FakeNvml(board(31.84, 1.6, 0.44, own=None)),
        system=WSL,
        context=1.6,
        findings=frozenset({Kind.SPILLS, Kind.OTHERS_UNKNOWN}),
        spills=True,
    ),
    "FD-04: WDDM hides 3.2 of 22 GiB from NVML": Machine(
        22.0,
        18.3,
        FakeNvml(board(22.0, 0.5, own=None, driver_model=WDDM)),
        system=WINDOWS,
        context=3.7,
        findings=frozenset({Kind.SPILLS, Kind.FREE_DISAGREES, Kind.OTHERS_UNKNOWN}),
        plan="streams",
        spills=True,
    ),
    "FD-02: Windows desktop on a 4090, 5 GiB held by programs": Machine(
        23.99,
        18.99,
        FakeNvml(
            board(
                23.99,
                5.0,
                own=None,
                others={OTHER: None},
                graphics={OTHER: None},
                display_active=1,
                driver_model=WDDM,
            )
        ),
        system=WINDOWS,
        context=5.0,
        findings=frozenset({Kind.SPILLS, Kind.DESKTOP, Kind.OTHERS_UNKNOWN}),
        plan="streams",
        spills=True,
        drift=1.0,
    ),
    "Windows with TCC": Machine(
        47.5,
        47.125,
        FakeNvml(board(47.99, 0.375, 0.49, driver_model=TCC)),
        system=WINDOWS,
    ),
    "Windows with TCC, by a driver that has the older call only": Machine(
        47.5,
        47.125,
        FakeNvml(
            board(
                47.99,
                0.375,
                0.49,
                driver_model=TCC,
                fails=failing(NO_FUNCTION, "nvmlDeviceGetDriverModel_v2"),
            )
        ),
        system=WINDOWS,
    ),
    "Windows with MCDM": Machine(
        47.5,
        47.125,
        FakeNvml(board(47.99, 0.375, 0.49, own=None, driver_model=MCDM)),
        system=WINDOWS,
        findings=frozenset({Kind.SPILLS, Kind.OTHERS_UNKNOWN}),
        spills=True,
    ),
    "Windows without NVML": Machine(
        31.4,
        30.4,
        FakeNvml(fails=failing(pynvml.NVMLError_LibraryNotFound, "nvmlInit_v2")),
        system=WINDOWS,
        context=1.0,
        findings=BLIND | {Kind.DRIVER_MODEL},
        spills=True,
    ),
}
