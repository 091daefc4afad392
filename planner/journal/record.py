"""What the journal says of a candidate, and of each step that is taken with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from hashlib import sha256
from typing import Annotated, Literal, Protocol, Self

from pydantic import (
    AwareDatetime,
    BeforeValidator,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

from ...phases.use import ComponentUse
from ..plan import Plan, Reason, Verdict
from ..value import Value
from .process import ProcessRecord

FORMAT_VERSION: Literal[1] = 1

_RANGES = r"(\d{1,6}(-\d{1,6})?(,\d{1,6}(-\d{1,6})?)*)?"


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
    return parse_layers(value) if isinstance(value, str) else value


LayerSet = Annotated[
    tuple[int, ...],
    BeforeValidator(_read_layers),
    PlainSerializer(format_layers, return_type=str, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": f"^{_RANGES}$", "examples": ["0-3,7"]}),
]
"""Layers counted over all groups, sorted; in JSON `0-3,7`."""


class UseRecord(Value):
    """What a candidate says of one use of a component that can leave the device."""

    phase: str
    component: str
    passes: int
    """How often the component is called before the use ends, as it was measured."""
    retain_resident_layers: bool
    sized: bool
    """Whether the planner sized the two sets; else they are the declared ones."""
    resident_set: LayerSet
    """The layers held during the use."""
    retained_set: LayerSet
    """Of those, the layers held across the gap; empty unless the use retains."""
    prefetch: int
    """Layers fetched ahead."""
    pinned: bool
    """Whether copies come from pinned host masters."""

    @property
    def given(self) -> set[str]:
        """The fields that are no decision."""
        return {"passes"} if self.sized else {"passes", "resident_set", "retained_set"}

    def component_use(self) -> ComponentUse:
        """The use as the candidate has it, for the phase graph to assign."""
        return ComponentUse(
            self.phase,
            self.component,
            self.passes,
            retain_resident_layers=self.retain_resident_layers,
            resident_layers=frozenset(self.resident_set) if self.sized else None,
            retained_layers=frozenset(self.retained_set) if self.sized else None,
        )


class CandidateRecord(Value):
    """All that a candidate holds and retains, in the order of phases and components."""

    uses: tuple[UseRecord, ...]

    @property
    def key(self) -> str:
        """Equal for candidates that decide the same under one fingerprint.

        So neither passes nor declared sets are in it, which follow from what the fingerprint has.
        """
        parts = sorted(use.model_dump_json(exclude=use.given) for use in self.uses)
        return sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def components(self) -> tuple[str, ...]:
        """Those that retain something across a gap."""
        retaining = (use.component for use in self.uses if use.retain_resident_layers)
        return tuple(dict.fromkeys(retaining))


def planned(plan: Plan) -> CandidateRecord:
    """What `plan` holds and retains. It doesn't say how many passes uses have: 1 stands for it."""
    declarations = () if plan.fingerprint is None else plan.fingerprint.declarations
    sized = {each.component for each in declarations if each.sized}
    return CandidateRecord(
        uses=tuple(
            UseRecord(
                phase=use.phase,
                component=use.component,
                passes=1,
                retain_resident_layers=use.retain_resident_layers,
                sized=use.component in sized,
                resident_set=use.resident_set,
                retained_set=use.retained_set,
                prefetch=use.prefetch,
                pinned=use.pinned,
            )
            for use in plan.uses
            if use.reason is not Reason.RESIDENT
        )
    )


class Streamed(Protocol):
    """How a component comes to the device."""

    @property
    def prefetch(self) -> int: ...

    @property
    def pinned(self) -> bool: ...


def record_of(
    uses: Iterable[ComponentUse],
    streamed: Mapping[str, Streamed],
    declared: Mapping[str, Iterable[int]],
) -> CandidateRecord:
    """The record of `uses`, which are a candidate's.

    By component: `streamed` is how it comes to the device, `declared` the resident set that the
    user declared, which is meant where a use gives no set of its own.
    """
    return CandidateRecord(
        uses=tuple(_use_record(use, streamed[use.component], declared) for use in uses)
    )


def _use_record(
    use: ComponentUse, streamed: Streamed, declared: Mapping[str, Iterable[int]]
) -> UseRecord:
    sized = use.resident_layers is not None
    held = use.resident_layers
    if held is None:
        # As declared, and only where it is of any use: see `nothing_retained`.
        holds = use.passes > 1 or use.retain_resident_layers
        held = frozenset(declared[use.component]) if holds else frozenset()
    retained = held if use.retained_layers is None else use.retained_layers
    return UseRecord(
        phase=use.phase,
        component=use.component,
        passes=use.passes,
        retain_resident_layers=use.retain_resident_layers,
        sized=sized,
        resident_set=tuple(sorted(held)),
        retained_set=tuple(sorted(retained)) if use.retain_resident_layers else (),
        prefetch=streamed.prefetch,
        pinned=streamed.pinned,
    )


class Kind(StrEnum):
    """Each is durable before what it announces is done, or tells what has been done."""

    BEGIN = "begin"
    """A run of the planner starts."""
    INTENT = "intent"
    """A candidate is about to be applied."""
    APPLIED = "applied"
    """It is applied, and is about to be validated."""
    VERDICT = "verdict"
    """What validation said of it."""
    COMMITTED = "committed"
    """It was accepted, and stays applied."""
    ROLLED_BACK = "rolled_back"
    """The pipeline is back at its baseline; behind a commit, the commit is taken back."""
    CRASH = "crash"
    """A later run found that the process ended between intent and end."""
    END = "end"
    """The run is over, in good order."""


class JournalRecord(Value):
    """One line of the journal."""

    format_version: Literal[1]
    kind: Kind
    run: str
    """Names the planner's run that this is about."""
    attempt: int | None
    """Counts the candidates that a run tries, from 1; None where it is about the run itself."""
    fingerprint: str
    """The digest of the fingerprint that the run was made under."""
    candidate: CandidateRecord | None
    """None where the record is about the run itself."""
    verdict: Verdict | None
    """With `verdict`, and with a commit that is taken back because of it."""
    detail: str | None
    """For people."""
    process: ProcessRecord
    """Who wrote this."""
    time: AwareDatetime
    """When, in UTC. Records are in the order of the file, whatever their times."""

    @model_validator(mode="after")
    def _is_of_a_run_or_an_attempt(self) -> Self:
        of_run = self.kind in (Kind.BEGIN, Kind.END)
        if (self.attempt is None) != of_run or (self.candidate is None) != of_run:
            raise ValueError(f"{self.kind} with attempt {self.attempt} and such a candidate")
        return self

    def to_line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"
