"""What a choice takes and saves, by hand."""

from dataclasses import replace

import pytest
from instances import PAGEABLE, part

from residency.planner.choosing.model import (
    Fixed,
    LayerClass,
    Mode,
    Part,
    PartChoice,
    UseSpan,
    allows,
    copied_bytes,
    exceeds,
    nothing_retained,
    part_bytes,
    window_bytes,
)


def test_the_window_is_as_large_as_what_is_streamed() -> None:
    dit = part((2, 100), (3, 10))
    deep = Mode(3, False, 0.02, 0)
    assert window_bytes(dit, (0, 0), PAGEABLE) == 200
    assert window_bytes(dit, (1, 3), PAGEABLE) == 100
    assert window_bytes(dit, (2, 0), PAGEABLE) == 20
    assert window_bytes(dit, (2, 1), deep) == 20
    assert window_bytes(dit, (2, 3), deep) == 0


def test_layers_that_run_in_no_use_take_no_window() -> None:
    vision = LayerClass("vision", 4, 500, 500, (False,))
    encoder = replace(part((2, 10)), classes=(LayerClass("g", 2, 10, 10, (True,)), vision))
    assert window_bytes(encoder, (0, 0), PAGEABLE) == 20


def test_copies_of_a_use_are_fewer_by_what_is_held_and_what_arrives() -> None:
    dit = part((10, 10), passes=4, rest_bytes=7)
    held = PartChoice(((6,),), ((0,),), (False,), PAGEABLE)
    retained = PartChoice(((6,),), ((2,),), (True,), PAGEABLE)
    assert copied_bytes(dit, nothing_retained(dit, PAGEABLE), 0) == 10 * 10 * 4 + 7
    assert copied_bytes(dit, held, 0) == (4 * 4 + 6) * 10 + 7
    assert copied_bytes(dit, retained, 0) == (4 * 4 + 4) * 10
    assert part_bytes(dit, retained, 1) == 7 + 20
    assert part_bytes(dit, held, 1) == 0


def test_what_arrives_and_is_not_held_is_there_as_well() -> None:
    vae = Part(
        "vae",
        0,
        0,
        (LayerClass("g", 4, 10, 10, (True, True)),),
        (
            UseSpan("a", (0,), (1,), 1, (), 1.0),
            UseSpan("b", (1,), (1,), 1, (), 1.0),
        ),
        (PAGEABLE,),
    )
    chosen = PartChoice(((3,), (0,)), ((3,), (0,)), (True, False), PAGEABLE)
    assert part_bytes(vae, chosen, 1) == 30 + 20
    assert copied_bytes(vae, chosen, 1) == 10


def test_nothing_is_resident_where_nothing_is_held() -> None:
    once = part((4, 10), passes=1)
    assert not allows(once, PartChoice(((2,),), ((0,),), (False,), PAGEABLE))
    assert allows(once, PartChoice(((2,),), ((0,),), (True,), PAGEABLE))


@pytest.mark.parametrize("retains", [None, False, True])
def test_nothing_retained_keeps_to_what_is_fixed(retains: bool | None) -> None:
    for resident in (None, (3,)):
        for retained in (None, (2,)):
            for passes in (1, 4):
                fixed = Fixed(resident, retained, retains)
                held = part((4, 10), passes=passes, fixed=fixed)
                assert allows(held, nothing_retained(held, PAGEABLE))


def test_a_choice_that_prefetches_or_pins_less_is_not_as_large() -> None:
    dit = part((4, 10))
    mode = Mode(2, True, 0.01, 40)
    choice = (PartChoice(((2,),), ((1,),), (True,), mode),)
    assert exceeds(choice, choice)
    assert exceeds((replace(choice[0], resident=((3,),)),), choice)
    assert not exceeds((replace(choice[0], retained=((0,),)),), choice)
    for smaller in (Mode(1, True, 0.01, 40), Mode(2, False, 0.02, 0)):
        assert not exceeds((replace(choice[0], mode=smaller),), choice)
    assert not exceeds((nothing_retained(dit, mode),), choice)
