import pytest
import torch
from bench_card import FAMILIES, GIB, bench, each_family
from number_host import NumberHost
from pipeline_image import image_of

from residency.offload.errors import (
    BaselineError,
    InputError,
    LockedError,
    OutsideEnvelopeError,
)
from residency.phases.diffusers.undo import Residue
from residency.phases.schedule import Schedule
from residency.planner import Mode, Options, Settlement, settle, settlement
from residency.planner.journal.history import History
from residency.planner.journal.journal import Journal
from residency.planner.journal.lock import PlannerLock
from residency.planner.plan import Status
from residency.planner.planfile import write_report
from residency.planner.verdict import Step, Verdict

FAMILY = FAMILIES[0]
OPTIONS = Options(margin_bytes=0)


def settled(test, **given) -> Settlement:
    return settle(
        test.pipeline, **{"device": test.card, "envelope": [test.shape], "options": OPTIONS} | given
    )


@pytest.fixture
def numbers(monkeypatch):
    """Settles a host of plain numbers with room for all it has, for what is of the files alone."""
    phases = {"encode": (1, {"text_encoder": 1}), "decode": (1, {})}

    def host(pipeline, device, shapes, *given, **more):
        return NumberHost(phases, {"text_encoder": (3, 1)}, GIB, shapes)

    monkeypatch.setattr(settlement, "host_of", host)
    card = host(None, None, ())

    def settled(**given) -> Settlement:
        return settle(None, **{"device": card, "envelope": ["64x64"], "options": OPTIONS} | given)

    return settled


def history(path, settlement) -> History:
    return Journal.open(path).history(settlement.plan.fingerprint.digest)


@each_family
def test_one_call_settles_serves_and_puts_back(family):
    with bench(family) as test:
        before = image_of(test.pipeline.pipeline)
        settlement = settled(test)
        assert settlement.status is Status.COMMITTED
        assert settlement.plan.attempts[-1].verdict is Verdict.ACCEPTED
        residue = Residue(test.pipeline)  # what a request leaves on a pipeline is its own
        with settlement.guard(test.shape):
            image = test.pipeline.run(test.shape).value.cpu()
        again = settlement.serve(test.shape, lambda: test.pipeline.run(test.shape).value.cpu())
        assert torch.equal(image, again)
        assert settlement.check().holds
        residue.restore()
        settlement.close()
        assert image_of(test.pipeline.pipeline).differences(before) == []
        assert test.card.read().allocated_bytes == 0


def test_a_raw_pipeline_and_shapes_in_words_will_do():
    with bench(FAMILY) as test:
        settlement = settle(
            test.pipeline.pipeline, device=test.card, envelope=["64x64:tokens=16,guidance=1"]
        )
        with settlement.guard("32x32:tokens=8,guidance=1"):
            pass
        with pytest.raises(OutsideEnvelopeError), settlement.guard("128x64:tokens=16,guidance=1"):
            raise AssertionError("it ran")
        settlement.close()


def test_the_plan_of_the_last_start_is_verified_and_not_searched_for(tmp_path):
    journal = tmp_path / "journal"
    with bench(FAMILY) as test:
        first = settled(test, journal=journal)
        uses = first.plan.uses
        first.close()
        steps = []
        second = settled(test, journal=journal, listen=lambda event: steps.append(event.step))
        assert (first.verified, second.verified) == (False, True)
        assert Step.VERIFYING in steps
        assert Step.MEASURING not in steps
        assert second.status is Status.COMMITTED
        assert second.plan.uses == uses
        assert second.warnings == ()
        with second.guard(test.shape):
            test.pipeline.run(test.shape)
        assert test.card.read().allocated_bytes > 0
        second.close()


def test_search_searches_though_a_plan_is_known(numbers, tmp_path):
    assert numbers(journal=tmp_path / "journal").status is Status.COMMITTED
    assert numbers(journal=tmp_path / "journal").verified
    assert not numbers(journal=tmp_path / "journal", mode="search").verified


def test_off_measures_the_baseline_and_retains_nothing():
    with bench(FAMILY) as test:
        settlement = settled(test, mode=Mode.OFF)
        assert settlement.status is Status.BASELINE_ONLY
        assert settlement.plan.attempts == ()
        with settlement.guard(test.shape):
            test.pipeline.run(test.shape)
        settlement.close()


def test_another_envelope_is_another_fingerprint_and_searched_for(numbers, tmp_path):
    numbers(journal=tmp_path / "journal")
    assert not numbers(journal=tmp_path / "journal", envelope=["32x64"]).verified


def test_a_plan_file_that_is_lost_is_searched_for_and_said(numbers, tmp_path):
    numbers(journal=tmp_path / "journal")
    (tmp_path / "journal.plan.json").unlink()
    second = numbers(journal=tmp_path / "journal")
    assert (second.verified, second.status) == (False, Status.COMMITTED)
    assert "searched for anew" in second.warnings[0]


