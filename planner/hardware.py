"""What the planner takes from a device: its card, the rate of its copies, and the host's budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..offload.bandwidth import BandwidthCache, user_cache_path
from ..offload.cards import Card, custom_card
from ..offload.cuda.device import CudaDevice
from ..offload.device import Device
from ..offload.host import HostMemory
from ..offload.simulated.card import SimulatedCard
from .pricing import Pricing
from .request import MARGIN_BYTES

MOST_COPIED_BYTES = 256 << 20
"""In one copy whose rate is measured."""

SAMPLE_S = 0.01
"""How often the free memory of a real card is read while a sweep runs."""


@dataclass(frozen=True, slots=True)
class Hardware:
    device: Device
    card: Card
    margin_bytes: int
    """By default."""
    sample_s: float | None

    @classmethod
    def of(cls, device: Device | str) -> Hardware:
        """Raises InputError where there is no such device."""
        if isinstance(device, str):
            device = CudaDevice.parse(device)
        if isinstance(device, SimulatedCard):
            return cls(device, device.card, MARGIN_BYTES, None)
        reserve = device.inspect().drift_reserve_bytes if isinstance(device, CudaDevice) else 0
        card = replace(custom_card(device.read().total_bytes), name=device.identity.name)
        return cls(device, card, MARGIN_BYTES + reserve, SAMPLE_S)

    def pricing(
        self,
        exposures: Mapping[str, float],
        host_bytes: int | None,
        *,
        local_ranks: int = 1,
    ) -> Pricing:
        """Copies cost what they were measured to cost, where the device has a clock.

        `host_bytes`: for pinned masters; None: what this machine has for them, or on a simulated
        card as many as there are.
        """
        traits = self.device.traits
        if host_bytes is None and not traits.simulated:
            host_bytes = HostMemory.read().budget_bytes(
                local_ranks=local_ranks, unified=traits.unified
            )
        if not traits.timed:
            return Pricing.assumed(self.card, exposures, host_bytes)
        return Pricing.measured(
            self._rate(pinned=True), self._rate(pinned=False), exposures, host_bytes
        )

    def _rate(self, *, pinned: bool) -> float:
        simulated = self.device.traits.simulated
        cache = BandwidthCache(
            None if simulated else user_cache_path(), driver=self.device.driver or ""
        )
        nbytes = min(MOST_COPIED_BYTES, max(self.device.read().free_bytes // 4, 1))
        return cache.bytes_per_s(self.device, pinned=pinned, nbytes=nbytes)
