"""A component's use in a phase, and the gap until its next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComponentUse:
    """One interval in which `component` must be ready.

    `retain_resident_layers` is set by the planner and by nothing else, and read when the use
    finishes.
    """

    phase: str
    component: str
    passes: int = 1
    """How often the component is called before the use ends."""
    retain_resident_layers: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """From the end of `use` to `next_use` of the same component, which may be itself."""

    use: ComponentUse
    next_use: ComponentUse
    phases: tuple[str, ...]
    """The phases in between, in order."""
    wraps: bool
    """Whether it reaches into the next request."""
