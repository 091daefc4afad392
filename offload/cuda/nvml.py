"""NVML, the driver's own account of a card: what other processes hold, and what CUDA doesn't tell.

Cards are found by UUID and never by index: `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` renumber
what CUDA sees, and NVML knows nothing of either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ..device import Term
from .system import GpuProcess, NvmlFacts, NvmlMemory, Sample

_NOT_AVAILABLE = (1 << 64) - 1
"""NVML_VALUE_NOT_AVAILABLE: a process's memory that isn't told."""
_MEMORY_V2 = 0x02000028
_MODELS = {0: "WDDM", 1: "TCC", 2: "MCDM"}
_VIRTUALIZATION = {0: "none", 1: "passthrough", 2: "vGPU", 3: "host of vGPUs", 4: "host of vSGAs"}

_DRIVER_MODEL = ("nvmlDeviceGetCurrentDriverModel", "nvmlDeviceGetDriverModel_v1")
_COMPUTE = (
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetComputeRunningProcesses_v2",
)
_GRAPHICS = (
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v2",
)


class Nvml:
    """One session. Opening it doesn't fail: `absence` says why there is no NVML.

    Reads are safe from any thread. The session ends with `close`, or with this object.
    """

    def __init__(self, library: Any = None) -> None:
        self.library = library
        self.absence: str | None = None
        self._end: Callable[[], object] = lambda: None
        try:
            if self.library is None:
                self.library = import_module("pynvml")
            self.library.nvmlInit()
        except ImportError:
            self.absence = "nvidia-ml-py isn't installed"
        except self._errors as error:
            self.absence = f"nvmlInit: {error}"
        else:
            self._end = weakref.finalize(self, self.library.nvmlShutdown)

    @property
    def _errors(self) -> type[Exception]:
        error: type[Exception] = self.library.NVMLError
        return error

    def close(self) -> None:
        self._end()
        self.absence = self.absence or "the session is closed"

    def card(self, uuid: str) -> NvmlCard:
        """The card that CUDA gives this UUID, with `GPU-` or `MIG-` before it or without."""
        return NvmlCard(self, uuid)

    def ask(self, names: Sequence[str], *arguments: Any) -> tuple[Any, str]:
        """The answer of the first function that has one, and its name; or None, and why the last
        had none: newer names come first, which older drivers and bindings don't know."""
        if self.absence is not None:
            return None, self.absence
        reason = ""
        for name in names:
            function = getattr(self.library, name, None)
            if function is None:
                reason = f"{name}: this nvidia-ml-py doesn't have it"
                continue
            try:
                return function(*arguments), name
            except self._errors as error:
                reason = f"{name}: {error}"
        return None, reason


