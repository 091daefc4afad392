"""The planner. `settle` is the call for a server's startup; it is loaded when it is asked for,
since it brings torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .settlement import Mode, Options, Settlement, settle

__all__ = ["Mode", "Options", "Settlement", "settle"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import settlement

    return getattr(settlement, name)
