"""Whether to keep what was committed: readings of free memory wobble from start to start."""

from __future__ import annotations

from dataclasses import replace

from .choice import Chosen, choose, most_seconds
from .instance import Choice, Instance

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
