"""What a machine says of its cards and its host memory, as `residency probe` tells it."""

from __future__ import annotations

from typing import Literal

from ..offload.inspection import Nature
from ..planner.value import Value

FORMAT_VERSION: Literal[1] = 1


class Figure(Value):
    name: str
    value: int | str | None
    """None where the source doesn't say; `source` then tells why."""
    unit: str
    """`bytes`, or what the number counts; empty for a word."""
    source: str


class Note(Value):
    kind: str
    nature: Nature
    message: str
    hint: str | None


class ProbedCard(Value):
    device: str
    """As torch names it: `cuda:0`."""
    name: str
    uuid: str
    usable_bytes: int
    """What this process may take with tensors."""
    drift_reserve_bytes: int
    """What a plan's margin should hold besides: programs of a desktop come to take it."""
    unified: bool
    """Device and host memory are one pool."""
    spills: bool
    """A full card goes on in host memory, and no out-of-memory error comes."""
    pins_on_card: bool
    """Page-locked host memory is charged to the card as well."""
    figures: tuple[Figure, ...]
    notes: tuple[Note, ...]


class Unreadable(Value):
    """A card that torch sees and that can't be read."""

    device: str
    message: str
    hint: str | None


class Machine(Value):
    format_version: Literal[1] = FORMAT_VERSION
    residency_version: str
    torch_version: str
    cards: tuple[ProbedCard, ...]
    unreadable: tuple[Unreadable, ...]
    no_card: str | None
    """Why there is no card; None where there is one."""
    hint: str | None
    """What to do about it."""
    no_nvml: str | None
    """Why NVML, which knows what other processes hold, says nothing; None where it does."""
    host: tuple[Figure, ...]

    def to_json(self) -> str:
        return self.model_dump_json(indent=2) + "\n"
