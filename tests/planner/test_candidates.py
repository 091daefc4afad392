from hypothesis import given
from hypothesis import strategies as st

from residency.phases.headroom import Headroom
from residency.phases.shape import Shape
from residency.phases.use import ComponentUse
from residency.planner.candidates import Candidate, Limits, Option, candidates

SHAPE = Shape(720, 720)
DECODE = ("vae_decode", SHAPE)
ENCODE = ("text_encode", SHAPE)


def option(name: str, saved_bytes: int, retained_bytes: int = 1, **demands: int) -> Option:
    places = {(phase, SHAPE): demand for phase, demand in demands.items()}
    return Option(ComponentUse("use", name), retained_bytes, saved_bytes, places)


def limits(**headroom_bytes: int) -> Limits:
    return Limits(
        [
            Headroom(phase, SHAPE, free + 7, 0, 0, peak_bytes=0, margin_bytes=7)
            for phase, free in headroom_bytes.items()
        ]
    )


@given(st.lists(st.integers(0, 5), max_size=7))
def test_every_non_empty_set_comes_once_and_those_that_save_more_come_first(saved):
    options = [option(f"c{i}", each) for i, each in enumerate(saved)]
    found = list(candidates(options))
    assert len({frozenset(each.components) for each in found}) == len(found)
    assert len(found) == 2 ** len(options) - 1
    savings = [each.saved_bytes for each in found]
    assert savings == sorted(savings, reverse=True)


def test_a_candidate_demands_the_sum_of_its_sets_in_each_phase():
    both = Candidate((option("a", 1, vae_decode=3, text_encode=2), option("b", 1, vae_decode=4)))
    assert (both.demand_bytes(DECODE), both.demand_bytes(ENCODE)) == (7, 2)


def test_the_shortage_is_where_the_most_is_missing_and_keeps_the_margin():
    candidate = Candidate((option("a", 1, vae_decode=30, text_encode=30),))
    shortage = limits(text_encode=29, vae_decode=10).shortage(candidate)
    assert (shortage.place, shortage.short_bytes) == (DECODE, 20)
    assert limits(text_encode=30, vae_decode=30).shortage(candidate) is None


def test_a_phase_without_headroom_stops_only_what_demands_something_there():
    candidate = Candidate((option("a", 1, text_encode=1),))
    assert limits(text_encode=1, vae_decode=-5).shortage(candidate) is None


def test_what_is_missing_in_a_place_leaves_the_margin_aside():
    candidate = Candidate((option("a", 1, vae_decode=30),))
    assert limits(vae_decode=10).missing_bytes(candidate, DECODE) == 30 - 10 - 7
    assert limits(vae_decode=25).missing_bytes(candidate, DECODE) == 0


def test_a_refutation_excludes_all_that_demand_as_much_in_that_place():
    small, large = option("s", 1, vae_decode=3), option("l", 1, vae_decode=5)
    elsewhere = option("e", 9, text_encode=50)
    known = limits(vae_decode=100, text_encode=100)
    known.refute(Candidate((large,)), DECODE)
    assert known.is_refuted(Candidate((large,)))
    assert known.is_refuted(Candidate((small, option("t", 1, vae_decode=2))))
    assert not known.is_refuted(Candidate((small,)))
    assert not known.is_refuted(Candidate((elsewhere,)))


def test_later_refutations_never_widen_what_is_allowed():
    known = limits(vae_decode=100)
    known.refute(Candidate((option("a", 1, vae_decode=5),)), DECODE)
    known.refute(Candidate((option("b", 1, vae_decode=9),)), DECODE)
    assert known.is_refuted(Candidate((option("c", 1, vae_decode=6),)))


def test_a_refutation_without_a_place_excludes_the_set_and_its_supersets():
    a, b = option("a", 1, vae_decode=5), option("b", 1, vae_decode=5)
    known = limits(vae_decode=100)
    known.refute(Candidate((a,)), None)
    assert known.is_refuted(Candidate((a, b)))
    assert not known.is_refuted(Candidate((b,)))
