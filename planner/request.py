"""What to plan: one pipeline, its envelope, and the cards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..offload.cards import Card
from ..phases.shape import Shape
from .report import Report

MIB = 1 << 20

MARGIN_BYTES = 256 * MIB
"""Kept free in every phase: what the allocator loses to fragmentation isn't in a peak of allocated
bytes. Validation, not the margin, is what proves a plan."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Raises InputError, from `plan`, where a name or a number can't be."""

    pipeline: str
    """A family's name; on a real card also a folder that a diffusers pipeline was saved in."""
    cards: tuple[Card, ...]
    shapes: tuple[Shape, ...] = ()
    """The envelope; empty: the request that the model card recommends."""
    component_residency: Mapping[str, str] = field(default_factory=dict)
    """Component or group (dit, text_encoder, image_encoder, vae, all) → resident,
    layerwise-offload or component-offload."""
    resident_layers: Mapping[str, str] = field(default_factory=dict)
    """Component or group → a count (of each layer group), a fraction below 1, or `all`."""
    context_bytes: int | None = None
    others_bytes: int = 0
    margin_bytes: int | None = None
    """None: 256 MiB, and on a real card what programs of its desktop may come to take."""
    explore: int = 0
    """Also try the N best candidates that the model says don't fit."""
    size: Literal["declared", "auto"] = "declared"
    """auto: the planner sizes the sets of layerwise components that declare no resident layers."""
    exposures: Mapping[str, float] = field(default_factory=dict)
    """Phase → the share of copy time that isn't hidden behind compute, 0 to 1; 1 if not said."""
    host_bytes: int | None = None
    """For pinned host masters; None: all are pinned, and not counted."""
    previous: Report | None = None
    """Of the last start: what it committed for a card is kept where only the reading of free
    memory wobbles."""
    prefetch: int = 1
    expandable_segments: bool = False
    """Simulate the allocator's expandable segments, which lose less to fragmentation."""
    dry_run: bool = False
    """On a real card: apply nothing, and tell the best candidate by the model."""
    tiny: bool = False
    """The family's tiny config, with real arithmetic."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A line for whoever waits: which card, and what is being done."""

    card: str
    doing: str


Listener = Callable[[Progress], None]
