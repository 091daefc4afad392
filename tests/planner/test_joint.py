"""All ranks as one instance: what fits it fits each rank, and asymmetric ranks are planned."""

from dataclasses import replace

import pytest
from brute_force import part_choices, size
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from instances import PAGEABLE, instance, instances, part

from residency.offload.errors import DeviceError
from residency.planner.choosing.choose import Chosen, choose
from residency.planner.choosing.joint import Joint, check_cards, joined
from residency.planner.choosing.model import (
    Choice,
    Fixed,
    Instance,
    Mode,
    Part,
    PartChoice,
    nothing_retained,
)
from residency.planner.choosing.unfit import Lack, Unfit

MIB = 1 << 20
GIB = 1 << 30

drawn = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


def streamed(whole: Instance) -> Choice:
    return tuple(nothing_retained(each, each.modes[0]) for each in whole.parts)


def chosen_for(joint: Joint) -> Choice:
    found = choose(joint.instance)
    assert isinstance(found, Chosen), str(found)
    assert found.proven
    return found.choice


def test_ranks_that_are_alike_share_places_and_parts() -> None:
    first = instance(part((4, 10)), rooms=(50, 70), host=9)
    second = instance(part((4, 10)), rooms=(60, 20))
    refuted = streamed(first)
    joint = joined((first, replace(second, refuted=(refuted,))))
    assert joint.instance == replace(
        first, places=(first.places[0], second.places[1]), refuted=(refuted,)
    )
    assert joint.tightest == (0, 1)
    assert joint.share(refuted, 0) == joint.share(refuted, 1) == refuted


def test_one_rank_is_its_own_instance() -> None:
    alone = instance(part((4, 10), modes=(Mode(1, True, 0.01, 40),)), rooms=(50, 70), host=90)
    assert joined((alone,)).instance == alone


def test_the_slowest_rank_says_what_a_byte_costs() -> None:
    fast, slow = Mode(1, False, 0.01, 0), Mode(1, False, 0.03, 0)
    hidden, exposed = part((4, 10), modes=(slow,)), part((4, 10), modes=(fast,))
    hidden = replace(hidden, uses=(replace(hidden.uses[0], exposure=0.5),))
    ranks = [
        replace(instance(exposed, rooms=(50, 70)), fixed_seconds=3.0),
        instance(hidden, rooms=(50, 70)),
    ]
    joint = joined(ranks)
    assert joint.instance.parts[0].uses[0].exposure == 1.0
    assert joined(ranks[::-1]).instance == joint.instance
    assert joint.instance.parts[0].modes == (slow,)
    assert joint.instance.fixed_seconds == 3.0
    choice = streamed(joint.instance)
    assert [joint.share(choice, rank)[0].mode for rank in (0, 1)] == [fast, slow]
    assert joint.together([joint.share(choice, 0), joint.share(choice, 1)]) == choice


def test_what_the_user_fixed_is_fixed_for_all() -> None:
    fast, slow = Mode(1, False, 0.01, 0), Mode(1, False, 0.03, 0)
    ranks = [
        instance(part((4, 10), modes=(mode,), fixed=Fixed(mode=mode)), rooms=(50, 70))
        for mode in (fast, slow)
    ]
    assert joined(ranks).instance.parts[0].fixed.mode == slow


DIT = part((4, 10), passes=1)
TWICE = replace(DIT, uses=(replace(DIT.uses[0], valued_passes=2),))


