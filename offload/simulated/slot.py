"""The one slot that a simulated card is put into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..errors import DeviceError
from .storage import DEVICE_TYPE


class Memory(Protocol):
    """What the backend asks of the card in the slot."""

    virtual_above: int | None
    """Float tensors of more elements than this aren't computed. None computes all."""

    def allocate(self, nbytes: int) -> Callable[[], None]:
        """Charge `nbytes`; the result gives them back. Raises torch.OutOfMemoryError."""

    def count_copy(self, h2d_bytes: int, d2h_bytes: int) -> None: ...

    def module(self) -> dict[str, Any]:
        """Functions that `torch.simgpu` has while this card is in the slot."""


_card: Memory | None = None


def put_in(card: Memory | None) -> None:
    """Put `card` into the slot, or empty it with None."""
    global _card
    _card = card


def card_in_slot() -> Memory | None:
    return _card


def card() -> Memory:
    """The card that charges what runs now. Raises DeviceError if the slot is empty."""
    if _card is None:
        raise DeviceError(
            f"an operation ran on {DEVICE_TYPE}:0 and no card is in it",
            hint="keep tensors of a simulated card inside its `with` block",
        )
    return _card
