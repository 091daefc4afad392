"""Where the parts run: a CUDA card, or a simulated one in the place of CUDA.

Parts get a `CudaDevice` from either. What they can't ask of it is here: memory that another
process holds, the allocator's limit, and sizes that suit the card.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .holder import Holder, holding
from .notes import Notes
from .runner import SIMULATED, Task

if TYPE_CHECKING:
    from residency.offload.cuda.device import CudaDevice
    from residency.offload.device import Reading
    from residency.offload.simulated.card import SimulatedCard

    from .pipelines import Source

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Scale:
    """How large what runs is."""

    copy_bytes: int
    """Of a plain copy whose rate is the measure of others."""
    width: int
    """Of layers whose copies are timed: each weighs 12 times the square of it."""
    layers: int
    tokens: int
    calls: int
    """Of modules whose hooks are timed."""
    requests: int
    """Whose outputs are compared; what is retained is there from the second on."""
    margin_bytes: int


class Target(ABC):
    scale: Scale
    tolerance_bytes = 64 * MIB
    """What may be left behind by libraries."""

    def __init__(self, task: Task, notes: Notes) -> None:
        self.folder: Path = task.folder
        self.asked: str = task.scale
        self.limit_s: float = task.limit_s
        self._notes = notes

    @staticmethod
    def of(task: Task, notes: Notes) -> Target:
        """`task.scale`: of the pipeline on two cards: mid, full, or auto."""
        if task.device == SIMULATED:
            return SimulatedTarget(task, notes)
        return CudaTarget(task, notes)

    @contextmanager
    def device(self) -> Iterator[CudaDevice]:
        """The card, for one block: what is on it has to be gone when the block ends."""
        import torch

        with self._device() as device:
            self._notes.machine(device.identity.name, device.driver, torch.__version__)
            yield device

    @abstractmethod
    def _device(self) -> AbstractContextManager[CudaDevice]: ...

    @abstractmethod
    def other_process(self) -> AbstractContextManager[Holder]:
        """A process that has nothing on the card yet but its context."""

    @abstractmethod
    def limit_allocator(self, device: CudaDevice, share: float) -> None:
        """This process's tensors may take so much of the card's total; 1 is all of it."""

    @abstractmethod
    def source(self) -> Source:
        """Of the pipeline that most parts run."""

    @abstractmethod
    def source_for_two_cards(self) -> tuple[Source, str]:
        """And why it is that one."""

    @abstractmethod
    def predicting(self, reading: Reading) -> SimulatedCard:
        """A simulated card with the total, the context and the others of a reading."""


class CudaTarget(Target):
    scale = Scale(
        copy_bytes=256 * MIB,
        width=4096,
        layers=8,
        tokens=4096,
        calls=200,
        requests=3,
        margin_bytes=256 * MIB,
    )

    def __init__(self, task: Task, notes: Notes) -> None:
        super().__init__(task, notes)
        self._name = task.device
        self._index = int(re.sub(r"\D", "", task.device) or 0)

    @contextmanager
    def _device(self) -> Iterator[CudaDevice]:
        from residency.offload.cuda.device import CudaDevice

        yield CudaDevice.parse(self._name)

    def other_process(self) -> AbstractContextManager[Holder]:
        return holding(self._index)

    def limit_allocator(self, device: CudaDevice, share: float) -> None:
        import torch

        torch.cuda.set_per_process_memory_fraction(share, device.index)

    def source(self) -> Source:
        from .pipelines import MID

        return MID

    def source_for_two_cards(self) -> tuple[Source, str]:
        import psutil

        from .pipelines import FULL, FULL_HOST_BYTES, FULL_S, MID

        available = psutil.virtual_memory().available
        told = f"{available / GIB:.0f} GiB of host memory available and {self.limit_s:.0f} s left"
        if self.asked != "auto":
            return (FULL if self.asked == "full" else MID), f"asked for; {told}"
        is_enough = available >= FULL_HOST_BYTES and self.limit_s >= FULL_S
        needed = f"the full pipeline takes {FULL_HOST_BYTES / GIB:.0f} GiB and {FULL_S:.0f} s"
        return (FULL if is_enough else MID), f"{told}, {needed}"

    def predicting(self, reading: Reading) -> SimulatedCard:
        from residency.offload.cards import custom_card
        from residency.offload.simulated.card import SimulatedCard

        return SimulatedCard(
            custom_card(reading.total_bytes),
            virtual=True,
            context_bytes=reading.context_bytes,
            others_bytes=reading.others_bytes,
        )


class SimulatedHolder(Holder):
    def __init__(self, card: SimulatedCard) -> None:
        self._card = card

    def take(self, nbytes: int) -> None:
        self._card.others_bytes += nbytes


class SimulatedTarget(Target):
    scale = Scale(
        copy_bytes=1 * MIB,
        width=64,
        layers=8,
        tokens=16,
        calls=10,
        requests=2,
        margin_bytes=0,
    )
    total_bytes = 64 * MIB
    context_bytes = 300_000
    other_context_bytes = 200_000

    def __init__(self, task: Task, notes: Notes) -> None:
        super().__init__(task, notes)
        self.card: SimulatedCard | None = None
        """While a block of `device` runs."""
        self.share = 1.0
        """Of the card, that the allocator is limited to. Nothing here enforces it."""

    @contextmanager
    def _device(self) -> Iterator[CudaDevice]:
        from residency.offload.cards import custom_card
        from residency.offload.cuda.device import CudaDevice
        from residency.offload.cuda.nvml import Nvml
        from residency.offload.cuda.system import System
        from residency.offload.simulated.card import SimulatedCard
        from residency.offload.simulated.runtime import SimulatedRuntime
        from residency.offload.simulated.work import Clock

        from .simulated_nvml import SimulatedNvml

        clock = Clock(
            h2d_bytes_per_s=1e9,
            pageable_bytes_per_s=0.4e9,
            op_s=1e-6,
            bytes_per_s=1e11,
        )
        card = SimulatedCard(
            replace(custom_card(self.total_bytes), name="simulated card"),
            allocator="exact",
            context_bytes=self.context_bytes,
            clock=clock,
        )
        with card:
            self.card = card
            try:
                yield CudaDevice(
                    runtime=SimulatedRuntime(card),
                    nvml=Nvml(SimulatedNvml(card)),
                    device_type=card.torch_device.type,
                    system=System("linux", False, (os.getpid(),)),
                    page_lock=card.pin,
                )
            finally:
                self.card = None

    @contextmanager
    def other_process(self) -> Iterator[Holder]:
        assert self.card is not None, "only inside of `device`"
        before = self.card.others_bytes
        self.card.others_bytes += self.other_context_bytes
        try:
            yield SimulatedHolder(self.card)
        finally:
            self.card.others_bytes = before

    def limit_allocator(self, device: CudaDevice, share: float) -> None:
        self.share = share

    def source(self) -> Source:
        from .pipelines import TINY

        return TINY

    def source_for_two_cards(self) -> tuple[Source, str]:
        return self.source(), "the card is simulated"

    def predicting(self, reading: Reading) -> SimulatedCard:
        from residency.offload.cards import custom_card
        from residency.offload.simulated.card import SimulatedCard

        return SimulatedCard(
            custom_card(reading.total_bytes),
            allocator="exact",
            context_bytes=reading.context_bytes,
            others_bytes=reading.others_bytes,
        )
