"""A device as it is found on this machine: its card, the rate of its copies, and what the host has
for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .cards import Card, custom_card
from .clocks import BandwidthCache, user_cache_path
from .cuda.device import CudaDevice
from .device import Device
from .host_memory import HostMemory
from .simulated.card import SimulatedCard

MOST_COPIED_BYTES = 256 << 20
"""In one copy whose rate is measured."""

SAMPLE_S = 0.01
"""How often the free memory of a real card is read while a sweep runs."""


@dataclass(frozen=True, slots=True)
class Hardware:
    device: Device
    card: Card
    reserve_bytes: int = 0
    """What programs of its desktop may come to take."""
    sample_s: float | None = None
    """How often free memory is read while a sweep runs; None: where phases end."""

    @classmethod
    def of(cls, device: Device | str) -> Hardware:
        """Raises InputError where there is no such device."""
        if isinstance(device, str):
            device = CudaDevice.parse(device)
        if isinstance(device, SimulatedCard):
            return cls(device, device.card)
        reserve = device.inspect().drift_reserve_bytes if isinstance(device, CudaDevice) else 0
        card = replace(custom_card(device.read().total_bytes), name=device.identity.name)
        return cls(device, card, reserve, SAMPLE_S)

    def host_budget_bytes(self, *, local_ranks: int = 1) -> int | None:
        """For pinned masters: what this machine has; None, as many as are wanted, on a simulated
        card."""
        traits = self.device.traits
        if traits.simulated:
            return None
        return HostMemory.read().budget_bytes(local_ranks=local_ranks, unified=traits.unified)

    def bytes_per_s(self, *, pinned: bool) -> float:
        """As copies to the device reach it. Raises DeviceError where it has no clock."""
        simulated = self.device.traits.simulated
        cache = BandwidthCache(
            None if simulated else user_cache_path(), driver=self.device.driver or ""
        )
        nbytes = min(MOST_COPIED_BYTES, max(self.device.read().free_bytes // 4, 1))
        return cache.bytes_per_s(self.device, pinned=pinned, nbytes=nbytes)