@pytest.mark.parametrize(
    "other",
    [
        part((5, 10), passes=1),
        replace(DIT, non_layer_bytes=1),
        replace(DIT, non_layer_copy_bytes=1),
        replace(DIT, fixed=Fixed(resident=(1,))),
        replace(DIT, fixed=Fixed(mode=PAGEABLE)),
        replace(DIT, modes=(Mode(2, False, 0.02, 0),)),
        replace(DIT, uses=(replace(DIT.uses[0], passes=(2,)),)),
        replace(TWICE, uses=(replace(TWICE.uses[0], valued_passes=3),)),
        replace(DIT, component="vae"),
    ],
)
def test_what_is_not_alike_is_chosen_for_apart_and_takes_nothing_elsewhere(other: Part) -> None:
    joint = joined([instance(each, rooms=(50, 70)) for each in (DIT, TWICE, other)])
    assert joint.members == ((0,), (1,), (2,))
    assert [each.uses[0].places for each in joint.instance.parts] == [(0,), (2,), (4,)]
    assert [each.uses[0].gap_places for each in joint.instance.parts] == [(1,), (3,), (5,)]


def test_ranks_that_run_a_part_otherwise_share_it_and_have_places_of_their_own() -> None:
    once = replace(part((4, 10)), uses=(replace(part((4, 10)).uses[0], passes=(1,)),))
    ranks = [instance(each, rooms=(50, 70)) for each in (part((4, 10)), once)]
    joint = joined(ranks)
    assert joint.members == ((0,), (0,))
    held = (PartChoice(((4,),), ((0,),), (False,), PAGEABLE),)
    assert [joint.instance.device_bytes(held, place) for place in range(4)] == [40, 0, 20, 0]
    assert [rank.device_bytes(held, 0) for rank in ranks] == [40, 20]


def test_a_component_that_works_in_another_phase_is_chosen_for_apart() -> None:
    first = instance(part((4, 10), passes=1), rooms=(50, 70))
    second = instance(part((4, 10), passes=1, phase=1), rooms=(70, 20))
    choice = chosen_for(joined((first, second)))
    assert [each.retained for each in choice] == [((4,),), ((0,),)]


def test_what_ranks_choose_apart_is_no_choice_for_all() -> None:
    ranks = [instance(part((4, 10)), rooms=(50, 70))] * 2
    joint = joined(ranks)
    other = (PartChoice(((1,),), ((0,),), (False,), PAGEABLE),)
    assert joint.together([streamed(ranks[0]), other]) is None


def with_vae(room_bytes: int, decode_bytes: int) -> Instance:
    """Text, denoise and decode, each a place; of the encoder 10 layers may be retained, of the
    denoiser none."""
    text = part((10, 10), passes=1, places=3, component="text_encoder")
    dit = part((4, 20), phase=1, places=3, component="dit", fixed=Fixed((0,), (0,), False))
    vae = part(phase=2, places=3, passes=1, rest_bytes=30, component="vae")
    return instance(text, dit, vae, rooms=(room_bytes, room_bytes, decode_bytes))


def without_vae(room_bytes: int) -> Instance:
    whole = with_vae(room_bytes, 0)
    parts = tuple(
        replace(
            each,
            uses=tuple(
                replace(use, gap_places=tuple(p for p in use.gap_places if p != 2))
                for use in each.uses
            ),
        )
        for each in whole.parts[:2]
    )
    return replace(whole, places=whole.places[:2], parts=parts)


@pytest.mark.parametrize(("decode_bytes", "kept"), [(130, 10), (80, 5), (30, 0)])
def test_mr_02_the_decode_of_rank_0_binds_all_ranks(decode_bytes: int, kept: int) -> None:
    """MR-02: only rank 0 decodes. The encoder, which both have, is retained as its peak allows."""
    joint = joined((with_vae(200, decode_bytes), without_vae(200)))
    choice = chosen_for(joint)
    shares = [joint.share(choice, rank) for rank in (0, 1)]
    assert [len(share) for share in shares] == [3, 2]
    assert shares[0][:2] == shares[1]
    assert shares[1][0].retained == ((kept,),)
    assert all(rank.fits(share) for rank, share in zip(joint.ranks, shares, strict=True))
    assert chosen_for(joined((without_vae(200),)))[0].retained == ((10,),)


