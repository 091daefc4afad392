"""The whole loop on a host of plain numbers: what needs no pipeline, in milliseconds."""

import threading
import traceback
from dataclasses import replace
from pathlib import Path

import pytest
from number_host import NumberHost

import residency.planner.settlement
from residency.offload.cards import custom_card
from residency.offload.device import Traits
from residency.offload.errors import (
    BusyError,
    JournalError,
    OffloadError,
    OutsideEnvelopeError,
    RankError,
    ResidencyError,
)
from residency.offload.hardware import Hardware
from residency.phases.host import Failure
from residency.phases.limit import Limit
from residency.phases.shape import Shape
from residency.planner.account.account import account
from residency.planner.choosing.prices import Pricing
from residency.planner.fingerprint import Fingerprint
from residency.planner.journal.history import State, attempts
from residency.planner.journal.journal import Journal, JournalLog
from residency.planner.loop import run_loop
from residency.planner.plan import Status
from residency.planner.proof import Settings
from residency.planner.ranks.agreement import Agreement, Solo
from residency.planner.serving.guard import GuardState
from residency.planner.settlement import Mode, Options, Settlement, Startup
from residency.planner.verdict import Verdict

GIB = 1 << 30
ENCODER, DECODE = 9, 6
"""GiB: the encoder's set, and what the last phase takes besides."""


