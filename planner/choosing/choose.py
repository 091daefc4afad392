"""The exact choice: what is resident and retained, and how each component is streamed.

Decided in this order, each step among what the steps before leave equal:

    1  the least seconds of a request; from here on, up to 1 % more
    2  the fewest bytes held on the device
    3  the fewest bytes pinned on the host
    4  the least seconds; less than a ten-thousandth is decided by a fixed order, in which shallow
       prefetch and few layers come first

Each step is a mixed-integer program (`program.py`), and every answer is checked in integers.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from .block import Terms, added, modes
from .model import Choice, Instance, nothing_retained
from .program import FINE, Answer, Program
from .unfit import Unfit, closest, short, unfit

SLACK = 0.01
"""The share of the best request's seconds that is given up for fewer bytes."""
NEAR = 1e-9
"""Of a request: what is not worth a difference."""
ROOM_SLACK = 1e-6
"""Of a room, given to HiGHS on top: it may cut off what fills a room to the byte. What exceeds a
room is excluded when it is found."""
SLIPS = 8
"""How often it may be found; then the search is done again without the slack, and not proven."""


@dataclass(frozen=True, slots=True)
class Chosen:
    choice: Choice
    seconds: float
    """Of a request."""
    best_s: float
    """Of the fastest choice that was found; `seconds` is within 1 % of it."""
    bound_s: float
    """No choice is faster."""
    held_bytes: int
    host_bytes: int
    proven: bool
    """Whether every step was solved to its end; else time was up, or too many choices exceed a
    room by too little for floats, and this is the best that was found."""

    @property
    def gap(self) -> float:
        """The share of `best_s` that a faster choice could save at most."""
        return (self.best_s - self.bound_s) / self.best_s if self.best_s else 0.0


def choose(
    instance: Instance, *, time_limit_s: float = 10.0, start: Choice | None = None
) -> Chosen | Unfit:
    """The choice that fits and is best, or what keeps all from fitting.

    `start` is where the search begins, such as the choice before a refutation; it has no say in
    what is chosen. When time is up the best found so far is returned; only where nothing was found
    that fits does the search go on until something is, or it is certain that nothing does.
    """
    deadline = time.perf_counter() + time_limit_s
    if (lacking := unfit(instance)) is not None:
        return lacking
    if not instance.parts and instance.fits(()):
        fixed_s = instance.fixed_seconds
        return Chosen((), fixed_s, fixed_s, fixed_s, 0, 0, proven=True)
    loose = Program(instance, slack=ROOM_SLACK)
    found = _chosen(loose, start, deadline)
    if found is None and loose.is_slippery:
        found = _chosen(Program(instance), start, deadline)
        if found is not None:
            found = replace(found, bound_s=instance.fixed_seconds, proven=False)
    if found is not None:
        return found
    nearest = closest(instance)
    if not instance.fits(nearest):
        return short(instance, nearest)
    seconds = instance.seconds(nearest)
    held_bytes, host_bytes = instance.held_bytes(nearest), instance.host_bytes(nearest)
    return Chosen(
        nearest, seconds, seconds, instance.fixed_seconds, held_bytes, host_bytes, proven=False
    )


def _chosen(program: Program, start: Choice | None, deadline: float) -> Chosen | None:
    """None where nothing was found, or the program turned out slippery."""
    instance = program.instance
    fastest = _fastest(program, start, deadline)
    if fastest.choice is None or (program.is_slippery and program.slack):
        return None
    best_s = instance.seconds(fastest.choice)
    bound_s = instance.fixed_seconds + max(fastest.bound / program.per_second, 0.0)
    best, proven = _smallest(program, fastest.choice, deadline)
    if program.is_slippery and program.slack:
        return None
    return Chosen(
        best,
        instance.seconds(best),
        best_s,
        min(bound_s, best_s),
        instance.held_bytes(best),
        instance.host_bytes(best),
        proven and fastest.optimal,
    )


def most_seconds(best_s: float) -> float:
    """Of a request, where the fastest choice takes `best_s`."""
    return best_s * (1 + SLACK) * (1 + NEAR)


