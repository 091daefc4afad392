"""The one slot that a simulated card is put into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import DeviceError
from .storage import DEVICE_TYPE

if TYPE_CHECKING:
    import torch


class Watch(Protocol):
    """Who is told of every operation that a card has run."""

    def ran(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None: ...

    def record_stream(self, tensor: torch.Tensor, stream: int) -> None: ...


class Memory(Protocol):
    """What the backend asks of the card in the slot."""

    virtual_above: int | None
    """Float tensors of more elements than this aren't computed. None computes all."""

    @property
    def watch(self) -> Watch | None:
        """None where nobody wants to know what ran."""

    def allocate(self, nbytes: int) -> Callable[[], None]:
        """Charge `nbytes`; the result gives them back. Raises torch.OutOfMemoryError."""

    def cross_bus(self, h2d_bytes: int, d2h_bytes: int) -> None:
        """Count a copy that is about to run."""

    def module(self) -> dict[str, Any]:
        """Functions that `torch.simgpu` has while this card is in the slot."""


_card: Memory | None = None
_watch: Watch | None = None


def put_in(card: Memory | None) -> None:
    """Put `card` into the slot, or empty it with None."""
    global _card, _watch
    _card = card
    _watch = None if card is None else card.watch


def card_in_slot() -> Memory | None:
    return _card


def watch() -> Watch | None:
    """Who watches the card in the slot."""
    return _watch


def card() -> Memory:
    """The card that charges what runs now. Raises DeviceError if the slot is empty."""
    if _card is None:
        raise DeviceError(
            f"an operation ran on {DEVICE_TYPE}:0 and no card is in it",
            hint="keep tensors of a simulated card inside its `with` block",
        )
    return _card
