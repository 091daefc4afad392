from functools import cache

from bench_card import GIB, Bench, bench, tiny

from residency.offload.cards import custom_card
from residency.planner.account.explain import explain
from residency.planner.choosing.prices import Pricing
from residency.planner.plan import ComponentStop, Explanation, Stop

SIZED = frozenset({"text_encoder", "transformer"})


def explained(test: Bench, **settings) -> Explanation:
    outcome = test.loop(**settings)
    found = explain(outcome, test.card.card)
    if outcome.failure is None:
        outcome.close()
    return found


def stop_of(found: Explanation, component: str) -> ComponentStop:
    (stop,) = (each for each in found.stops if each.component == component)
    return stop


@cache
def baseline_peak(family: str) -> int:
    with bench(family, resident_layers="0") as test:
        outcome = test.loop(measure_only=True)
        peak = max(headroom.peak_bytes for headroom in outcome.headrooms)
        outcome.close()
    return peak


def test_where_everything_fits_nothing_stopped_anything_and_more_would_buy_nothing():
    with bench("qwen-image-2.1", resident_layers="0") as test:
        found = explained(test, sized=SIZED)
    assert {stop.stop for stop in found.stops} == {Stop.WHOLE}
    assert (found.one_more_gib.layers, found.one_more_gib.seconds) == (0, 0.0)
    assert found.copy_s == found.bound_s == 0 < found.baseline_copy_s
    assert found.proven
    assert found.unfit is None


def test_where_a_phase_binds_the_next_layer_and_its_missing_bytes_are_told():
    peak = baseline_peak("qwen-image-2.1")
    with bench("qwen-image-2.1", capacity_bytes=peak + 60_000, resident_layers="0") as test:
        found = explained(test, sized=SIZED)
    stops = [stop for stop in found.stops if stop.stop in (Stop.ROOM, Stop.OUTBID)]
    assert stops
    for stop in stops:
        assert 0 < stop.short_bytes <= stop.step_bytes
        assert stop.limiting_phase in ("text_encode", "denoise", "vae_decode")
    assert found.one_more_gib.layers > 0
    assert found.one_more_gib.seconds > 0
    assert 0 <= found.left_bytes <= 60_000


def test_what_would_fit_without_the_others_is_outbid():
    peak = baseline_peak("qwen-image-2.1")
    seen = set()
    for more in range(100_000, 700_000, 100_000):
        with bench("qwen-image-2.1", capacity_bytes=peak + more, resident_layers="0") as test:
            seen |= {stop.stop for stop in explained(test, sized=SIZED).stops}
    assert {Stop.ROOM, Stop.OUTBID} <= seen


def test_what_the_user_fixed_is_told_in_the_words_of_the_flag_with_what_it_costs():
    with bench("qwen-image-2.1", resident_layers="1") as test:
        found = explained(test)
    costs = {cost.component: cost for cost in found.fixed}
    assert costs["text_encoder"].fixed == "text_encoder=1"
    assert costs["text_encoder"].seconds > 0
    assert stop_of(found, "text_encoder").stop is Stop.FIXED


def test_the_frontier_goes_from_smaller_to_larger_cards_and_never_copies_more():
    peak = baseline_peak("qwen-image-2.1")
    pipeline = tiny("qwen-image-2.1")
    with bench(
        "qwen-image-2.1", capacity_bytes=GIB, resident_layers="0", pipeline=pipeline
    ) as test:
        outcome = test.loop(sized=SIZED, pipeline=pipeline)
        small = explain(outcome, custom_card(GIB))
        outcome.close()
    capacities = [point.capacity_bytes for point in small.frontier]
    assert capacities == sorted(capacities)
    assert capacities[0] == GIB  # no card of the catalogue is smaller
    assert all(point.fits for point in small.frontier)
    assert [p.copy_s for p in small.frontier] == sorted(p.copy_s for p in small.frontier)[::-1]
    assert peak < GIB


def test_masters_that_do_not_fit_the_host_budget_are_pageable_and_the_wish_is_told():
    with bench("qwen-image-2.1", resident_layers="0") as test:
        pricing = Pricing(1e9, "assumed", host_budget_bytes=0)
        found = explained(test, sized=SIZED, pricing=pricing, measure_only=True)
    assert found.host.pinned == ()
    assert {*found.host.pageable} == SIZED
    assert found.host.charged_bytes == 0 < found.host.wanted_bytes


def test_a_baseline_that_does_not_run_has_no_explanation():
    with bench("qwen-image-2.1", capacity_bytes=1_600_000) as test:
        assert explained(test) is None
