"""Bytes, seconds and rates as people read them."""

from __future__ import annotations

NEGLIGIBLE_S = 5e-7
"""Seconds below this are what sums of floats are apart."""

_BINARY = ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB"))


def format_bytes(size: int, *, signed: bool = False) -> str:
    """`12.94 GiB`, `376 MiB`, `-4.5 MiB`; `signed` puts a plus before what is above 0."""
    sign = "-" if size < 0 else "+" if signed and size > 0 else ""
    return sign + _magnitude(abs(size))


def format_exact(size: int) -> str:
    """With every byte: `1.20 GiB (1,288,490,189 bytes)`."""
    return f"{format_bytes(size)} ({size:,} bytes)"


def format_seconds(seconds: float, *, signed: bool = False) -> str:
    """`1.50 s`, `31 ms`; `signed` puts a plus before what is above 0."""
    if abs(seconds) < NEGLIGIBLE_S:
        return "0.00 s"
    sign = "+" if signed and seconds > 0 else ""
    # What would round to 100 ms is given as 0.10 s.
    if abs(seconds) < 0.0995:
        return f"{sign}{seconds * 1000:.2g} ms"
    return f"{sign}{seconds:.2f} s"


def format_rate(bytes_per_s: float) -> str:
    """In 1000^3 bytes a second, as data sheets give it."""
    return f"{bytes_per_s / 10**9:.1f} GB/s"


def _magnitude(size: int) -> str:
    for shift, unit in _BINARY:
        # A size that would round to 1024 of a unit is given as 1 of the next.
        if size < (1 << shift) - (1 << shift) // 2048:
            continue
        value = size / (1 << shift)
        if unit in ("GiB", "TiB"):
            return f"{value:.2f} {unit}"
        return (
            f"{value:.0f} {unit}" if value >= 100 or value.is_integer() else f"{value:.1f} {unit}"
        )
    return f"{size} B"
