"""What options are given as: names with values, sizes, cards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING

from ..offload.errors import InputError

if TYPE_CHECKING:
    from ..offload.cards import Card


_LAYERS = re.compile(r"all|[0-9]+|0?\.[0-9]+")
_SHARE = re.compile(r"[01]?\.[0-9]+|[01]")


def parse_assignments(
    option: str, texts: Iterable[str], example: str = "text_encoder=…,vae=…"
) -> dict[str, str]:
    """Raises InputError. `option` names the texts in messages."""
    values: dict[str, str] = {}
    for text in (part.strip() for joined in texts for part in joined.split(",")):
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise InputError(
                f"{option} has {text!r}, which is no NAME=VALUE",
                hint=f"write {option} {example}",
            )
        if name in values:
            raise InputError(f"{option} gives {name} twice", hint="give each name once")
        values[name] = value
    return values


def parse_layer_counts(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Assignments of which each value is a count, a fraction below 1 or `all`."""
    counts = parse_assignments(option, texts)
    for name, value in counts.items():
        if _LAYERS.fullmatch(value) is None:
            raise InputError(
                f"{option} gives {name} {value!r} layers",
                hint="a count of each layer group (43), a fraction below 1 (0.65), or all",
            )
    return counts


def parse_shares(option: str, texts: Iterable[str]) -> dict[str, float]:
    """Assignments of which each value is a share of copy time, 0 to 1."""
    shares: dict[str, float] = {}
    for name, value in parse_assignments(option, texts, "denoise=0.1,text_encode=1").items():
        if _SHARE.fullmatch(value) is None or float(value) > 1:
            raise InputError(
                f"{option} gives {name} {value!r}, which is no share",
                hint="from 0, all its copies are hidden behind compute, to 1, none are",
            )
        shares[name] = float(value)
    return shares


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)
_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_MOST = 1 << 63


def parse_size(option: str, text: str) -> int:
    """The bytes that `text` means; `option` names it in messages. Raises InputError."""
    matched = _SIZE.fullmatch(text.strip())
    unit = matched and _UNITS.get(matched[2].lower())
    if matched is None or unit is None:
        raise InputError(
            f"{option} is {text!r}, which is no size",
            hint="write 22GiB, 376MiB (1024 each), 24GB (1000 each) or plain bytes",
        )
    size = Decimal(matched[1]) * unit
    if unit == 1 and size != size.to_integral_value():
        raise InputError(f"{option} is {text!r}, and bytes are whole", hint="add a unit: 1.5GiB")
    if size >= _MOST:
        raise InputError(f"{option} is {text!r}, more than any device has", hint="check the unit")
    return round(size)


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
