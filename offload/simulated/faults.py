"""Faults to inject: what goes wrong on a card, at a chosen moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

Fault = Callable[[], BaseException]


class InjectedError(RuntimeError):
    """Stands for any error that a driver may raise in the middle of a copy."""


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("simgpu out of memory (injected)")


def driver_error() -> BaseException:
    return InjectedError("the copy failed (injected)")


@dataclass(slots=True)
class Faults:
    """Counts allocations and copies, and raises at the n-th after `at_…` was called. Each once."""

    allocations: int = 0
    copies: int = 0
    _allocation_faults: dict[int, Fault] = field(default_factory=dict)
    _copy_faults: dict[int, Fault] = field(default_factory=dict)

    def at_allocation(self, n: int, fault: Fault = out_of_memory) -> None:
        """Raise at the n-th allocation from now; the next one is 1."""
        self._allocation_faults[self.allocations + n] = fault

    def at_copy(self, n: int, fault: Fault = driver_error) -> None:
        """Raise at the n-th copy between host and device from now; the next one is 1."""
        self._copy_faults[self.copies + n] = fault

    def clear(self) -> None:
        self._allocation_faults.clear()
        self._copy_faults.clear()

    def allocation(self) -> None:
        self.allocations += 1
        if fault := self._allocation_faults.pop(self.allocations, None):
            raise fault()

    def copy(self) -> None:
        self.copies += 1
        if fault := self._copy_faults.pop(self.copies, None):
            raise fault()
