"""What an out-of-memory error says: how much was asked for, and how much was free."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"B": 1, "bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|B)")
_FREE = re.compile(r"of which ([\d.]+) (bytes|KiB|MiB|GiB|B) is free")


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The allocation that failed. Another may have failed later: a lower bound of what is short."""

    requested_bytes: int
    free_bytes: int

    @property
    def short_bytes(self) -> int:
        return max(self.requested_bytes - self.free_bytes, 0)

    @classmethod
    def of(cls, error: BaseException) -> Shortfall | None:
        """Exact from a simulated card; from CUDA's text, to two decimals; None if it has none."""
        given = getattr(error, "shortfall", None)
        if isinstance(given, cls):
            return given
        asked, free = _ASKED.search(str(error)), _FREE.search(str(error))
        if asked is None or free is None:
            return None
        return cls(_bytes(asked), _bytes(free))


def _bytes(match: re.Match[str]) -> int:
    return round(float(match[1]) * _UNITS[match[2]])
