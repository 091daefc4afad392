"""The cards that `--card` and `--capacity` name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..offload.errors import InputError
from .sizes import parse_size

if TYPE_CHECKING:
    from ..offload.cards import Card


def select_cards(names: Sequence[str], capacity: str | None) -> tuple[Card, ...]:
    """Raises InputError."""
    from ..offload.cards import custom_card, find_card

    found = [find_card(name) for name in names]
    for i, card in enumerate(found):
        if card in found[:i]:
            raise InputError(f"{card.name} is named twice", hint="name each --card once")
    if capacity is None:
        if not found:
            raise InputError(
                "no card is named",
                hint="--card 'RTX 4090' or --capacity 22GiB; residency cards lists the cards",
            )
        return tuple(found)
    size = parse_size("--capacity", capacity)
    custom = custom_card(size)
    if not found:
        return (custom,)
    if len(found) > 1:
        raise InputError(
            f"--capacity is one card's, and {len(found)} cards are named",
            hint="name one --card with --capacity, or leave --capacity out",
        )
    (card,) = found
    sources = replace(card.sources, total=custom.sources.total, total_is_estimate=False)
    return (replace(card, total_bytes=size, sources=sources),)
