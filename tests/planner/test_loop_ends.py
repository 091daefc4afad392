"""How the loop ends where something else than the card decides: a journal, a limit, a neighbour,
the host, an earlier start."""

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest
from bench_card import bench, settled, verdicts
from pipeline_image import image_of

from residency.offload.errors import CancelledError, HostMemoryError, OvertimeError
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.limit import Limit
from residency.phases.schedule import Schedule
from residency.planner.account.account import account
from residency.planner.choosing.prices import Pricing
from residency.planner.journal.journal import Log
from residency.planner.plan import Status
from residency.planner.verdict import Step, Verdict

FAMILY = "qwen-image-2.1"


def at(step, act):
    """A listener that acts at each event of a kind; `act` is told how many there were before."""
    seen = []

    def listen(event):
        if event.step is step:
            seen.append(event)
            act(len(seen) - 1)

    return listen


@dataclass
class Notes(Log):
    """Keeps what it is told, and fails at one step."""

    fails_at: str | None = None
    told: list[str] = field(default_factory=list)
    candidates: list[Schedule] = field(default_factory=list)

    def _note(self, step):
        if step == self.fails_at:
            raise OSError(f"no space for {step}")
        self.told.append(step)

    def intent(self, candidate):
        self._note("intent")
        self.candidates.append(candidate)

    def applied(self):
        self._note("applied")

    def verdict(self, judgement):
        self._note("verdict")

    def rolled_back(self):
        self._note("rolled back")

    def committed(self):
        self._note("committed")


@contextmanager
def unchanged(test):
    """The pipeline and the card are afterwards what they were."""
    before = image_of(test.pipeline.pipeline)
    yield
    assert image_of(test.pipeline.pipeline).differences(before) == []
    assert test.card.read().allocated_bytes == 0


def test_each_step_is_logged_before_it_is_taken():
    with bench(FAMILY) as test:
        log = Notes()
        outcome = test.loop(log=log)
        assert log.told == ["intent", "applied", "verdict", "committed"]
        outcome.close()


def test_a_refuted_candidate_is_logged_until_it_is_rolled_back():
    with bench(FAMILY) as test:
        log = Notes()
        listen = at(Step.TRYING, lambda n: n or test.card.faults.at_copy(60))
        outcome = test.loop(log=log, listen=listen)
        first = ["intent", "applied", "verdict", "rolled back"]
        assert log.told == [*first, "intent", "applied", "verdict", "committed"]
        outcome.close()


@pytest.mark.parametrize("step", ["intent", "applied", "verdict", "committed"])
def test_where_a_step_cannot_be_logged_nothing_stays_applied(step):
    with bench(FAMILY) as test, unchanged(test):
        log = Notes(fails_at=step)
        with pytest.raises(OSError, match=f"no space for {step}"):
            test.loop(log=log)
        assert "committed" not in log.told
        assert log.told[-1:] == ([] if step == "intent" else ["rolled back"])


def test_a_candidate_that_ended_a_process_is_not_tried_nor_any_as_large():
    crashed = committed()
    with bench(FAMILY) as test:
        again = Notes()
        outcome = test.loop(log=again, crashed=(crashed,))
        assert crashed.key not in {each.key for each in again.candidates}
        assert outcome.schedule is not None, "the next best is smaller, and fits"
        assert not {*crashed.retaining} <= {*outcome.schedule.retaining}
        outcome.close()


def sweeps(monkeypatch):
    counted = []
    sweep = DiffusersHost.sweep

    def counting(self):
        counted.append(1)
        return sweep(self)

    monkeypatch.setattr(DiffusersHost, "sweep", counting)
    return counted


def committed(family: str = FAMILY) -> Schedule:
    outcome, _ = settled(family)
    return outcome.committed


def test_what_an_earlier_start_committed_is_verified_with_one_sweep(monkeypatch):
    known = committed()
    with bench(FAMILY) as test, unchanged(test):
        counted = sweeps(monkeypatch)
        log = Notes()
        outcome = test.loop(log=log, verify=known)
        assert len(counted) == 1
        assert verdicts(outcome) == [Verdict.ACCEPTED]
        assert log.told == ["intent", "applied", "verdict", "committed"]
        assert log.candidates == [known]
        assert outcome.committed == outcome.host.schedule == known
        assert test.card.read().allocated_bytes > 0
        outcome.close()


def test_what_does_not_hold_any_more_is_searched_for_anew_and_not_tried_again():
    known = committed()
    with bench(FAMILY) as test, unchanged(test):
        log = Notes()
        listen = at(Step.VERIFYING, lambda n: test.card.faults.at_copy(60))
        outcome = test.loop(log=log, verify=known, listen=listen)
        assert verdicts(outcome) == [Verdict.CRASH, Verdict.ACCEPTED]
        assert log.candidates == [known, outcome.committed]
        assert not {*known.retaining} <= {*outcome.committed.retaining}, "nor any as large"
        plan = account(outcome, test.settings(), test.card.card)
        assert [each.verdict for each in plan.attempts] == verdicts(outcome)
        outcome.close()


