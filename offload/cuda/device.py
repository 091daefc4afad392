"""A CUDA card behind the device interface."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch

from ..device import (
    GIB,
    Device,
    Identity,
    Inspection,
    Mark,
    Reading,
    Stream,
    Term,
    Traits,
    Transfers,
)
from ..errors import DeviceError, HostMemoryError, InputError
from ..memory_errors import OomKind, classify
from .nvml import Nvml
from .reconcile import reconcile, traits_of
from .split import split
from .system import Facts, Figures, NvmlFacts, Pool, Ram, Sample, System

_TRIES = 3
"""How often a reading is taken while the allocator moves under it."""
_NO_NVML = NvmlFacts(missing="it wasn't asked")
_DEVICE = re.compile(r"cuda(?::(\d+))?")

T = TypeVar("T")


def page_locked(host: torch.Tensor) -> torch.Tensor:
    """A copy of `host` from PyTorch's caching host allocator."""
    return torch.empty_like(host, pin_memory=True).copy_(host)


class CudaDevice(Device):
    """The card with this index among those that the process sees.

    `nvml`: a session that knows what other processes hold; without one all that isn't this
    process's tensors is charged to the context. `runtime`, `device_type`, `system`, `ram` and
    `page_lock` are where tests put something else than CUDA and this machine.

    Raises DeviceError where the card can't be read.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        runtime: Runtime | None = None,
        nvml: Nvml | None = None,
        device_type: str = "cuda",
        system: System | None = None,
        ram: Callable[[], Ram] = Ram.read,
        page_lock: Callable[[torch.Tensor], torch.Tensor] = page_locked,
    ) -> None:
        self.index = index
        self.runtime = cast(Runtime, torch.cuda) if runtime is None else runtime
        self._device_type = device_type
        self._ram = ram
        self._page_lock = page_lock
        self._transfers = Transfers()
        self._counting = threading.Lock()
        properties = self._ask("its properties", lambda: self.runtime.get_device_properties(index))
        uuid = str(getattr(properties, "uuid", "") or "")
        self._nvml = None if nvml is None else nvml.card(uuid)
        self.facts = Facts(
            name=properties.name,
            uuid=uuid if self._nvml is None else self._nvml.uuid,
            integrated=bool(getattr(properties, "is_integrated", False)),
            card_bytes=properties.total_memory,
            backend=self.runtime.get_allocator_backend(),
            nvml=_NO_NVML if self._nvml is None else self._nvml.facts,
            system=System.read() if system is None else system,
        )
        self._traits = traits_of(self.facts)
        self.first_reading = self.read()
        """What later growth of what isn't this process's is told by."""

    @classmethod
    def parse(cls, text: str, *, runtime: Runtime | None = None, **options: Any) -> CudaDevice:
        """The device called `cuda` (the first that is visible) or `cuda:1`. A session of NVML is
        opened for it unless one is given.

        Raises InputError where there is none.
        """
        runtime = cast(Runtime, torch.cuda) if runtime is None else runtime
        named = _DEVICE.fullmatch(text.strip())
        if named is None:
            raise InputError(f"{text!r} is no CUDA device", hint="write cuda or cuda:0")
        index = int(named[1] or 0)
        if index >= (count := visible_devices(runtime)):
            raise InputError(
                f"there is no cuda:{index}: this process sees {count}, cuda:0 to cuda:{count - 1}",
                hint=_visible(),
            )
        if "nvml" not in options:
            options["nvml"] = Nvml()
        return cls(index, runtime=runtime, **options)

    @property
    def identity(self) -> Identity:
        return Identity(self.facts.name, self.facts.uuid)

    @property
    def traits(self) -> Traits:
        return self._traits

    @property
    def driver(self) -> str | None:
        return self.facts.nvml.driver_version

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self._device_type, self.index)

    @property
    def transfers(self) -> Transfers:
        return self._transfers

    def count_copy(self, h2d_bytes: int = 0, d2h_bytes: int = 0) -> None:
        """CUDA doesn't tell what crossed the bus: whoever copies says so here, once a copy."""
        with self._counting:
            now = self._transfers
            if h2d_bytes:
                now = replace(
                    now, h2d_bytes=now.h2d_bytes + h2d_bytes, h2d_copies=now.h2d_copies + 1
                )
            if d2h_bytes:
                now = replace(
                    now, d2h_bytes=now.d2h_bytes + d2h_bytes, d2h_copies=now.d2h_copies + 1
                )
            self._transfers = now

    def read(self) -> Reading:
        return split(self.facts, self.figures()).reading

    def figures(self) -> Figures:
        """What each source says now. Raises DeviceError where the driver doesn't answer."""
        pool = self._pool()
        for _ in range(_TRIES):
            free, total = self._ask("its memory", lambda: self.runtime.mem_get_info(self.index))
            sample = Sample() if self._nvml is None else self._nvml.sample()
            before, pool = pool, self._pool()
            if pool.reserved_bytes == before.reserved_bytes:
                break
        ram = self._ram() if self.facts.integrated else None
        return Figures(total, free, pool, sample, ram)

    def inspect(self) -> Inspection:
        figures = self.figures()
        found = reconcile(self.facts, figures, first=self.first_reading)
        link = () if self._nvml is None else self._nvml.link()
        return replace(found, terms=(*found.terms, *link, *self._pinned()))

    def _pool(self) -> Pool:
        stats = self._ask("its allocator", lambda: self.runtime.memory_stats(self.index))
        return Pool(
            stats.get("allocated_bytes.all.current", 0),
            stats.get("reserved_bytes.all.current", 0),
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.peak", 0),
            stats.get("num_alloc_retries", 0),
        )

    def _pinned(self) -> tuple[Term, ...]:
        stats = self._ask("pinned host memory", self.runtime.host_memory_stats)
        source = "torch.cuda.host_memory_stats"
        return (
            Term("pinned, in use", stats.get("active_bytes.current", 0), "bytes", source),
            Term("pinned, with cache", stats.get("allocated_bytes.current", 0), "bytes", source),
        )

    def reset_peaks(self) -> None:
        self.runtime.reset_peak_memory_stats(self.index)

    def release_cache(self) -> None:
        self.runtime.empty_cache()

    def synchronize(self) -> None:
        self.runtime.synchronize(self.index)

    def new_stream(self) -> Stream:
        return cast(Stream, self.runtime.Stream(self.index))

    def current_stream(self) -> Stream:
        return cast(Stream, self.runtime.current_stream(self.index))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        with self.runtime.stream(cast(torch.Stream, stream)):
            yield

    def mark(self) -> Mark:
        event = self.runtime.Event(enable_timing=True)
        event.record(self.runtime.current_stream(self.index))
        return event

    def seconds(self, since: Mark, until: Mark) -> float:
        start, end = cast(torch.Event, since), cast(torch.Event, until)
        end.synchronize()
        return start.elapsed_time(end) / 1000

    def pin(self, host: torch.Tensor) -> torch.Tensor:
        try:
            return self._page_lock(host)
        except (RuntimeError, MemoryError) as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            kind = classify(error, pinning=True)
        # Outside of the handler: a traceback that is still alive keeps what its frames hold.
        if kind is not OomKind.HOST:
            raise DeviceError(f"pinning {host.nbytes} bytes failed: {first}")
        available = self._ram().available_bytes
        raise HostMemoryError(
            f"the host can't page-lock {host.nbytes} bytes, with {available} bytes of it available"
            f": it is host memory that is short, not the card's ({first})",
            hint="keep the masters pageable, pin less, or raise the limit of locked memory",
        )

    def is_defined(self, tensor: torch.Tensor) -> bool:
        return True

    def _ask(self, what: str, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise DeviceError(
                f"cuda:{self.index} doesn't say {what}: {first}",
                hint="other processes may hold all of the card, or its driver may need a restart: "
                "see nvidia-smi",
            ) from error

    def __str__(self) -> str:
        return f"{self.facts.name} ({self.facts.card_bytes / GIB:.2f} GiB)"


def visible_devices(runtime: Runtime | None = None) -> int:
    """How many devices this process sees. Raises InputError for none, with the reason."""
    runtime = cast(Runtime, torch.cuda) if runtime is None else runtime
    count = runtime.device_count() if runtime.is_available() else 0
    if count:
        return count
    if torch.version.cuda is None:
        raise InputError(
            f"torch {torch.__version__} has no CUDA compiled in",
            hint="install a build of torch for CUDA, or simulate a card with --card",
        )
    raise InputError("torch sees no CUDA device", hint=f"{_visible()}; --card simulates a card")


def _visible() -> str:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return "nvidia-smi -L lists what the driver sees"
    return f"CUDA_VISIBLE_DEVICES is {shown!r}; nvidia-smi -L lists what the driver sees"


class Runtime(Protocol):
    """`torch.cuda` has this shape. Devices are given as indices of what this process sees."""

    def is_available(self) -> bool: ...

    def device_count(self) -> int: ...

    def get_device_properties(self, device: int) -> Any:
        """`name`, `uuid`, `total_memory`, `is_integrated`, `major`, `minor`."""

    def mem_get_info(self, device: int) -> tuple[int, int]:
        """Free and total bytes, by the driver."""

    def memory_stats(self, device: int) -> dict[str, Any]: ...

    def host_memory_stats(self) -> dict[str, Any]: ...

    def get_allocator_backend(self) -> str: ...

    def reset_peak_memory_stats(self, device: int) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self, device: int) -> None: ...

    def current_stream(self, device: int) -> torch.Stream: ...

    def Stream(self, device: int) -> torch.Stream: ...

    def Event(self, enable_timing: bool) -> torch.Event: ...

    def stream(self, stream: torch.Stream) -> AbstractContextManager[None]:
        """Work issued inside goes to `stream`."""