def _fastest(program: Program, start: Choice | None, deadline: float) -> Answer:
    instance = program.instance
    streamed = tuple(nothing_retained(part, modes(part)[0]) for part in instance.parts)
    begin = next((each for each in (start, streamed) if each and instance.fits(each)), None)
    seconds = program.seconds()
    answer = _solve(program, seconds, FINE, deadline, begin or start)
    if program.is_slippery and program.slack:
        return answer
    if answer.choice is None and begin is not None:
        return replace(answer, choice=begin, optimal=False, bound=0.0)
    if answer.choice is None and not answer.infeasible:
        return replace(_solve(program, {}, 0.0, math.inf), optimal=False, bound=0.0)
    return answer


def _smallest(program: Program, fastest: Choice, deadline: float) -> tuple[Choice, bool]:
    """The best by the steps behind the first, and whether all of them came to their end."""
    instance, best = program.instance, fastest
    seconds, held, host = program.seconds(), program.held_bytes(), program.host_bytes()

    most_s = most_seconds(instance.seconds(fastest))
    program.limit(seconds, (most_s - instance.fixed_seconds) * program.per_second)
    for objective, within in (
        (held, program.bytes.half_step),
        (host, program.hosts.half_step),
        (added(seconds, program.order()), FINE),
    ):
        if objective is host and len(set(host.values())) == 1:
            continue
        answer = _solve(program, objective, within, deadline)
        if answer.choice is None or not answer.optimal:
            return answer.choice or best, False
        best = answer.choice
        if objective is held:
            program.limit(held, program.bytes.limit(instance.held_bytes(best)))
        elif objective is host:
            program.limit(host, program.hosts.limit(instance.host_bytes(best)))
    return best, True


def _solve(
    program: Program,
    objective: Terms,
    within: float,
    deadline: float,
    start: Choice | None = None,
) -> Answer:
    """An answer that fits in integers, or none."""
    instance = program.instance
    for _ in range(SLIPS):
        answer = program.minimise(objective, within=within, deadline=deadline, start=start)
        if answer.choice is None or instance.fits(answer.choice):
            return answer
        for place, room in enumerate(instance.places):
            if instance.device_bytes(answer.choice, place) > room.room_bytes:
                program.exclude(answer.choice, place)
    program.is_slippery = True
    return replace(answer, choice=None, optimal=False, is_done=False)


WOBBLE_BYTES = 64 << 20
"""How far a reading of free memory may be from the true one, either way."""


def kept(
    instance: Instance,
    previous: Choice,
    *,
    wobble_bytes: int = WOBBLE_BYTES,
    time_limit_s: float = 10.0,
) -> Choice | None:
    """`previous`, in the modes of `instance`, where it should stay; else None.

    Two readings of one card differ by up to twice the wobble. So `previous` stays where it fits
    with twice the wobble more room in every place, and where with twice the wobble less room
    everywhere the fastest choice doesn't beat it by more than the 1 % that `choose` gives up for
    fewer bytes. Then what `choose` made of one reading stays at any other within the wobble:

        it fits      its room is no more than this reading's and twice the wobble
        not beaten   the fastest choice of its reading isn't beaten by that of a smaller room

    It may exceed the room as read now by twice the wobble, so a margin has to cover that.
    """
    choice = _in_modes_of(instance, previous)
    if choice is None or not instance.shifted(2 * wobble_bytes).fits(choice):
        return None
    lowered = choose(instance.shifted(-2 * wobble_bytes), time_limit_s=time_limit_s, start=choice)
    if isinstance(lowered, Chosen) and instance.seconds(choice) > most_seconds(lowered.best_s):
        return None
    return choice


def _in_modes_of(instance: Instance, choice: Choice) -> Choice | None:
    """With each mode as it is measured now; None where a component or a mode is gone."""
    if len(choice) != len(instance.parts):
        return None
    found = []
    for part, chosen in zip(instance.parts, choice, strict=True):
        mode = next(
            (
                mode
                for mode in part.modes
                if (mode.prefetch, mode.pinned) == (chosen.mode.prefetch, chosen.mode.pinned)
            ),
            None,
        )
        if mode is None:
            return None
        found.append(replace(chosen, mode=mode))
    return tuple(found)
