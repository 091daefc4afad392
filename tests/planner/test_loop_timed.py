"""The loop on cards whose work takes time, and on cards that spill instead of failing."""

from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
from bench_card import Bench, peak_needed, tiny

from residency.offload.cards import custom_card
from residency.offload.device import Traits
from residency.offload.errors import InputError
from residency.offload.simulated.card import SimulatedCard
from residency.offload.simulated.work import Clock
from residency.phases.component import ResidencyMode, declare
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.limit import Limit
from residency.phases.schedule import Schedule
from residency.phases.shape import Shape
from residency.planner import Options, settle
from residency.planner.account.account import account
from residency.planner.loop import Outcome
from residency.planner.plan import Attempt, Status
from residency.planner.proof import Transaction, compare
from residency.planner.verdict import Verdict

FAMILY = "qwen-image-2.1"
GIB = 1 << 30
CLOCK = Clock(h2d_bytes_per_s=1e8, pageable_bytes_per_s=1e8, op_s=1e-6, bytes_per_s=1e10)


@contextmanager
def timed(capacity_bytes: int = GIB, **given):
    pipeline = tiny(FAMILY)
    residency = {"dit": "layerwise-offload", "text_encoder": "layerwise-offload"}
    declarations = declare(pipeline.components, residency, dict.fromkeys(residency, "0.5"))
    shape = Shape(64, 64, tokens=16, guidance=1.0)
    card = SimulatedCard(
        custom_card(capacity_bytes), allocator="exact", context_bytes=0, clock=CLOCK, **given
    )
    with card:
        yield Bench(card, pipeline, declarations, shape)


