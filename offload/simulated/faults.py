"""Faults to inject: what goes wrong on a card, at a chosen moment."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

Fault = Callable[[], BaseException | None]
"""What to raise; None where something else happens and the work goes on."""


class InjectedError(RuntimeError):
    """Stands for any error that a driver may raise in the middle of a copy."""


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("simgpu out of memory (injected)")


def driver_error() -> BaseException:
    return InjectedError("the copy failed (injected)")


def neighbour_grows(card: Neighboured, nbytes: int) -> Fault:
    """Another process takes so much more of the card."""

    def grow() -> None:
        card.others_bytes += nbytes

    return grow


def hang(seconds: float) -> Fault:
    """The host is held up for so long, by the wall clock."""
    return lambda: time.sleep(seconds)


class Neighboured(Protocol):
    """A card with other processes on it."""

    others_bytes: int


@dataclass(slots=True)
class Faults:
    """Counts allocations and copies, and lets the n-th after `at_…` was called go wrong. Each
    once."""

    allocations: int = 0
    copies: int = 0
    _allocation_faults: dict[int, Fault] = field(default_factory=dict)
    _copy_faults: dict[int, Fault] = field(default_factory=dict)

    def at_allocation(self, n: int, fault: Fault = out_of_memory) -> None:
        """At the n-th allocation from now; the next one is 1."""
        self._allocation_faults[self.allocations + n] = fault

    def at_copy(self, n: int, fault: Fault = driver_error) -> None:
        """At the n-th copy between host and device from now; the next one is 1."""
        self._copy_faults[self.copies + n] = fault

    def clear(self) -> None:
        self._allocation_faults.clear()
        self._copy_faults.clear()

    def allocation(self) -> None:
        self.allocations += 1
        _happen(self._allocation_faults.pop(self.allocations, None))

    def copy(self) -> None:
        self.copies += 1
        _happen(self._copy_faults.pop(self.copies, None))


def _happen(fault: Fault | None) -> None:
    error = None if fault is None else fault()
    try:
        if error is not None:
            raise error
    finally:
        del error  # it has this frame, which would have it
