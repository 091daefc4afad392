"""NVML at its C boundary: nvidia-ml-py's functions, structures and errors, over made-up cards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pynvml

NVMLError = pynvml.NVMLError
NOT_AVAILABLE = (1 << 64) - 1

Process = tuple[int, int | None]
"""A pid, and bytes or None for what NVML_VALUE_NOT_AVAILABLE stands for."""


@dataclass
class Board:
    """`fails`: by the name of the C function, the error that it answers."""

    uuid: str
    total_bytes: int = 0
    used_bytes: int = 0
    reserved_bytes: int = 0
    free_bytes: int | None = None
    """Total less used and reserved, unless it is given."""
    compute: list[Process] = field(default_factory=list)
    graphics: list[Process] = field(default_factory=list)
    driver_model: int | None = None
    display_active: int = 0
    mig_mode: int | None = None
    virtualization: int = 0
    link: tuple[int, int] = (1, 16)
    link_max: tuple[int, int] = (4, 16)
    parent: Board | None = None
    """The whole card, of a MIG slice."""
    fails: Mapping[str, type[Exception]] = field(default_factory=dict)


class FakeNvml:
    """`fails` is for functions that ask no card, such as nvmlInit_v2."""

    NVMLError = NVMLError
    nvmlMemory_v2 = pynvml.nvmlMemory_v2

    def __init__(
        self, *boards: Board, driver: str = "580.65.06", fails: Mapping[str, type[Exception]] = {}
    ) -> None:
        self.boards = {board.uuid: board for board in boards}
        self.driver = driver
        self.fails = dict(fails)
        self.sessions = 0
        self.inits = 0
        self.calls: list[str] = []

    def _called(self, name: str, board: Board | None = None) -> None:
        self.calls.append(name)
        if self.sessions < 1 and name != "nvmlInit_v2":
            raise pynvml.NVMLError_Uninitialized()
        error = self.fails.get(name) or (board.fails.get(name) if board else None)
        if error is not None:
            raise error()

    def nvmlInit(self) -> None:
        self._called("nvmlInit_v2")
        self.sessions += 1
        self.inits += 1

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._called("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Board:
        self._called("nvmlDeviceGetHandleByUUID")
        if uuid not in self.boards:
            raise pynvml.NVMLError_NotFound()
        return self.boards[uuid]

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Board:
        raise AssertionError("a card was looked up by its index")

    def nvmlDeviceGetMemoryInfo(self, board: Board, version: int | None = None) -> Any:
        self._called("nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo", board)
        answer = pynvml.c_nvmlMemory_v2_t() if version else pynvml.c_nvmlMemory_t()
        free = board.total_bytes - board.used_bytes - board.reserved_bytes
        answer.total = board.total_bytes
        answer.free = free if board.free_bytes is None else board.free_bytes
        answer.used = board.used_bytes
        if version:
            answer.reserved = board.reserved_bytes
        else:
            answer.used += board.reserved_bytes
        return answer

    def nvmlDeviceGetComputeRunningProcesses_v3(self, board: Board) -> list[Any]:
        self._called("nvmlDeviceGetComputeRunningProcesses_v3", board)
        return _entries(board.compute)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, board: Board) -> list[Any]:
        self._called("nvmlDeviceGetComputeRunningProcesses_v2", board)
        return _entries(board.compute)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, board: Board) -> list[Any]:
        self._called("nvmlDeviceGetGraphicsRunningProcesses_v3", board)
        return _entries(board.graphics)

    def nvmlDeviceGetGraphicsRunningProcesses_v2(self, board: Board) -> list[Any]:
        self._called("nvmlDeviceGetGraphicsRunningProcesses_v2", board)
        return _entries(board.graphics)

    def nvmlDeviceGetCurrentDriverModel(self, board: Board) -> int:
        self._called("nvmlDeviceGetDriverModel_v2", board)
        return _supported(board.driver_model)

    def nvmlDeviceGetDriverModel_v1(self, board: Board) -> list[int]:
        self._called("nvmlDeviceGetDriverModel", board)
        return [_supported(board.driver_model)] * 2

    def nvmlDeviceGetDisplayActive(self, board: Board) -> int:
        self._called("nvmlDeviceGetDisplayActive", board)
        return _of_whole_card(board).display_active

    def nvmlDeviceGetMigMode(self, board: Board) -> list[int]:
        self._called("nvmlDeviceGetMigMode", board)
        return [_supported(_of_whole_card(board).mig_mode)] * 2

    def nvmlDeviceGetVirtualizationMode(self, board: Board) -> int:
        self._called("nvmlDeviceGetVirtualizationMode", board)
        return board.virtualization

    def nvmlDeviceGetCurrPcieLinkGeneration(self, board: Board) -> int:
        self._called("nvmlDeviceGetCurrPcieLinkGeneration", board)
        return _of_whole_card(board).link[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, board: Board) -> int:
        self._called("nvmlDeviceGetCurrPcieLinkWidth", board)
        return _of_whole_card(board).link[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, board: Board) -> int:
        self._called("nvmlDeviceGetMaxPcieLinkGeneration", board)
        return _of_whole_card(board).link_max[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, board: Board) -> int:
        self._called("nvmlDeviceGetMaxPcieLinkWidth", board)
        return _of_whole_card(board).link_max[1]

    def nvmlDeviceIsMigDeviceHandle(self, board: Board) -> Any:
        self._called("nvmlDeviceIsMigDeviceHandle", board)
        return pynvml.c_uint(board.parent is not None)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, board: Board) -> Board:
        self._called("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", board)
        assert board.parent is not None
        return board.parent


def _entries(processes: Iterable[Process]) -> list[Any]:
    """As nvidia-ml-py gives them: None already stands for what isn't available."""
    return [
        pynvml.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": used}) for pid, used in processes
    ]


def _supported(value: int | None) -> int:
    if value is None:
        raise pynvml.NVMLError_NotSupported()
    return value


def _of_whole_card(board: Board) -> Board:
    """What only a whole card answers."""
    if board.parent is not None:
        raise pynvml.NVMLError_NotSupported()
    return board
