"""Sizes as people write them: `22GiB`, `376MiB`, `24GB`, plain bytes."""

from __future__ import annotations

import re
from decimal import Decimal

from ..offload.errors import InputError

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
