"""The choice by trying all: what `choose` has to agree with, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from residency.planner.choosing.block import mode_rank
from residency.planner.choosing.choose import most_seconds
from residency.planner.choosing.model import (
    Choice,
    Instance,
    Part,
    PartChoice,
    Place,
    allows,
    copy_seconds,
    exceeds,
    part_bytes,
)
from residency.planner.choosing.program import MODE_WEIGHT, Order


@dataclass(frozen=True)
class Best:
    best_s: float
    held_bytes: int
    host_bytes: int
    seconds_and_order: float
    """Of the last step: two choices with the same are both right."""


def part_choices(part: Part) -> Iterator[PartChoice]:
    """The whole space of a part, what is fixed kept."""
    counts = [product(*(range(layers.count + 1) for layers in part.classes)) for _ in part.uses]
    tables = [*product(*counts)]
    for resident, retained in product(tables, tables):
        for retains in product((False, True), repeat=len(part.uses)):
            for mode in part.modes:
                chosen = PartChoice(resident, retained, retains, mode)
                if allows(part, chosen):
                    yield chosen


def size(instance: Instance) -> int:
    """Of the space: how many choices there are, whether or not they fit."""
    return math.prod(sum(1 for _ in part_choices(part)) for part in instance.parts)


def all_that_fit(instance: Instance) -> Iterator[tuple[Choice, float]]:
    """Choices that fit, and their seconds."""
    places = range(len(instance.places))
    options = [
        [
            (
                chosen,
                copy_seconds(part, chosen),
                [_taken(instance, part, chosen, p) for p in places],
            )
            for chosen in part_choices(part)
        ]
        for part in instance.parts
    ]
    rooms = [room.room_bytes for room in instance.places]
    for combination in product(*options):
        used = map(sum, zip(*(taken for _, _, taken in combination), strict=True))
        if any(a > b for a, b in zip(used, rooms, strict=True)):
            continue
        choice = tuple(chosen for chosen, _, _ in combination)
        budget = instance.host_budget_bytes
        if budget is not None and instance.host_bytes(choice) > budget:
            continue
        if any(exceeds(choice, each) for each in instance.refuted):
            continue
        yield choice, instance.fixed_seconds + sum(s for _, s, _ in combination)


def _taken(instance: Instance, part: Part, chosen: PartChoice, place: Place) -> int:
    on_card = chosen.mode.host_bytes if instance.pinned_on_card else 0
    return part_bytes(part, chosen, place) + on_card


def best(instance: Instance) -> Best | None:
    fitting = [*all_that_fit(instance)]
    if not fitting:
        return None
    best_s = min(seconds for _, seconds in fitting)
    left = [each for each in fitting if each[1] <= most_seconds(best_s)]
    held = min(instance.held_bytes(choice) for choice, _ in left)
    left = [each for each in left if instance.held_bytes(each[0]) == held]
    host = min(instance.host_bytes(choice) for choice, _ in left)
    left = [each for each in left if instance.host_bytes(each[0]) == host]
    order = Order(instance)
    last = min(seconds + penalty_s(order, choice) for choice, seconds in left)
    return Best(best_s, held, host, last)


def shortest(instance: Instance) -> float:
    """The least that any choice lacks in the place where it lacks most."""
    least: float = math.inf
    places = range(len(instance.places))
    for choice in product(*(part_choices(part) for part in instance.parts)):
        budget = instance.host_budget_bytes
        if budget is not None and instance.host_bytes(choice) > budget:
            continue
        lacks = [
            instance.device_bytes(choice, place) - instance.places[place].room_bytes
            for place in places
        ]
        least = min(least, max(lacks))
    return least


def penalty_s(order: Order, choice) -> float:
    """What the fixed order that breaks ties weighs against `choice`."""
    total = 0
    for part, chosen, weights in zip(order.instance.parts, choice, order.weights(), strict=True):
        tables = (chosen.retains, *chosen.resident, *chosen.retained)
        counts = (int(each) for table in tables for each in table)
        total += MODE_WEIGHT * mode_rank(part, chosen.mode)
        total += sum(w * count for w, count in zip(weights, counts, strict=True))
    return total * order.unit_s
