from dataclasses import replace
from functools import cache

import pytest
from bench_card import GIB, bench

from residency.offload.cards import custom_card
from residency.planner.account.account import account
from residency.planner.plan import Plan, Reason, Status


@cache
def planned(family: str, capacity_bytes: int = GIB, **settings) -> Plan:
    card = custom_card(capacity_bytes)
    with bench(family, capacity_bytes=capacity_bytes) as test:
        outcome = test.loop(**settings)
        made = account(outcome, test.settings(), card)
        if outcome.failure is None:
            outcome.close()
    return made


def reasons(made: Plan) -> dict[str, Reason]:
    return {use.component: use.reason for use in made.uses}


def test_what_fits_is_retained_and_what_never_leaves_is_resident():
    made = planned("qwen-image-2.1")
    assert made.status is Status.COMMITTED
    assert reasons(made) == {
        "text_encoder": Reason.RETAINED,
        "transformer": Reason.RETAINED,
        "vae": Reason.RESIDENT,
    }


def test_what_is_retained_stands_in_the_other_phases_too():
    made = planned("qwen-image-2.1")
    retained = {use.component: use.retained_bytes for use in made.uses}
    decode = next(phase for phase in made.phases if phase.name == "vae_decode")
    assert decode.retained_bytes == retained["text_encoder"] + retained["transformer"]


def test_too_little_headroom_says_where_and_how_much():
    capacity = max(p.peak_bytes for p in planned("qwen-image-2.1").phases) + 1000
    made = planned("qwen-image-2.1", capacity)
    (encoder,) = (use for use in made.uses if use.component == "text_encoder")
    assert encoder.reason is Reason.NO_HEADROOM
    (limit,) = (phase for phase in made.phases if phase.name == encoder.limiting_phase)
    assert encoder.limiting_shape == limit.shape
    assert encoder.shortfall_bytes > 0
    assert encoder.shortfall_bytes + limit.headroom_bytes <= encoder.retained_bytes


def test_what_was_tried_and_failed_is_refuted_and_told_as_an_attempt():
    capacity = max(p.peak_bytes for p in planned("qwen-image-2.1").phases) + 1000
    made = planned("qwen-image-2.1", capacity, explore=3)
    assert Reason.REFUTED in reasons(made).values()
    assert made.attempts[0].beyond_model
    assert made.attempts[0].rolled_back


def test_a_baseline_that_does_not_fit_has_no_uses_and_says_why():
    made = planned("qwen-image-2.1", 1_600_000)
    assert made.status is Status.INFEASIBLE
    assert made.uses == ()
    assert made.infeasible.shortfall_bytes > 0
    assert made.h2d_bytes_per_request is None


@pytest.mark.parametrize("family", ["flux.1-dev", "wan2.1-t2v-14b"])
def test_bytes_a_request_are_those_of_all_its_steps(family):
    made = planned(family)
    with bench(family) as test:
        outcome = test.loop(measure_only=True)
        steps = test.pipeline.steps(test.shape)
        shape = replace(test.shape, steps=steps)
        for _ in range(2):
            with outcome.host.request(shape, test.shape) as trace:
                output = test.pipeline.run(test.shape)
            del output
        assert trace.transfers.h2d_bytes == made.h2d_bytes_per_request.baseline
        outcome.close()
