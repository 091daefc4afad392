import pytest
from journaling import DIGEST, LARGE, MEDIUM, OTHER, record

from residency.planner.journal.history import History
from residency.planner.journal.record import JournalRecord, Kind
from residency.planner.verdict import Verdict

BEGIN = record(Kind.BEGIN, attempt=None)
END = record(Kind.END, attempt=None)
INTENT = record(Kind.INTENT)
APPLIED = record(Kind.APPLIED)
ACCEPTED = record(Kind.VERDICT, verdict=Verdict.ACCEPTED)
REFUTED = record(Kind.VERDICT, verdict=Verdict.OOM)
COMMITTED = record(Kind.COMMITTED)
ROLLED_BACK = record(Kind.ROLLED_BACK)
CRASH = record(Kind.CRASH, verdict=Verdict.CRASH)

NOTHING = History()
CRASHED = History(crashed=(LARGE,))
IN_FORCE = History(committed=LARGE)
WRONG = History(refuted=(LARGE,))


def again(records: tuple[JournalRecord, ...]) -> tuple[JournalRecord, ...]:
    """The same in a later run."""
    return tuple(each.model_copy(update={"run": "b"}) for each in records)


TRIED = (INTENT, APPLIED)
COMMIT = (*TRIED, ACCEPTED, COMMITTED)
REFUTATION = (*TRIED, REFUTED, ROLLED_BACK)
ABORT = (*TRIED, ROLLED_BACK)


@pytest.mark.parametrize(
    ("records", "known"),
    [
        ((BEGIN, END), NOTHING),
        ((INTENT,), CRASHED),
        (TRIED, CRASHED),
        ((*TRIED, ACCEPTED), CRASHED),
        ((*TRIED, REFUTED), WRONG),
        (REFUTATION, WRONG),
        (ABORT, NOTHING),
        (COMMIT, IN_FORCE),
        ((*COMMIT, END), IN_FORCE),
        ((*COMMIT, ROLLED_BACK), NOTHING),
        ((*COMMIT, record(Kind.ROLLED_BACK, verdict=Verdict.OOM)), WRONG),
        ((*TRIED, CRASH), CRASHED),
        ((CRASH,), CRASHED),
        ((*TRIED, CRASH, REFUTED, ROLLED_BACK), WRONG),
        ((*TRIED, CRASH, ACCEPTED, COMMITTED), IN_FORCE),
        ((*COMMIT, *again(TRIED)), CRASHED),
        ((*COMMIT, *again(REFUTATION)), WRONG),
        ((*COMMIT, *again(ABORT)), IN_FORCE),
        ((*COMMIT, *again((*COMMIT, ROLLED_BACK))), NOTHING),
        ((*TRIED, *again(ABORT)), CRASHED),
        ((*TRIED, *again(COMMIT)), IN_FORCE),
        ((*REFUTATION, *again(COMMIT)), IN_FORCE),
    ],
    ids=lambda value: " ".join(each.kind for each in value) if isinstance(value, tuple) else "",
)
def test_what_the_records_of_a_candidate_come_to(
    records: tuple[JournalRecord, ...], known: History
):
    assert History.of(records, DIGEST) == known


def test_what_was_known_under_another_fingerprint_is_not_known():
    assert History.of((*COMMIT, *again(TRIED)), OTHER.digest) == NOTHING


def test_the_commit_before_is_in_force_again_when_the_last_one_crashes():
    other = tuple(each.model_copy(update={"candidate": MEDIUM, "run": "b"}) for each in COMMIT)
    assert History.of((*COMMIT, *other), DIGEST).committed == MEDIUM
    crashed = other[:2]
    known = History.of((*COMMIT, *again(other[:-1]), *crashed), DIGEST)
    assert (known.committed, known.crashed) == (LARGE, (MEDIUM,))


def test_the_last_of_two_commits_is_in_force_whichever_was_first_committed():
    other = tuple(each.model_copy(update={"candidate": MEDIUM, "run": "b"}) for each in COMMIT)
    later = tuple(each.model_copy(update={"run": "c"}) for each in COMMIT)
    assert History.of((*COMMIT, *other, *later), DIGEST).committed == LARGE


def test_of_two_runs_at_a_time_the_later_commit_is_in_force():
    other = tuple(each.model_copy(update={"candidate": MEDIUM, "run": "b"}) for each in COMMIT)
    assert History.of((*COMMIT[:-1], *other, COMMIT[-1]), DIGEST).committed == LARGE
