"""A component's use in a phase, and the gap until its next."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComponentUse:
    """One interval in which `component` must be ready.

    `retain_resident_layers` and the two sets are set by the planner and by nothing else;
    `retain_resident_layers` is read when the use finishes.
    """

    phase: str
    component: str
    passes: int = 1
    """How often the component is called before the use ends."""
    retain_resident_layers: bool = False
    resident_layers: frozenset[int] | None = None
    """The resident set, where it was sized and not declared: layers counted over all groups."""
    retained_layers: frozenset[int] | None = None
    """Of the resident set, what is retained if the use retains; None: all of it."""


@dataclass(frozen=True, slots=True)
class Gap:
    """From the end of `use` to `next_use` of the same component, which may be itself."""

    use: ComponentUse
    next_use: ComponentUse
    phases: tuple[str, ...]
    """The phases in between, in order."""
    wraps: bool
    """Whether it reaches into the next request."""
