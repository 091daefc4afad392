"""A smaller card made out of a larger one.

Of the larger card another process holds what the smaller one doesn't have, so that the driver
says what is free; and the allocator of this process is limited to what is left, so that it can't
grow into what that process gives back. A limit of the allocator alone is none on free memory,
which is what the planner reads. The readings keep the larger card's total: what is held is
others', and

    headroom = total - others - context - peak - margin

comes out as on the smaller card, whose total is less by what is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from residency.offload.device import Device

    from .target import Target


@dataclass(frozen=True, slots=True)
class Capped:
    total_bytes: int
    """Of the smaller card."""
    usable_bytes: int
    """What this process may take with tensors, by the device's reading."""
    wanted_bytes: int
    """What it might take on a card of that total with this process alone."""
    held_bytes: int
    """Taken by the other process, its context aside."""

    @property
    def off_bytes(self) -> int:
        return self.usable_bytes - self.wanted_bytes


@contextmanager
def capped(target: Target, device: Device, total_bytes: int) -> Iterator[Capped]:
    """Inside, `device` has as much memory for this process as a card of `total_bytes` would.

    The context is this process's as it was on the way in. It may grow inside, as it would on that
    card. Raises ValueError where `device` hasn't that much left, or the context takes it all.
    """
    context = device.read().context_bytes
    wanted = total_bytes - context
    if wanted <= 0:
        raise ValueError(f"of {total_bytes} bytes the context alone takes {context}")
    with target.other_process() as other:
        spare = device.read().usable_bytes - wanted
        if spare < 0:
            raise ValueError(
                f"a card of {total_bytes} bytes leaves {wanted} for tensors, which is {-spare} "
                f"more than {device.identity.name} has left"
            )
        held = spare - spare % other.granularity_bytes
        other.take(held)
        reading = device.read()
        target.limit_allocator(device, wanted / reading.total_bytes)
        try:
            yield Capped(total_bytes, reading.usable_bytes, wanted, held)
        finally:
            target.limit_allocator(device, 1.0)
