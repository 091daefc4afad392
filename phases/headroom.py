"""Headroom: the device bytes that retained weights may take in a phase."""

from __future__ import annotations

from dataclasses import dataclass

from .shape import Shape


@dataclass(frozen=True, slots=True)
class Headroom:
    """capacity - others - context - peak - margin, with its terms kept apart."""

    phase: str
    shape: Shape
    capacity_bytes: int
    others_bytes: int
    context_bytes: int
    peak_bytes: int
    """The most that tensors held in the phase, with nothing retained."""
    margin_bytes: int

    @property
    def headroom_bytes(self) -> int:
        taken = self.others_bytes + self.context_bytes + self.peak_bytes + self.margin_bytes
        return self.capacity_bytes - taken