def test_mr_02_a_component_takes_nothing_where_a_rank_has_it_not() -> None:
    """MR-02."""
    joint = joined((with_vae(200, 130), without_vae(200)))
    choice = chosen_for(joint)
    taken = [joint.instance.device_bytes(choice, place) for place in range(5)]
    own = [
        rank.device_bytes(joint.share(choice, number), place)
        for number, rank in enumerate(joint.ranks)
        for place in range(len(rank.places))
    ]
    assert taken == own
    assert joint.tightest == (0, 0, 0, 1, 1)
    assert own[2] == 30 + 100


def test_mr_03_stages_of_a_pipeline_are_planned_each_for_its_own_layers() -> None:
    """MR-03: two stages have 10 and 6 layers of one component, and none of each other's."""
    first = instance(part((10, 10)), rooms=(80, 200))
    second = instance(part((6, 10)), rooms=(40, 200))
    joint = joined((first, second))
    assert [each.classes[0].count for each in joint.instance.parts] == [10, 6]
    choice = chosen_for(joint)
    shares = [joint.share(choice, rank) for rank in (0, 1)]
    assert [share[0].resident for share in shares] == [((6,),), ((2,),)]
    assert joint.instance.device_bytes(choice, 0) == first.device_bytes(shares[0], 0) == 80
    assert joint.instance.device_bytes(choice, 2) == second.device_bytes(shares[1], 0) == 40


def test_mr_04_the_rank_with_the_least_memory_decides() -> None:
    """MR-04: 672 MiB are wanted; GPU 0 has 537 MiB, and the other three have 37 GB."""
    encoder = part((1, 672 * MIB), passes=1, component="text_encoder")
    free = (537 * MIB, *(37_000_000_000,) * 3)
    ranks = [instance(encoder, rooms=(40 * GIB, room)) for room in free]
    joint = joined(ranks)
    assert joint.tightest == (0, 0)
    assert chosen_for(joint)[0].retains == (False,)
    assert chosen_for(joined(ranks[1:]))[0].retains == (True,)