class NotedLimit(Limit):
    """Keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.within_s = []

    def within(self, seconds, *, interrupt=False):
        self.within_s.append(seconds)
        return super().within(seconds, interrupt=interrupt)


@cache
def timed_loop() -> tuple[Outcome, Attempt, list[float]]:
    """With what its limit was told."""
    limit = NotedLimit()
    with timed() as test:
        outcome = test.loop(limit=limit, least_patience_s=0.0, patience=1000.0)
        (attempt,) = account(outcome, test.settings(), test.card.card).attempts
        outcome.close()
        assert test.card.read().allocated_bytes == 0
    return outcome, attempt, limit.within_s


def test_an_accepted_plan_was_timed_in_turns_with_the_baseline():
    outcome, attempt, _ = timed_loop()
    assert attempt.verdict is Verdict.ACCEPTED
    assert attempt.seconds < attempt.baseline_seconds
    (found,) = outcome.tries[0].comparisons
    assert len(found.baseline_s) == len(found.candidate_s) == 3
    assert found.noise_s == pytest.approx(0.01 * found.baseline_s[0]), "a clock has no noise"


def test_the_baselines_turns_are_unpinned_and_fetch_as_far_ahead_as_it_does(monkeypatch):
    """What a candidate pins, or fetches further ahead, isn't the baseline's to gain from."""
    turns, ask = [], DiffusersHost.run

    def noted(host, shape):
        depths = {host.placements[use.component].prefetch for use in host.schedule.uses}
        turns.append((host.schedule, host.device.pinned_bytes, depths))
        return ask(host, shape)

    with timed() as test:
        host = test.host(host_bytes=GIB)
        assert host.open() is None
        way = {"prefetch": 3, "pinned": True}
        candidate = Schedule(uses=[use.model_copy(update=way) for use in host.baseline.uses])
        Transaction(host, candidate).apply()
        pinned_bytes = test.card.pinned_bytes
        monkeypatch.setattr(DiffusersHost, "run", noted)
        (found,) = compare(host, candidate, rounds=2)
        host.close()
    assert pinned_bytes > 0
    assert turns == ([(host.baseline, 0, {1})] * 2 + [(candidate, pinned_bytes, {3})] * 2) * 2
    assert len(found.baseline_s) == len(found.candidate_s) == 2


def test_a_comparison_is_given_the_time_of_all_its_sweeps():
    sweep_s, comparison_s = timed_loop()[-1]
    assert comparison_s == pytest.approx(6 * sweep_s)


def test_what_a_phase_stood_still_for_prices_its_copies():
    with timed() as test:
        outcome = test.loop(measure_only=True)
        exposures = outcome.baseline.pricing.exposures
        assert {*exposures} == {"text_encode", "denoise"}
        assert all(0 < share <= 1 for share in exposures.values())
        assert "exposed copies measured" in outcome.baseline.pricing.source
        outcome.close()


def test_a_candidate_that_is_slower_beyond_noise_is_refuted_and_rolled_back(monkeypatch):
    with timed() as test:
        retains, ask, run = [], DiffusersHost.run, test.pipeline.run

        def asked(host, shape):
            retains[:] = host.schedule.retaining
            return ask(host, shape)

        def slow_where_it_retains(shape, *, seed=0):
            test.card.timeline.host_s += 10.0 * bool(retains)
            return run(shape, seed=seed)

        monkeypatch.setattr(DiffusersHost, "run", asked)
        monkeypatch.setattr(test.pipeline, "run", slow_where_it_retains)
        outcome = test.loop(attempts=1)
        assert [each.judgement.verdict for each in outcome.tries] == [Verdict.SLOWER]
        assert "s in the baseline" in outcome.tries[0].judgement.detail
        assert outcome.committed is None
        outcome.close()


def test_where_a_full_card_spills_and_its_counters_do_not_tell_time_refutes(monkeypatch):
    """WS-01, WS-05: under WDDM and WSL2 no allocation fails, whatever the counters say."""
    with timed(peak_needed(FAMILY) - 300_000, spills=True, spill_factor=50.0) as test:
        assert test.card.traits.spills
        read = test.card.read
        monkeypatch.setattr(
            test.card, "read", lambda: replace(read(), total_bytes=read().total_bytes + GIB)
        )
        outcome = test.loop(attempts=1)
        first = outcome.tries[0]
        assert first.judgement.verdict is Verdict.SLOWER
        assert first.rolled_back
        assert first.comparisons[0].is_slower
        outcome.close()


def test_a_try_that_takes_five_times_as_long_is_ended():
    """WS-03: a profile that doesn't finish a step in hours is given up after a few baselines."""
    with timed() as test:
        outcome = test.loop(attempts=1, least_patience_s=0.0, patience=0.0)
        assert [each.judgement.verdict for each in outcome.tries] == [Verdict.SLOWER]
        assert test.settings().patience == 5.0
        outcome.close()


class UnifiedCard(SimulatedCard):
    """As on GB10 or Jetson: the card's memory is the host's."""

    @property
    def traits(self) -> Traits:
        return replace(super().traits, unified=True)


def test_where_memory_is_unified_everything_is_resident_and_nothing_is_offloaded():
    """UP-01, ME-10: copies within one memory cost, and save nothing."""
    shape = Shape(64, 64, tokens=16, guidance=1.0)
    with UnifiedCard(custom_card(GIB), allocator="exact") as card:
        settlement = settle(tiny(FAMILY), device=card, envelope=[shape])
        assert settlement.status is Status.BASELINE_ONLY
        residency = {each.residency for each in settlement.plan.components}
        assert residency == {ResidencyMode.RESIDENT}
        assert settlement.plan.h2d_bytes_per_request.baseline < 100_000, "the inputs alone"
        settlement.close()


def test_where_memory_is_unified_offload_that_was_asked_for_is_refused():
    shape = Shape(64, 64, tokens=16, guidance=1.0)
    options = Options(component_residency={"dit": "layerwise-offload"})
    with UnifiedCard(custom_card(GIB), allocator="exact") as card:
        with pytest.raises(InputError, match="one memory here"):
            settle(tiny(FAMILY), device=card, envelope=[shape], options=options)
        assert card.read().allocated_bytes == 0
