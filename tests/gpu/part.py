"""The parts of the report: what each needs, and how long it may take."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

_OFFLOAD = ("torch", "psutil")
_PIPELINE = (*_OFFLOAD, "networkx", "pydantic", "diffusers", "transformers", "accelerate")
_PLANNER = (*_PIPELINE, "filelock", "highspy", "numpy")


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    run: str
    """`module:function`, called with a Target and Notes in a process of the part's own."""
    needs: tuple[str, ...]
    """Packages without which it can't run."""
    limit_s: float

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.needs if find_spec(name) is None)


def _part(name: str, needs: tuple[str, ...], limit_s: float) -> Part:
    return Part(name, f"tests.gpu.parts.{name}:run", needs, limit_s)


PARTS = (
    _part("machine", _OFFLOAD, 90),
    _part("bandwidth", _OFFLOAD, 90),
    _part("hooks", _OFFLOAD, 90),
    _part("bit_equality", _PIPELINE, 120),
    _part("oom_rollback", _PLANNER, 120),
    _part("two_cards", _PLANNER, 270),
    _part("settle", _PLANNER, 120),
)


def chosen(names: Iterable[str] | None) -> tuple[Part, ...]:
    """The parts called so, in the report's order; all for None. Raises ValueError."""
    if names is None:
        return PARTS
    names = [*names]
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no part: there are {', '.join(known)}")
    return tuple(part for part in PARTS if part.name in names)
