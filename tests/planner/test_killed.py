"""A server that is killed as it starts: each next start serves, and no candidate kills it twice."""

import random
import signal
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from settling import Server, Settling, key, said

long = pytest.mark.long
SEED = 20260701
INSTANTS = 16
SEARCHED = (
    *("begin", "intent", "applied", "verdict", "rolled_back"),
    *("intent", "applied", "verdict", "committed", "end"),
)
VERIFIED = ("begin", "intent", "applied", "verdict", "committed", "end")


@pytest.fixture(scope="module")
def searched(settling: Settling) -> Server:
    """A server whose first start refuted a candidate, and committed the next."""
    server = settling.server()
    server.boots(refuted=True)
    assert tuple(server.kinds()) == SEARCHED
    return server


@pytest.fixture(scope="module")
def verified(settling: Settling, committed: Server) -> Server:
    """A server whose first start committed, and whose second one verified that."""
    server = settling.server(like=committed)
    assert server.boots().settled["verified"]
    assert tuple(server.kinds()) == VERIFIED * 2
    return server


def like(settling: Settling, given: Server, records: int, *, torn: bool = False) -> Server:
    """With the first records of another one's journal, and half of the next."""
    server = settling.server(like=given)
    line = server.journal.read_bytes().splitlines()[records] if torn else b""
    server.cut(records, line[: len(line) // 2])
    return server


def points(most: int, whole: set[int], torn: set[int]) -> list[ParameterSet]:
    """After each number of records, and in the middle of the next; `long` are those that leave the
    same attempts open as one of the others."""
    cases = [(n, False, n in whole) for n in range(most + 1)]
    cases += [(n, True, n in torn) for n in range(most)]
    return [pytest.param(n, half, marks=() if short else long) for n, half, short in cases]


@pytest.mark.parametrize(
    ("appends", "where", "written", "refuted"),
    [
        pytest.param(1, "before", 0, False, id="before anything", marks=long),
        pytest.param(2, "torn", 1, False, id="as a candidate is announced"),
        pytest.param(2, "calls", 2, False, id="as it is applied"),
        pytest.param(3, "allocation", 3, False, id="in its sweep"),
        pytest.param(4, "after", 4, False, id="between verdict and commit"),
        pytest.param(4, "calls", 4, True, id="as it is rolled back"),
        pytest.param(9, "after", 9, True, id="before the plan is written", marks=long),
        pytest.param(10, "before", 9, True, id="behind the plan"),
    ],
)
def test_what_a_kill_leaves_are_the_records_before_it(
    settling: Settling,
    committed: Server,
    searched: Server,
    appends: int,
    where: str,
    written: int,
    refuted: bool,
) -> None:
    """So that the starts below need not be killed: their journals are cut off."""
    whole = searched if refuted else committed
    server = settling.server()
    server.killed(appends=appends, where=where, refuted=refuted)
    assert [*map(said, server.records())] == [*map(said, whole.records()[:written])]
    tail = server.journal.read_bytes().split(b"\n")[-1] if server.journal.exists() else b""
    assert bool(tail) == (where == "torn")
    assert server.plan_file.exists() == (appends == 10)


@pytest.mark.parametrize(("written", "torn"), points(len(SEARCHED), {0, 2, 5, 8, 9, 10}, {1, 9}))
def test_after_a_kill_at_any_record_the_next_start_serves(
    settling: Settling, searched: Server, written: int, torn: bool
) -> None:
    """The first candidate is refuted, the second committed."""
    server = like(settling, searched, written, torn=torn)
    tried = [key(each) for each in server.records() if each["kind"] == "intent"]
    after = server.boots()
    assert any("torn last line" in each for each in after.settled["warnings"]) == torn
    # Open is what was announced and is neither refuted nor committed.
    assert server.crashed() == (tried[-1:] if written in (2, 3, 6, 7, 8) else [])
    # Without the plan file, which is written between the last two, what is committed is searched
    # for and not verified.
    assert after.settled["verified"] == (written + torn == len(SEARCHED))


@pytest.mark.parametrize(("written", "torn"), points(len(VERIFIED), {0, 3, 5, 6}, {3}))
def test_after_a_kill_at_any_record_of_a_verification_the_next_start_serves(
    settling: Settling, verified: Server, written: int, torn: bool
) -> None:
    server = like(settling, verified, len(VERIFIED) + written, torn=torn)
    tried = key(server.records()[1])
    left = written in (2, 3, 4)
    after = server.boots()
    assert server.crashed() == ([tried] if left else [])
    assert after.settled["verified"] == (not left)
    assert (tried in server.tried(after)) == (not left)


def test_after_a_kill_while_a_crash_is_recorded_it_is_recorded_once(
    settling: Settling, committed: Server
) -> None:
    crashed = like(settling, committed, 2)
    (tried,) = {key(crashed.records()[1])}
    crashed.boots()
    assert crashed.kinds()[:4] == ["begin", "intent", "crash", "begin"]
    for written, torn in ((2, False), (2, True), (3, False)):
        server = like(settling, crashed, written, torn=torn)
        server.boots()
        assert server.crashed() == [tried]


def test_a_server_that_every_candidate_kills_ends_at_its_baseline(settling: Settling) -> None:
    """There are three: both components may be retained, or one of them."""
    server = settling.server(
        options={
            "size": "declared",
            "resident_layers": {"text_encoder": "1", "transformer": "1"},
            "component_residency": {
                "text_encoder": "layerwise-offload",
                "transformer": "layerwise-offload",
            },
            "max_crashes": 100,
        }
    )
    for before in (0, 3, 7):
        server.boots()
        server.cut(before + 3 + bool(before))  # behind the crash of the start before
        assert server.kinds()[before:][-3:] == ["begin", "intent", "applied"]
    last = server.boots()
    assert (len(set(server.crashed())), server.kinds().count("intent")) == (3, 3)
    assert last.settled["status"] == "baseline_only"
    assert server.tried(server.boots()) == []


def test_after_so_many_crashes_no_other_candidate_is_tried(
    settling: Settling, committed: Server
) -> None:
    server = like(settling, committed, 3)
    last = server.boots(options={"max_crashes": 1})
    assert last.settled["status"] == "baseline_only"
    assert "no other candidate is tried: 1 ended a process" in last.settled["warnings"][0]
    assert str(server.journal) in last.settled["warnings"][0]
    assert server.tried(last) == []
    server.journal.rename(server.folder / "kept")
    server.starts.clear()
    assert server.boots().settled["status"] == "committed"


def test_what_was_committed_is_verified_though_others_crashed(
    settling: Settling, committed: Server
) -> None:
    server = like(settling, committed, 3)
    server.boots()
    assert len(server.crashed()) == 1
    assert server.boots(options={"max_crashes": 1}).settled["verified"]


def test_a_given_plan_that_kills_the_server_is_not_tried_again(
    settling: Settling, committed: Server
) -> None:
    given = str(committed.plan_file)
    server = settling.server(options={"plan": given})
    start = server.boots()
    steps = [each["step"] for each in start.all_of("event")]
    assert "VERIFYING" in steps
    assert "TRYING" not in steps
    server.cut(3)
    after = server.boots()
    assert after.settled["warnings"] == [f"searched for anew: what {given} retains ended a process"]


@long
def test_after_a_kill_at_any_instant_the_next_start_serves(
    settling: Settling, committed: Server
) -> None:
    """At allocations, which are everywhere in a start. Every second one verifies, the others
    search; those that are killed late serve already."""
    instants = random.Random(SEED)
    verifying = settling.server(like=committed).boots()
    most = {False: committed.starts[0].settled["allocations"]}
    most[True] = verifying.settled["allocations"]
    killed_at = set()
    for number in range(INSTANTS):
        verifies = number % 2 == 1
        server = settling.server(like=committed if verifies else None)
        start = server.killed(
            serving=True, allocation=instants.randint(1, round(1.3 * most[verifies]))
        )
        records = tuple(each["kind"] for each in server.run_of(start))
        killed_at.add(records)
        after = server.boots()
        if records[-1:] == ("end",):
            assert after.settled["verified"]
        assert not any("is no " in each for each in after.settled["warnings"]), "a torn plan file"
    assert len(killed_at) >= 3, "in the baseline, in a proof, and serving"


def test_a_signal_that_nobody_handles_is_a_crash_too(settling: Settling) -> None:
    server = settling.server()
    start = server.start(apart=True, act="sigterm")
    assert start.ended() == -signal.SIGTERM
    tried = server.tried(start)
    server.boots()
    assert len(tried) == 1
    assert server.crashed() == tried


def test_of_two_starts_on_one_card_one_is_refused_until_the_other_is_killed(
    settling: Settling, tmp_path: Path
) -> None:
    options = {"lock_folder": str(tmp_path)}
    one, other = settling.server(options=options), settling.server(options=options)
    start = one.start(apart=True, waits_at="TRYING")
    pid = start.wait_for("waiting")["pid"]
    message = other.raises("LockedError")["message"]
    assert f"by process {pid} (" in message
    assert "settling_program.py) on " in message
    start.kill()
    assert start.ended() == -signal.SIGKILL
    assert other.boots().settled["status"] == "committed"
    assert one.boots().settled["status"] == "committed"