def host(capacity: float, *, kind=NumberHost, **given) -> NumberHost:
    """An encoder that works once a request, a small denoiser that works twice, a wide decode."""
    phases = {
        "text_encode": (GIB // 2, {"text_encoder": 1}),
        "denoise": (GIB, {"transformer": 2}),
        "vae_decode": (DECODE * GIB, {}),
    }
    layers = {"text_encoder": (ENCODER, GIB), "transformer": (4, GIB)}
    return kind(phases, layers, round(capacity * GIB), **given)


def settings(**given) -> Settings:
    return Settings(0, Pricing(1e9, "a bus of 1 GB/s"), **given)


def retained(outcome) -> set[str]:
    return set() if outcome.schedule is None else {*outcome.schedule.retaining}


def verdicts(outcome) -> list[Verdict]:
    return [each.judgement.verdict for each in outcome.tries]


@pytest.mark.parametrize(
    ("capacity", "retains"),
    [
        (8, set()),  # the decode leaves 2 GiB: nothing fits
        (11, {"transformer"}),  # 5 GiB: the denoiser's 4, not the encoder's 9
        (17, {"text_encoder"}),  # 11 GiB: the encoder's 9, which save more, and not both
        (21, {"text_encoder", "transformer"}),
    ],
)
def test_the_same_pipeline_retains_what_a_later_phase_leaves_room_for(capacity, retains):
    card = host(capacity)
    outcome = run_loop(card, settings())
    assert retained(outcome) == retains
    assert card.schedule == (outcome.committed or card.baseline)


def test_a_card_that_the_baseline_does_not_fit_says_where_and_is_closed():
    card = host(5)
    outcome = run_loop(card, settings())
    assert outcome.status is Status.INFEASIBLE
    assert (outcome.failure.phase, outcome.failure.shortfall.short_bytes) == ("vae_decode", GIB)
    assert not card.is_open


def test_what_the_model_does_not_know_refutes_and_less_is_tried_next():
    card = host(17, unseen={"vae_decode": 3 * GIB})
    outcome = run_loop(card, settings())
    assert verdicts(outcome) == [Verdict.OOM, Verdict.ACCEPTED]
    first, second = (each.schedule for each in outcome.tries)
    assert (first.retaining, second.retaining) == (("text_encoder",), ("transformer",))
    assert card.schedule == second


def test_a_second_oom_makes_every_phase_give_what_fragmentation_took():
    class Vague(NumberHost):
        """Doesn't say how much was short, and loses half a GiB to fragmentation."""

        def run(self, shape):
            made = super().run(shape)
            return replace(made, shortfall=None) if isinstance(made, Failure) else made

        def read(self, peak=0):
            return replace(super().read(peak), peak_reserved_bytes=peak + GIB // 2)

    card = host(21, unseen={"vae_decode": 12 * GIB}, kind=Vague)
    outcome = run_loop(card, settings())
    assert verdicts(outcome) == [Verdict.OOM] * 3
    assert outcome.status is Status.BASELINE_ONLY
    given, left = outcome.baseline.instance.places, outcome.instance.places
    denoise = [place.phase for place in given].index("denoise")
    assert given[denoise].room_bytes - left[denoise].room_bytes == GIB // 2


def test_an_error_under_a_candidate_is_a_crash_and_excludes_what_is_as_large():
    def act(schedule):
        if "text_encoder" in schedule.retaining:
            raise RuntimeError("the kernel is wrong")

    outcome = run_loop(host(21, act=act), settings())
    assert verdicts(outcome)[0] is Verdict.CRASH
    assert outcome.tries[0].judgement.detail == "the kernel is wrong"
    assert "text_encoder" not in retained(outcome)
    assert retained(outcome)


def test_a_candidate_is_judged_at_every_largest_shape():
    shapes = (Shape(64, 64), Shape(32, 128))
    card = host(17, shapes=shapes)
    wide = card.run
    peaks = {shapes[0]: 0, shapes[1]: 3 * GIB}

    def run(shape):
        card.unseen = {"vae_decode": peaks[shape]}
        return wide(shape)

    card.run = run
    outcome = run_loop(card, settings())
    refuted = outcome.tries[0].judgement
    assert (refuted.verdict, refuted.shape) == (Verdict.OOM, str(shapes[1]))
    assert outcome.committed is not None


def test_a_first_request_that_peaks_higher_counts():
    class Warming(NumberHost):
        """The first request of each sweep takes 8 GiB more in its decode."""

        def sweep(self):
            self.requests = 0
            return super().sweep()

        def run(self, shape):
            self.requests += 1
            given = self.phases
            if self.requests == 1:
                self.phases = given | {"vae_decode": ((DECODE + 8) * GIB, {})}
            try:
                return super().run(shape)
            finally:
                self.phases = given

    outcome = run_loop(host(21, kind=Warming), settings())
    assert [h.headroom_bytes // GIB for h in outcome.headrooms if h.phase == "vae_decode"] == [7]
    assert retained(outcome) == {"transformer"}
    assert verdicts(outcome) == [Verdict.ACCEPTED]


def test_the_baselines_own_schedule_runs_in_its_turns():
    class Timed(NumberHost):
        traits = Traits(simulated=True, timed=True)

        def run(self, shape):
            ran.append(self.schedule)
            made = super().run(shape)
            made.trace.seconds = 1.0
            return made

    ran = []
    card = host(21, kind=Timed)
    outcome = run_loop(card, settings())
    turns = ran[-12:]  # three rounds of two requests each, in turns
    assert turns == ([card.baseline] * 2 + [outcome.committed] * 2) * 3
    assert card.schedule == outcome.committed


def test_a_known_plan_is_swept_once_and_nothing_is_measured():
    known = run_loop(host(21), settings()).committed
    card = host(21)
    outcome = run_loop(card, settings(verify=known))
    assert (outcome.committed, outcome.baseline, len(outcome.tries)) == (known, None, 1)


def test_a_known_plan_that_does_not_hold_is_not_proposed_again():
    known = run_loop(host(21), settings()).committed
    outcome = run_loop(host(17), settings(verify=known))
    assert verdicts(outcome) == [Verdict.OOM, Verdict.ACCEPTED]
    assert [each.schedule for each in outcome.tries[:1]] == [known]
    assert outcome.committed != known


def test_what_ended_a_process_is_not_tried_and_neither_is_more():
    crashed = run_loop(host(17), settings()).committed
    outcome = run_loop(host(17), settings(crashed=(crashed,)))
    assert crashed not in [each.schedule for each in outcome.tries]
    assert outcome.committed is not None


def test_a_proposal_applies_nothing():
    card = host(21)
    outcome = run_loop(card, settings(propose_only=True))
    assert outcome.status is Status.PROPOSED
    assert outcome.proposed.retaining
    assert card.schedule == card.baseline


def test_a_plan_says_the_bytes_that_a_request_saves():
    plan = account(run_loop(host(21), settings()), settings(), custom_card(21 * GIB))
    copied = plan.h2d_bytes_per_request
    assert (copied.baseline, copied.planned) == ((ENCODER + 4) * GIB, 0)
    assert plan.status is Status.COMMITTED


# The journal


def journaled(path, card, **given):
    journal = Journal.open(path)
    run = journal.begin(Fingerprint.of(card, margin_bytes=0))
    outcome = run_loop(card, settings(log=JournalLog(run), **given))
    return run, outcome


def test_the_journal_tells_of_each_candidate_before_it_is_applied(tmp_path):
    path = tmp_path / "journal"
    card = host(17, unseen={"vae_decode": 3 * GIB})
    run, outcome = journaled(path, card)
    told = [*attempts(Journal.open(path).records())]
    assert [each.state for each in told] == [State.REFUTED, State.COMMITTED]
    assert [each.candidate for each in told] == [each.schedule for each in outcome.tries]
    assert run.history.crashed == ()


def test_a_process_that_ended_under_a_candidate_never_tries_it_again(tmp_path):
    path = tmp_path / "journal"

    class Killed(BaseException):
        pass

    def act(schedule):
        if schedule.retaining:
            raise Killed

    card = host(17, act=act)
    # What a kill leaves: nothing is written behind the intent.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JournalLog, "rolled_back", lambda log: None)
        with pytest.raises(Killed):
            journaled(path, card)
    run, _ = journaled(path, host(17), crashed=())
    crashed = run.history.crashed
    assert len(crashed) == 1
    again = run_loop(host(17), settings(crashed=crashed))
    assert crashed[0] not in [each.schedule for each in again.tries]


def test_what_can_not_be_written_down_is_not_tried(tmp_path):
    class Full(JournalLog):
        def __init__(self):
            pass

        def intent(self, candidate):
            raise JournalError("the disk is full")

    card = host(21)
    outcome = run_loop(card, settings(log=Full()))
    assert (outcome.status, outcome.stopped) == (Status.BASELINE_ONLY, "the disk is full")
    assert card.schedule == card.baseline


# Ranks


class Meeting:
    """Ranks in threads, which hear what all say at each step."""

    def __init__(self, size: int) -> None:
        self.size, self.said = size, {}
        self.all_said = threading.Barrier(size, timeout=30)

    def rank(self, number: int) -> Agreement:
        meeting = self

        class Rank(Solo):
            rank, world_size, nodes = number, meeting.size, ("",) * meeting.size

            def exchange(self, step, mine, *, deadline_s=None):
                meeting.said[number] = (step, mine)
                try:
                    meeting.all_said.wait()
                    heard = tuple(meeting.said[each] for each in range(meeting.size))
                    meeting.all_said.wait()
                except threading.BrokenBarrierError:
                    raise RankError("a rank is gone") from None
                assert {each for each, _ in heard} == {step}
                return tuple(said for _, said in heard)

            def fail(self, error):
                meeting.all_said.abort()

        return Rank()


def together(*hosts: NumberHost):
    meeting, outcomes = Meeting(len(hosts)), {}

    def run(number):
        outcomes[number] = run_loop(hosts[number], settings(agreement=meeting.rank(number)))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(hosts))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    return [outcomes[number] for number in range(len(hosts))]


def test_ranks_commit_what_the_tightest_card_has_room_for():
    one, other = together(host(21), host(11))
    assert one.committed == other.committed
    assert retained(one) == {"transformer"}


def test_what_one_rank_refutes_all_give_up():
    one, other = together(host(17), host(17, unseen={"vae_decode": 3 * GIB}))
    assert one.committed == other.committed
    assert [each.judgement.rank for each in one.tries] == [1, None]


def test_a_rank_that_fails_leaves_the_others_at_their_baseline():
    def act(schedule):
        if schedule.retaining:
            raise KeyboardInterrupt

    hosts = host(21), host(21, act=act)
    meeting, outcome = Meeting(2), {}

    def run():
        outcome[0] = run_loop(hosts[0], settings(agreement=meeting.rank(0)))

    thread = threading.Thread(target=run)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_loop(hosts[1], settings(agreement=meeting.rank(1)))
    thread.join(60)
    assert outcome[0].status is Status.BASELINE_ONLY
    assert outcome[0].stopped == "a rank is gone"
    assert hosts[0].schedule == hosts[0].baseline
    assert not hosts[1].is_open


# A server


def settled(card: NumberHost, **options) -> Settlement:
    options.setdefault("margin_bytes", 0)
    startup = Startup(
        lambda host_bytes: replace_host(card),
        Hardware(card, custom_card(card.capacity)),
        None,
        Options(**options),
        Limit(),
        lambda event: None,
        Solo(),
    )
    return Settlement(startup, startup.run(Mode.SEARCH))


def replace_host(card: NumberHost) -> NumberHost:
    """A host of the pipeline as it is now: one at a time is open."""
    new = NumberHost(card.phases, card.layers, card.capacity, card.shapes, card.unseen, card.act)
    card.latest = new
    return new


def test_a_request_that_would_not_fit_beside_a_neighbour_runs_at_the_baseline():
    card = host(21)
    settlement = settled(card)
    seen = []
    card.latest.act = lambda schedule: seen.append(bool(schedule.retaining))
    with settlement.guard("64x64"):
        pass
    card.latest.others = 8 * GIB
    with settlement.guard("64x64"):
        pass
    card.latest.others = 0
    with settlement.guard("64x64"):
        pass
    assert seen == [True, False, True]


def test_a_shape_outside_the_envelope_is_refused_before_it_runs():
    settlement = settled(host(21))
    with pytest.raises(OutsideEnvelopeError), settlement.guard("64x128"):
        pytest.fail("it ran")


def test_closing_twice_is_nothing_and_no_request_runs_after():
    card = host(21)
    settlement = settled(card)
    settlement.close()
    settlement.close()
    assert not card.latest.is_open
    with pytest.raises(OffloadError, match="isn't served any more"), settlement.guard("64x64"):
        pytest.fail("it ran")


@pytest.mark.parametrize(
    ("mode", "limit_s", "told"),
    [("serach", None, "no mode"), ("search", 0.0, "longer than"), ("search", None, "is gone")],
    ids=["mistyped", "out of time", "broken"],
)
def test_a_resettle_that_fails_leaves_what_was_served(mode, limit_s, told):
    card = host(21)
    settlement = settled(card)
    served = card.latest
    schedule = served.schedule

    def build(host_bytes):
        raise OffloadError("a component is gone")

    if told == "is gone":
        settlement._startup.build = build
    limit = None if limit_s is None else Limit(limit_s)
    with pytest.raises(ResidencyError, match=told):
        settlement.resettle(mode, limit=limit)
    assert served.is_open
    assert served.schedule == schedule
    with settlement.guard("64x64"):
        pass
    settlement._startup.build = lambda host_bytes: replace_host(card)
    settlement.resettle()
    assert settlement.status is Status.COMMITTED
    settlement.close()


def test_requests_take_turns():
    settlement = settled(host(21), concurrency="refuse")
    with settlement.guard("64x64"):
        failed = []

        def other():
            try:
                with settlement.guard("64x64"):
                    pass
            except BusyError as error:
                failed.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
    assert len(failed) == 1
    assert settlement._guard.state is GuardState.PLANNED


def test_from_settle_to_the_hosts_sweep_five_frames_of_ours_at_most(monkeypatch):
    card, depths = host(21), []
    package = Path(residency.planner.settlement.__file__).parents[1]

    def act(schedule):
        frames = [Path(frame.filename) for frame in traceback.extract_stack()]
        mine = [at for at in frames if package in at.parents and at.name != "host.py"]
        depths.append(len(mine) + 1)  # the sweep itself is the host's

    monkeypatch.setattr(
        residency.planner.settlement, "host_of", lambda *given, **more: host(21, act=act)
    )
    settlement = residency.planner.settle(None, device=card, envelope=["64x64"])
    assert settlement.status is Status.COMMITTED
    assert max(depths) <= 5
