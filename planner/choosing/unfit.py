"""Why nothing fits: the certificate that `choose` gives in place of a choice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from .model import Choice, Fixed, Instance, Part, Place, nothing_retained
from .program import FINE, Program


class Lack(StrEnum):
    FIXED = "fixed"
    """What the user fixed contradicts itself."""
    HOST = "host"
    """Masters that have to be pinned don't fit in the host budget."""
    ROOM = "room"
    """Some place is short of device bytes, whatever is chosen."""
    REFUTED = "refuted"
    """All that would fit was refuted."""


@dataclass(frozen=True, slots=True)
class Unfit:
    """`place` is where the choice that comes closest lacks the most; `short_bytes` is what is
    missing there, and no choice lacks less in all places."""

    lack: Lack
    short_bytes: int = 0
    place: Place | None = None
    phase: str | None = None
    shape: str | None = None
    component: str | None = None
    streamed: bool = True
    """Whether the choice that comes closest streams everything that isn't fixed."""
    fixed: bool = False
    """Whether the user fixed something."""

    def __str__(self) -> str:
        match self.lack:
            case Lack.FIXED:
                return f"what is fixed for {self.component} can't be: {_FIXED_HINT}"
            case Lack.HOST:
                return (
                    f"the host budget is short by {self.short_bytes} bytes for the masters that "
                    "have to be pinned"
                )
            case Lack.REFUTED:
                return "everything that fits was refuted"
            case Lack.ROOM:
                even = "even with everything streamed" if self.streamed else "whatever is held"
                if self.fixed and self.streamed:
                    even += " that isn't fixed"
                return f"{self.phase} at {self.shape} is short by {self.short_bytes} bytes, {even}"


_FIXED_HINT = (
    "more layers than there are, more retained than resident, or a mode that isn't offered"
)


def unfit(instance: Instance) -> Unfit | None:
    """What can be told without a search: a contradiction in what is fixed, the host budget."""
    for part in instance.parts:
        if not _can_keep_fixed(part):
            return Unfit(Lack.FIXED, component=part.component, fixed=True)
    if instance.host_budget_bytes is not None:
        least = sum(
            min(mode.host_bytes for mode in part.modes if part.fixed.mode in (None, mode))
            for part in instance.parts
        )
        if least > instance.host_budget_bytes:
            return Unfit(Lack.HOST, least - instance.host_budget_bytes, fixed=_is_fixed(instance))
    return None


def closest(instance: Instance) -> Choice:
    """The choice that lacks the least in the place where it lacks most, whatever was refuted; of
    those, one that holds little. What is fixed and the host budget have to be possible."""
    program = Program(instance, elastic=True)
    near = program.bytes.of(1) / 2
    answer = program.minimise(program.shortage, within=near, deadline=math.inf)
    assert answer.choice is not None, "rooms of any size fit something"
    short_bytes, _ = _worst(instance, answer.choice)
    program.limit(program.shortage, program.bytes.of(max(short_bytes, 0)) + near)
    least = program.minimise(program.order(), within=FINE, deadline=math.inf)
    return least.choice or answer.choice


def short(instance: Instance, closest: Choice) -> Unfit:
    """The certificate for an instance that no choice fits, though what is fixed and the host do."""
    short_bytes, place = _worst(instance, closest)
    if short_bytes <= 0:
        return Unfit(Lack.REFUTED, fixed=_is_fixed(instance))
    return Unfit(
        Lack.ROOM,
        short_bytes,
        place,
        instance.places[place].phase,
        instance.places[place].shape,
        streamed=all(
            chosen == nothing_retained(part, chosen.mode)
            for part, chosen in zip(instance.parts, closest, strict=True)
        ),
        fixed=_is_fixed(instance),
    )


def _worst(instance: Instance, choice: Choice) -> tuple[int, Place]:
    """The most bytes that a place is short of, and the first such place."""
    return max(
        (
            (instance.device_bytes(choice, place) - room.room_bytes, place)
            for place, room in enumerate(instance.places)
        ),
        key=lambda each: (each[0], -each[1]),
    )


def _is_fixed(instance: Instance) -> bool:
    return any(part.fixed != Fixed() for part in instance.parts)


def _can_keep_fixed(part: Part) -> bool:
    fixed = part.fixed
    if fixed.mode is not None and fixed.mode not in part.modes:
        return False
    counts = [layers.count for layers in part.classes]
    for each in (fixed.resident, fixed.retained):
        if each is not None and (
            len(each) != len(counts)
            or any(not 0 <= n <= most for n, most in zip(each, counts, strict=True))
        ):
            return False
    if fixed.retains and fixed.resident is not None and fixed.retained is not None:
        return all(kept <= held for kept, held in zip(fixed.retained, fixed.resident, strict=True))
    return True
