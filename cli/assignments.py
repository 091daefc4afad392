"""`NAME=VALUE,…` as options take it, comma-separated and repeatable."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..offload.errors import InputError

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
