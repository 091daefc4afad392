"""Changes to a pipeline that are all made, or all undone."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..offload.device import Device
from ..offload.errors import RollbackError
from ..offload.host import HostBudget
from ..offload.layerwise import LayerwiseOffload
from ..offload.placement import Placement
from ..phases.conductor import Conductor
from ..phases.diffusers import DiffusersPipeline
from ..phases.graph import PhaseGraph
from ..phases.prestate import PreState
from ..phases.use import ComponentUse


class Operation(ABC):
    """One step. It knows its inverse when it is built; both may be called from any state."""

    @abstractmethod
    def apply(self) -> None: ...

    @abstractmethod
    def revert(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bind(Operation):
    pipeline: DiffusersPipeline
    device: Device

    def apply(self) -> None:
        self.pipeline.bind(self.device)

    def revert(self) -> None:
        self.pipeline.unbind()


@dataclass(frozen=True, slots=True)
class Onload(Operation):
    placement: Placement

    def apply(self) -> None:
        self.placement.install()

    def revert(self) -> None:
        self.placement.remove()


@dataclass(frozen=True, slots=True)
class Conduct(Operation):
    conductor: Conductor

    def apply(self) -> None:
        self.conductor.install()

    def revert(self) -> None:
        self.conductor.remove()


@dataclass(frozen=True, slots=True)
class Assign(Operation):
    """Gives one use its sets, and lets it retain or not. Undone, what it held is off the device."""

    graph: PhaseGraph
    use: ComponentUse
    """As it is to be."""
    placement: Placement
    before: ComponentUse = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self.graph.uses_in(self.use.phase)[self.use.component])

    def apply(self) -> None:
        self.graph.assign(self.use)

    def revert(self) -> None:
        self.graph.assign(self.before)
        self.placement.release_all()


@dataclass(frozen=True, slots=True)
class Prefetch(Operation):
    """Sets how many layers are fetched ahead."""

    placement: LayerwiseOffload
    depth: int
    before: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self.placement.prefetch)

    def apply(self) -> None:
        self.placement.prefetch = self.depth

    def revert(self) -> None:
        self.placement.release_all()
        self.placement.prefetch = self.before


@dataclass(frozen=True, slots=True)
class Pin(Operation):
    placement: Placement
    budget: HostBudget

    def apply(self) -> None:
        self.placement.pin_masters(self.budget)

    def revert(self) -> None:
        self.placement.unpin_masters()


class Transaction:
    """The pre-state is captured when a transaction is built, before the first move."""

    def __init__(
        self, pipeline: DiffusersPipeline, device: Device, operations: Sequence[Operation]
    ) -> None:
        self.operations = tuple(operations)
        self._device = device
        self._applied: list[Operation] = []
        self._before = PreState(pipeline)
        gc.collect()
        self._allocated_bytes = device.read().allocated_bytes

    def apply(self) -> None:
        """Raises what an operation raises; the transaction can then be rolled back."""
        for operation in self.operations:
            self._applied.append(operation)
            operation.apply()

    def rollback(self) -> None:
        """Undo what was applied, in reverse, and what runs since have left behind.

        An operation that can't be undone doesn't keep the others from it. Raises RollbackError
        if the pipeline isn't what it was before the transaction, or device memory isn't back.
        """
        errors: list[Exception] = []
        while self._applied:
            try:
                self._applied.pop().revert()
            except Exception as error:
                errors.append(error)
        self._before.restore()
        gc.collect()
        self._device.release_cache()
        self._check(errors)

    def _check(self, errors: Sequence[Exception]) -> None:
        found = [f"{type(error).__name__}: {error}" for error in errors]
        found += self._before.differences()
        self._before.forget()
        allocated = self._device.read().allocated_bytes
        slack = self._device.traits.undo_slack_bytes
        if abs(allocated - self._allocated_bytes) > slack:
            found.append(f"{allocated} bytes are allocated, {self._allocated_bytes} were before")
        if found:
            shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if found[5:] else "")
            raise RollbackError(
                f"after the rollback {len(found)} things aren't as before: {shown}",
                hint="don't serve with this process: start again with retention off",
            )
