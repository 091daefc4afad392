"""`NAME=VALUE,…` as options take it, comma-separated and repeatable."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..offload.errors import InputError

_LAYERS = re.compile(r"all|[0-9]+|0?\.[0-9]+")


def parse_assignments(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Raises InputError. `option` names the texts in messages."""
    values: dict[str, str] = {}
    for text in (part.strip() for joined in texts for part in joined.split(",")):
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise InputError(
                f"{option} has {text!r}, which is no NAME=VALUE",
                hint=f"write {option} text_encoder=…,vae=…",
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
