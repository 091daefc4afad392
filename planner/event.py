"""What the loop says while it works: the CLI and a server's log listen alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Step(StrEnum):
    PLACING = "placing"
    DISCOVERING = "discovering"
    MEASURING = "measuring"
    VERIFYING = "verifying"
    """A plan of an earlier start is applied and swept once."""
    TRYING = "trying"
    COMPARING = "comparing"
    """Its time with the baseline's."""
    REFUTED = "refuted"
    COMMITTED = "committed"
    BASELINE = "baseline"
    """Nothing is retained, and that is the end of it."""


@dataclass(frozen=True, slots=True)
class Event:
    step: Step
    doing: str
    """For people, and without a full stop."""

    def __str__(self) -> str:
        return self.doing


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener that doesn't."""