def test_what_was_committed_for_another_pipeline_is_ignored():
    mine = committed()
    layers = (*mine.uses[0].resident_set, 99)
    larger = mine.uses[0].model_copy(update={"resident_set": layers})
    fewer, more = mine.uses[1:], (larger, *mine.uses[1:])
    for uses in (committed("flux.1-dev").uses, fewer, more):
        log, steps = Notes(), []
        with bench(FAMILY) as test:
            outcome = test.loop(
                log=log,
                verify=Schedule(uses=uses),
                listen=lambda event, steps=steps: steps.append(event.step),
            )
            assert Step.VERIFYING not in steps
            assert log.candidates == [outcome.committed] == [mine]
            outcome.close()


def test_a_proposal_touches_nothing_and_says_what_committing_would_copy():
    with bench(FAMILY) as test, unchanged(test):
        settings = test.settings(propose_only=True)
        outcome = test.loop(propose_only=True)
        assert outcome.tries == []
        assert outcome.host.schedule == outcome.host.baseline
        proposed = account(outcome, settings, test.card.card)
        outcome.close()
        outcome = test.loop()
        done = account(outcome, settings, test.card.card)
        outcome.close()
    assert (proposed.status, done.status) == (Status.PROPOSED, Status.COMMITTED)
    assert proposed.uses == done.uses
    assert proposed.schedule == done.schedule
    assert proposed.h2d_bytes_per_request == done.h2d_bytes_per_request


def test_a_cancelled_loop_leaves_the_pipeline_as_it_was_given():
    with bench(FAMILY) as test, unchanged(test):
        log, limit = Notes(), Limit()
        with pytest.raises(CancelledError):
            test.loop(log=log, limit=limit, listen=at(Step.TRYING, lambda n: limit.cancel()))
        assert log.told == ["intent", "applied", "rolled back"]


def test_a_try_that_takes_too_long_is_slower_and_the_loop_goes_on():
    with bench(FAMILY) as test, unchanged(test):
        outcome = test.loop(patience=0.0, least_patience_s=0.0, attempts=2)
        assert verdicts(outcome) == [Verdict.SLOWER, Verdict.SLOWER]
        assert "longer than the 0.0 s" in outcome.tries[0].judgement.detail
        assert outcome.stopped == "2 attempts are used up"
        outcome.close()


def test_when_the_time_is_used_up_the_baseline_is_what_stays():
    with bench(FAMILY) as test, unchanged(test), ExitStack() as stack:
        limit = Limit(1000)
        listen = at(Step.TRYING, lambda n: stack.enter_context(limit.within(0.0)))
        outcome = test.loop(limit=limit, listen=listen)
        assert verdicts(outcome) == [Verdict.SLOWER]
        assert outcome.stopped == "the time is used up"
        assert outcome.committed is None
        assert outcome.host.schedule == outcome.host.baseline
        outcome.close()


def test_without_time_for_the_baseline_nothing_is_begun():
    with bench(FAMILY) as test, unchanged(test), pytest.raises(OvertimeError):
        test.loop(limit=Limit(0.0))


def test_what_a_neighbour_refuted_is_tried_again_when_it_has_left():
    with bench(FAMILY) as test:
        outcome = test.loop()
        peak = test.card.read().peak_allocated_bytes
        best = outcome.committed
        outcome.close()
    with bench(FAMILY, capacity_bytes=2 * peak) as test, unchanged(test):
        sizes = iter([2 * peak - 100_000, 0])

        def listen(event):
            if event.step in (Step.TRYING, Step.REFUTED):
                test.card.others_bytes = next(sizes, 0)

        outcome = test.loop(listen=listen)
        assert verdicts(outcome) == [Verdict.OOM, Verdict.ACCEPTED]
        assert outcome.tries[0].judgement.neighbour_bytes == 2 * peak - 100_000
        assert outcome.committed.uses == best.uses
        outcome.close()


def test_while_a_neighbour_stays_no_more_is_tried_than_is_left():
    with bench(FAMILY) as test:
        outcome = test.loop()
        outcome.close()
        grown = test.card.card.total_bytes - 500_000
        listen = at(Step.TRYING, lambda n: setattr(test.card, "others_bytes", grown))
        outcome = test.loop(listen=listen)
        assert verdicts(outcome) == [Verdict.OOM]
        assert outcome.tries[0].judgement.neighbour_bytes == grown
        assert outcome.committed is None
        test.card.others_bytes = 0
        outcome.close()


def test_what_the_host_cannot_lock_is_the_hosts_fault_and_stays_pageable(monkeypatch):
    with bench(FAMILY) as test, unchanged(test):

        def pin(host):
            raise HostMemoryError(f"the host can't page-lock {host.nbytes} bytes")

        monkeypatch.setattr(test.card, "pin", pin)
        pricing = Pricing(1e9, "assumed", host_budget_bytes=1 << 30)
        outcome = test.loop(pricing=pricing)
        assert verdicts(outcome)[0] is Verdict.HOST_MEMORY
        assert verdicts(outcome)[-1] is Verdict.ACCEPTED
        assert outcome.instance.host_bytes(outcome.baseline.choice_of(outcome.committed)) == 0
        outcome.close()