def test_a_plan_file_of_something_else_than_was_committed_is_not_believed(numbers, tmp_path):
    first = numbers(journal=tmp_path / "journal")
    uses = (
        hold.model_copy(update={"retained_set": hold.retained_set[:1]})
        for hold in first.plan.schedule.uses
    )
    plan = first.plan.model_copy(update={"schedule": Schedule(uses=tuple(uses))})
    report = first.report.model_copy(update={"plans": (plan,)})
    write_report(report, tmp_path / "journal.plan.json")
    second = numbers(journal=tmp_path / "journal")
    assert not second.verified
    assert "isn't what the journal says" in second.warnings[0]


def test_a_journal_that_cannot_be_kept_leaves_the_baseline_and_says_why(numbers, tmp_path):
    (tmp_path / "journal").mkdir()
    made = numbers(journal=tmp_path / "journal")
    assert made.status is Status.BASELINE_ONLY
    assert "nothing is tried without the journal" in made.warnings[0]
    with made.guard("64x64"):
        pass


def test_a_journal_that_fills_its_disk_leaves_the_baseline(numbers, tmp_path, monkeypatch):
    append = Journal.append

    def full(journal, record):
        if record.kind == "committed":
            raise journal._error("written", "No space left on device")
        append(journal, record)

    monkeypatch.setattr(Journal, "append", full)
    made = numbers(journal=tmp_path / "journal")
    assert made.status is Status.BASELINE_ONLY
    assert "No space left on device" in made.warnings[-1]
    assert made.plan.schedule.retaining == ()
    assert history(tmp_path / "journal", made).committed is None


def test_two_planners_on_one_card_exclude_one_another(tmp_path):
    with bench(FAMILY) as test, PlannerLock(test.card.identity.uuid, tmp_path):
        before = image_of(test.pipeline.pipeline)
        with pytest.raises(LockedError, match="is being planned on"):
            settled(test, options=Options(margin_bytes=0, lock_folder=tmp_path))
        assert image_of(test.pipeline.pipeline).differences(before) == []


def test_the_lock_is_free_again_once_it_is_settled(numbers, tmp_path):
    numbers(options=Options(margin_bytes=0, lock_folder=tmp_path))
    with PlannerLock("N-0", tmp_path):
        pass


def test_a_baseline_that_does_not_fit_is_said_and_nothing_is_served():
    with bench(FAMILY, capacity_bytes=500_000) as test:
        before = image_of(test.pipeline.pipeline)
        settlement = settled(test)
        assert settlement.status is Status.INFEASIBLE
        with pytest.raises(BaselineError, match="doesn't run on"), settlement.guard(test.shape):
            raise AssertionError("it ran")
        settlement.close()
        assert image_of(test.pipeline.pipeline).differences(before) == []


def test_what_ran_out_of_memory_too_often_is_not_believed_by_the_next_start(tmp_path):
    journal = tmp_path / "journal"
    with bench(FAMILY) as test:
        options = Options(margin_bytes=0, max_ooms=1)
        settlement = settled(test, journal=journal, options=options)

        def grown():
            test.card.faults.at_allocation(1)
            return test.pipeline.run(test.shape)

        with pytest.raises(torch.OutOfMemoryError):
            settlement.serve(test.shape, grown)
        settlement.close()
        assert history(journal, settlement).committed is None
        assert history(journal, settlement).refuted != ()


def test_where_the_journal_cannot_say_so_a_plan_is_given_up_all_the_same(
    tmp_path, monkeypatch, caplog
):
    with bench(FAMILY) as test:
        options = Options(margin_bytes=0, max_ooms=1)
        settlement = settled(test, journal=tmp_path / "journal", options=options)

        def full(journal, record):
            raise journal._error("written", "No space left on device")

        runs = []

        def grown():
            runs.append(1)
            if len(runs) < 3:  # the first may be transient
                test.card.faults.at_allocation(1)
            return test.pipeline.run(test.shape)

        monkeypatch.setattr(Journal, "append", full)
        settlement.serve(test.shape, grown)
        assert "the next start won't know" in caplog.text
        settlement.close()


def test_options_that_cannot_be_are_refused_and_nothing_stays_applied():
    with bench(FAMILY) as test:
        before = image_of(test.pipeline.pipeline)
        with pytest.raises(InputError, match="max_ooms is 0"):
            settled(test, options=Options(margin_bytes=0, max_ooms=0))
        assert image_of(test.pipeline.pipeline).differences(before) == []
        assert test.card.read().allocated_bytes == 0


def test_it_can_be_settled_again_between_two_requests():
    with bench(FAMILY) as test:
        settlement = settled(test)
        first = settlement.plan.uses
        test.card.others_bytes = test.card.card.total_bytes - test.card.read().allocated_bytes
        assert not settlement.check().holds
        test.card.others_bytes = 0
        settlement.resettle()
        assert settlement.plan.uses == first
        residue = Residue(test.pipeline)
        with settlement.guard(test.shape):
            test.pipeline.run(test.shape)
        residue.restore()
        settlement.close()
        assert test.card.read().allocated_bytes == 0


def test_a_device_that_is_not_there_is_bad_input():
    with bench(FAMILY) as test, pytest.raises(InputError, match="CUDA"):
        settled(test, device="cuda:0")
