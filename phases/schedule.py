"""What each use holds: the one form in which a candidate, the baseline, a journal's record and a
plan file say it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

_RANGES = r"(\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*)?"


class Value(BaseModel):
    """A frozen value that crosses the boundary of the program: it takes no unknown field, and
    documents each with the text under it."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,
    )


def format_layers(layers: Iterable[int]) -> str:
    """`0-3,7`: sorted, with runs of layers as ranges; empty for no layers."""
    runs: list[list[int]] = []
    for layer in sorted({*layers}):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return ",".join("-".join(map(str, run)) for run in runs)


def parse_layers(text: str) -> tuple[int, ...]:
    """What `format_layers` wrote. Raises ValueError."""
    if re.fullmatch(_RANGES, text, re.ASCII) is None:
        raise ValueError(f"{text!r} is no list of layers such as 0-3,7")
    layers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        layers.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(layers))


def _read_layers(value: object) -> object:
    if isinstance(value, str):
        return parse_layers(value)
    return tuple(sorted(value)) if isinstance(value, frozenset) else value


LayerSet = Annotated[
    tuple[int, ...],
    BeforeValidator(_read_layers),
    PlainSerializer(format_layers, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": f"^{_RANGES}$", "examples": ["0-3,7"]}),
]
"""Layers counted over all groups, sorted; in JSON `0-3,7`."""


class Hold(Value):
    """What one use of a component holds, that can leave the device."""

    phase: str
    component: str
    retain_resident_layers: bool
    resident_set: LayerSet
    """The layers held during the use, where it runs several times or retains."""
    retained_set: LayerSet
    """Of those, the layers held across the gap; empty unless the use retains."""
    prefetch: int = Field(ge=0)
    """Layers fetched ahead."""
    pinned: bool
    """Whether copies come from pinned host masters."""

    @property
    def at(self) -> tuple[str, str]:
        return self.phase, self.component

    @model_validator(mode="after")
    def _retains_what_is_resident(self) -> Self:
        beyond = {*self.retained_set} - {*self.resident_set}
        if beyond:
            layers = format_layers(beyond)
            raise ValueError(f"layers {layers} are retained, and aren't in the resident set")
        if self.retained_set and not self.retain_resident_layers:
            raise ValueError("layers are retained, and retain_resident_layers is false")
        return self


class Schedule(Value):
    """What each use holds of the components that can leave the device. One is in effect at a
    time."""

    uses: tuple[Hold, ...]

    @model_validator(mode="after")
    def _names_a_use_once(self) -> Self:
        seen: dict[str, Hold] = {}
        for use in self.uses:
            other = seen.setdefault(use.component, use)
            if (use.prefetch, use.pinned) != (other.prefetch, other.pinned):
                raise ValueError(f"{use.component} is streamed in two ways")
        if len({use.at for use in self.uses}) < len(self.uses):
            raise ValueError("a use is there twice")
        return self

    @property
    def key(self) -> str:
        """Equal for schedules that hold the same, in whatever order; 16 hexadecimal digits."""
        parts = sorted(use.model_dump_json() for use in self.uses)
        return sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def retaining(self) -> tuple[str, ...]:
        """The components that retain something across a gap."""
        names = (use.component for use in self.uses if use.retain_resident_layers)
        return tuple(dict.fromkeys(names))

    @property
    def components(self) -> Iterator[Hold]:
        """One use of each component: how it is streamed is the same in all of them."""
        yield from {use.component: use for use in reversed(self.uses)}.values()

    def hold(self, phase: str, component: str) -> Hold | None:
        return next((use for use in self.uses if use.at == (phase, component)), None)

    def released(self, baseline: Schedule) -> Schedule:
        """`baseline`, streamed as it is here: what is given up is what is held, and no pin is."""
        ways = {each.component: each for each in self.components}
        return Schedule(
            uses=tuple(
                use.model_copy(update={"prefetch": way.prefetch, "pinned": way.pinned})
                for use in baseline.uses
                for way in [ways.get(use.component, use)]
            )
        )

    def changed(self, to: Schedule) -> frozenset[str]:
        """The components of which `to` says something else."""
        mine, theirs = ({use.at: use for use in each.uses} for each in (self, to))
        return frozenset(
            component
            for phase, component in mine.keys() | theirs.keys()
            if mine.get((phase, component)) != theirs.get((phase, component))
        )


NOTHING = Schedule(uses=())