@pytest.mark.parametrize(
    ("ranks", "shards", "fits"), [(2, 1, True), (4, 1, True), (8, 1, False), (8, 8, True)]
)
def test_hm_11_every_rank_of_a_node_pins_masters_of_its_own(
    ranks: int, shards: int, fits: bool
) -> None:
    """HM-11: 115.5 GiB, pinned by 2, 4 or 8 ranks of a node with 1 TB, 5 % kept, or sharded."""
    pinned = Mode(1, True, 0.01, int(115.5 * GIB) // shards)
    share_bytes = 950_000_000_000 // ranks
    whole = instance(part((4, 10), modes=(pinned,)), rooms=(50, 70), host=share_bytes)
    found = choose(joined([whole] * ranks).instance)
    assert isinstance(found, Chosen) == fits
    if isinstance(found, Unfit):
        assert found.lack is Lack.HOST
        assert found.short_bytes == int(115.5 * GIB) - share_bytes


def test_the_least_host_budget_of_a_rank_is_that_of_all_parts() -> None:
    pinned = Mode(1, True, 0.01, 40)
    first = instance(part((4, 10), modes=(pinned,)), rooms=(50, 70), host=80)
    second = instance(part((5, 10), modes=(pinned,)), rooms=(50, 70), host=90)
    assert joined((first, second)).instance.host_budget_bytes == 80
    assert isinstance(choose(joined((first, second)).instance), Chosen)
    less = replace(second, host_budget_bytes=79)
    assert isinstance(choose(joined((first, less)).instance), Unfit)


def test_what_is_pinned_is_charged_to_the_card_where_one_rank_has_it_so() -> None:
    pinned = Mode(1, True, 0.01, 40)
    whole = instance(part((4, 10), modes=(pinned,)), rooms=(70, 70))
    joint = joined((whole, replace(whole, pinned_on_card=True)))
    assert joint.instance.device_bytes(streamed(joint.instance), 0) == 20 + 40


def test_fd_05_ranks_on_one_card_are_refused() -> None:
    """FD-05: two on one card, of which each measures while the other loads."""
    check_cards(["GPU-a", "GPU-b"])
    with pytest.raises(DeviceError, match="ranks 0 and 2 are on one card, GPU-a"):
        check_cards(["GPU-a", "GPU-b", "GPU-a"])


def test_a_refutation_of_one_rank_leaves_other_parts_open() -> None:
    first, second = with_vae(200, 200), without_vae(200)
    most = PartChoice(((10,),), ((10,),), (True,), PAGEABLE)
    refuted = (most, nothing_retained(second.parts[1], PAGEABLE))
    joint = joined((first, replace(second, refuted=(refuted,))))
    choice = chosen_for(joint)
    assert choice[0].retained == ((9,),)
    assert choice[2].retains == (True,)


@st.composite
def ranks_drawn(draw: st.DrawFn) -> tuple[tuple[Instance, ...], Choice]:
    """2 or 3 ranks: some without a component, with other sizes, other rooms, slower; and a choice
    for all of them."""
    base = draw(instances())
    budget = draw(st.none() | st.integers(0, 160))
    ranks = []
    for _ in range(draw(st.integers(2, 3))):
        parts = [each for each in base.parts if draw(st.integers(0, 3))]
        parts = [draw(_altered(each)) for each in parts]
        places = tuple(replace(each, room_bytes=draw(st.integers(0, 150))) for each in base.places)
        ranks.append(replace(base, places=places, parts=tuple(parts), host_budget_bytes=budget))
    whole = joined(ranks).instance
    assume(whole.parts and size(whole) <= 10_000)
    choice = tuple(draw(st.sampled_from([*part_choices(each)] or [None])) for each in whole.parts)
    assume(None not in choice)
    return tuple(ranks), choice


@st.composite
def _altered(draw: st.DrawFn, given: Part) -> Part:
    """Mostly as it is; else with larger layers, slower copies, other passes, shorter gaps, with
    nothing fixed, or with one mode."""

    def seldom() -> bool:
        return draw(st.integers(0, 4)) == 4

    altered = given
    if seldom():
        larger = (replace(each, layer_bytes=each.layer_bytes + 2) for each in given.classes)
        altered = replace(altered, classes=tuple(larger))
    if seldom():
        altered = replace(altered, fixed=Fixed())
    if seldom() and altered.fixed.mode is None:
        slower = (replace(each, seconds_per_byte=each.seconds_per_byte * 2) for each in given.modes)
        altered = replace(altered, modes=tuple(slower))
    if seldom() and altered.fixed.mode is None:
        altered = replace(altered, modes=altered.modes[:1])
    if seldom():
        uses = (
            replace(use, passes=(draw(st.integers(1, 3)),) * len(use.passes)) for use in given.uses
        )
        altered = replace(altered, uses=tuple(uses))
    if seldom():
        uses = (replace(use, gap_places=use.gap_places[:-1]) for use in altered.uses)
        altered = replace(altered, uses=tuple(uses))
    return altered


@drawn
@given(ranks_drawn(), st.booleans())
def test_a_choice_for_all_fits_where_each_share_fits_its_rank(
    ranks_and_choice: tuple[tuple[Instance, ...], Choice], refutes: bool
) -> None:
    ranks, choice = ranks_and_choice
    if refutes and ranks[1].parts:
        ranks = (ranks[0], ranks[1].without(streamed(ranks[1])), *ranks[2:])
    joint = joined(ranks)
    shares = [joint.share(choice, rank) for rank in range(len(ranks))]
    assert joint.together(shares) == choice
    fits = all(rank.fits(share) for rank, share in zip(ranks, shares, strict=True))
    is_bound = joint.instance.pinned_on_card or joint.instance.host_budget_bytes is not None
    if is_bound and any(len(mine) < len(choice) for mine in joint.members):
        assert fits or not joint.instance.fits(choice)
    else:
        assert joint.instance.fits(choice) == fits
