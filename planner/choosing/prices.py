"""What a copied byte costs, measured or assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ...offload.cards import Card
from ...offload.device import MIB

if TYPE_CHECKING:
    from ...offload.hardware import Hardware


GB = 10**9

MARGIN_BYTES = 256 * MIB
"""Kept free in every phase: what the allocator loses to fragmentation isn't in a peak of allocated
bytes. Validation, not the margin, is what proves a plan."""

COPY_EFFICIENCY = 0.8
"""Of the bus's raw rate, what copies from pinned memory usually reach. Not measured here."""

PAGEABLE_FACTOR = 2.5
"""How much longer copies take from pageable memory, through the driver's own staging. Not measured
here."""


@dataclass(frozen=True, slots=True)
class Pricing:
    bytes_per_s: float
    """From pinned masters."""
    source: str
    """Where the rate comes from, and what is assumed."""
    exposures: Mapping[str, float] = field(default_factory=dict)
    """By phase: the share of copy time not hidden behind compute; 1 where nothing is said."""
    host_budget_bytes: int | None = None
    """For pinned masters. None: all are pinned, and not counted."""
    pageable_factor: float = PAGEABLE_FACTOR

    def exposed(self, measured: Mapping[str, float]) -> Pricing:
        """With what was measured of phases of which nothing was said."""
        found = {phase: share for phase, share in measured.items() if phase not in self.exposures}
        if not found:
            return self
        told = ", ".join(f"{share:.0%} in {phase}" for phase, share in found.items())
        return replace(
            self,
            source=f"{self.source}; exposed copies measured: {told}",
            exposures={**found, **self.exposures},
        )

    def exposure(self, phase: str) -> float:
        return self.exposures.get(phase, 1.0)

    @classmethod
    def of(
        cls,
        hardware: Hardware,
        exposures: Mapping[str, float],
        host_bytes: int | None,
        *,
        local_ranks: int = 1,
    ) -> Pricing:
        """Copies cost what they were measured to cost, where the device has a clock.

        `host_bytes`: for pinned masters; None: what the machine has for them.
        """
        if host_bytes is None:
            host_bytes = hardware.host_budget_bytes(local_ranks=local_ranks)
        if not hardware.device.traits.timed:
            return cls.assumed(hardware.card, exposures, host_bytes)
        rates = (hardware.bytes_per_s(pinned=True), hardware.bytes_per_s(pinned=False))
        return cls.measured(*rates, exposures, host_bytes)

    @classmethod
    def measured(
        cls,
        bytes_per_s: float,
        pageable_bytes_per_s: float,
        exposures: Mapping[str, float] | None = None,
        host_budget_bytes: int | None = None,
    ) -> Pricing:
        """Rates as copies of this card reached them."""
        return cls(
            bytes_per_s,
            f"measured: {bytes_per_s / GB:.1f} GB/s from pinned memory, "
            f"{pageable_bytes_per_s / GB:.1f} from pageable",
            exposures or {},
            host_budget_bytes,
            bytes_per_s / pageable_bytes_per_s,
        )

    @classmethod
    def assumed(
        cls,
        card: Card,
        exposures: Mapping[str, float] | None = None,
        host_budget_bytes: int | None = None,
    ) -> Pricing:
        """For a card that nothing was measured on."""
        exposures = exposures or {}
        exposed = ", ".join(f"{share:.0%} exposed in {phase}" for phase, share in exposures.items())
        return cls(
            card.pcie_bytes_per_s * COPY_EFFICIENCY,
            f"assumed: {COPY_EFFICIENCY:.0%} of PCIe {card.pcie_generation}.0 x{card.pcie_lanes}, "
            + (f"copies {exposed}" if exposed else "no copy hidden behind compute"),
            exposures,
            host_budget_bytes,
        )