class NvmlCard:
    """What NVML says of one card; where it doesn't, that and why."""

    def __init__(self, nvml: Nvml, uuid: str) -> None:
        self._nvml = nvml
        self.uuid, self._handle, missing = _find(nvml, uuid)
        # Slices of a card leave the bus, the driver model and the display to the whole card.
        self._board, self._is_slice = _board(nvml, self._handle)
        self._memory_calls = [
            ("nvmlDeviceGetMemoryInfo v2", (getattr(nvml.library, "nvmlMemory_v2", _MEMORY_V2),)),
            ("nvmlDeviceGetMemoryInfo", ()),
        ]
        self.facts = self._read_facts(missing)

    def _read_facts(self, missing: str | None) -> NvmlFacts:
        if missing is not None:
            return NvmlFacts(missing=missing)
        absent: dict[str, str] = {}

        def fact(field: str, *names: str) -> Any:
            answer, reason = self._nvml.ask(names, self._board)
            if answer is None:
                absent[field] = reason
            return answer

        driver, why = self._nvml.ask(("nvmlSystemGetDriverVersion",))
        if driver is None:
            absent["driver_version"] = why
        model = fact("driver_model", *_DRIVER_MODEL)
        display = fact("display_active", "nvmlDeviceGetDisplayActive")
        mig = fact("mig_mode", "nvmlDeviceGetMigMode")
        virtual = fact("virtualization", "nvmlDeviceGetVirtualizationMode")
        return NvmlFacts(
            driver_version=driver.decode() if isinstance(driver, bytes) else driver,
            driver_model=_named(model[0] if isinstance(model, list) else model, _MODELS),
            display_active=None if display is None else bool(display),
            mig_mode=None if mig is None else bool(mig[0]),
            mig_slice=self._is_slice,
            virtualization=_named(virtual, _VIRTUALIZATION),
            pcie_generation_max=fact("pcie_generation_max", "nvmlDeviceGetMaxPcieLinkGeneration"),
            pcie_width_max=fact("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth"),
            absent=absent,
        )

    def sample(self) -> Sample:
        """Memory and processes, now: a few calls of the driver."""
        if self.facts.missing is not None:
            return Sample()
        absent: dict[str, str] = {}
        memory, why = self._memory()
        if memory is None:
            absent["memory"] = why
        processes, why = self._processes()
        if why:
            absent["processes"] = why
        return Sample(memory, processes, absent)

    def link(self) -> tuple[Term, ...]:
        """The bus as it is now: an idle card lowers its generation."""
        if self.facts.missing is not None:
            return ()
        terms = []
        for name, unit, call in (
            ("PCIe generation now", "", "nvmlDeviceGetCurrPcieLinkGeneration"),
            ("PCIe lanes now", "lanes", "nvmlDeviceGetCurrPcieLinkWidth"),
        ):
            answer, source = self._nvml.ask((call,), self._board)
            terms.append(Term(name, answer, unit, source))
        return tuple(terms)

    def _memory(self) -> tuple[NvmlMemory | None, str]:
        reason = ""
        for call in tuple(self._memory_calls):
            source, version = call
            answer, reason = self._nvml.ask(("nvmlDeviceGetMemoryInfo",), self._handle, *version)
            if answer is not None:
                # What a driver answered once is asked alone from then on.
                self._memory_calls = [call]
                reserved = answer.reserved if version else None
                found = NvmlMemory(answer.total, answer.free, answer.used, reserved, source)
                return found, ""
        return None, reason

    def _processes(self) -> tuple[tuple[GpuProcess, ...] | None, str]:
        compute, why = self._nvml.ask(_COMPUTE, self._handle)
        graphics, why_not = self._nvml.ask(_GRAPHICS, self._handle)
        if compute is None:
            return None, why
        found: dict[int, GpuProcess] = {}
        for entries, drawing in ((compute, False), (graphics or (), True)):
            for entry in entries:
                told = None if entry.usedGpuMemory == _NOT_AVAILABLE else entry.usedGpuMemory
                known = found.get(entry.pid, GpuProcess(entry.pid, None))
                sizes = [size for size in (known.used_bytes, told) if size is not None]
                found[entry.pid] = GpuProcess(entry.pid, max(sizes, default=None), drawing)
        return tuple(found.values()), "" if graphics is not None else why_not


def _find(nvml: Nvml, uuid: str) -> tuple[str, Any, str | None]:
    """The UUID as NVML has it, the handle, or why there is none."""
    if not uuid.strip("-0"):
        return uuid, None, nvml.absence or "CUDA gives the card no UUID to find it by"
    named = uuid.startswith(("GPU-", "MIG-"))
    reason = ""
    for name in (uuid,) if named else (f"GPU-{uuid}", f"MIG-{uuid}"):
        handle, why = nvml.ask(("nvmlDeviceGetHandleByUUID",), name)
        if handle is not None:
            return name, handle, None
        reason = reason or why
    return uuid, None, nvml.absence or f"no card has the UUID {uuid} ({reason})"


def _board(nvml: Nvml, handle: Any) -> tuple[Any, bool]:
    if handle is None:
        return None, False
    is_slice, _ = nvml.ask(("nvmlDeviceIsMigDeviceHandle",), handle)
    if not getattr(is_slice, "value", is_slice):
        return handle, False
    board, _ = nvml.ask(("nvmlDeviceGetDeviceHandleFromMigDeviceHandle",), handle)
    return (handle if board is None else board), True


def _named(value: Any, names: dict[int, str]) -> str | None:
    return None if value is None else names.get(value, str(value))
