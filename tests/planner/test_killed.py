"""A server that is killed as it starts: each next start serves, and no candidate kills it twice."""

import random
import signal
import time
from pathlib import Path

import pytest
from settling import Server, Settling, each_of, open_attempts

SEED = 20260701
INSTANTS = 50
FIRST = ("begin", "intent", "applied", "verdict", "rolled_back")
SEARCHED = (*FIRST, "intent", "applied", "verdict", "committed", "end")
VERIFIED = ("begin", "intent", "applied", "verdict", "committed", "end")


def every_step(records: tuple[str, ...]) -> list[tuple[int, str]]:
    """Before the first record, in the middle of each, and after it."""
    numbers = range(1, len(records) + 1)
    return [(1, "before"), *((number, where) for number in numbers for where in ("torn", "after"))]


@pytest.mark.scale
def test_after_a_kill_at_any_record_the_next_start_serves(settling: Settling) -> None:
    """The first candidate is refuted, the second committed."""

    def check(at: tuple[int, str]) -> None:
        number, where = at
        server = settling.server()
        start = server.killed(appends=number, where=where, refuted=True)
        written = number if where == "after" else number - 1
        assert tuple(server.kinds()) == SEARCHED[:written]
        tried = server.tried(start)
        left = open_attempts(server.records())
        after = server.boots()
        is_torn = any("torn last line" in each for each in after.settled["warnings"])
        assert is_torn == (where == "torn")
        # Open is what was announced and is neither refuted nor committed.
        assert len(left) == (written in (2, 3, 6, 7, 8))
        assert server.crashed() == set(tried[-1:] if left else ())
        # Without the plan file, which is written between the last two, what is committed is
        # searched for and not verified.
        assert after.settled["verified"] == (number == 10)

    each_of(every_step(SEARCHED), check)


def test_after_a_kill_at_any_record_of_a_verification_the_next_start_serves(
    settling: Settling, committed: Server
) -> None:
    (key,) = committed.tried(committed.starts[0])

    def check(at: tuple[int, str]) -> None:
        number, where = at
        server = settling.server(like=committed)
        server.killed(appends=number, where=where)
        left = open_attempts(server.records())
        after = server.boots()
        assert server.crashed() == ({key} if left else set())
        assert after.settled["verified"] == (not left)
        assert (key in server.tried(after)) == (not left)

    each_of(every_step(VERIFIED), check)


def test_after_a_kill_while_a_crash_is_recorded_it_is_recorded_once(settling: Settling) -> None:
    def check(where: str) -> None:
        server = settling.server()
        first = server.killed(appends=2)
        server.killed(appends=1, where=where)
        server.boots()
        assert server.kinds().count("crash") == 1
        assert server.crashed() == {*server.tried(first)}

    each_of(("before", "torn", "after"), check)


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
    server.killed(appends=3)
    for _ in range(2):
        server.killed(appends=4)  # behind the crash of the start before, and its own begin
        assert server.kinds()[-4:] == ["crash", "begin", "intent", "applied"]
    last = server.boots(appends=4)
    assert (len(server.crashed()), server.kinds().count("intent")) == (3, 3)
    assert last.settled["status"] == "baseline_only"
    assert server.tried(server.boots()) == []


def test_after_so_many_crashes_no_other_candidate_is_tried(settling: Settling) -> None:
    server = settling.server()
    server.killed(appends=3)
    server.killed(appends=4)
    server.killed(appends=4)
    last = server.boots()
    assert last.settled["status"] == "baseline_only"
    assert "no other candidate is tried: 3 ended a process" in last.settled["warnings"][0]
    assert str(server.journal) in last.settled["warnings"][0]
    assert server.tried(last) == []
    server.journal.rename(server.folder / "kept")
    server.starts.clear()
    assert server.boots().settled["status"] == "committed"


def test_what_was_committed_is_verified_though_others_crashed(
    settling: Settling, committed: Server
) -> None:
    server = settling.server()
    server.killed(appends=3)
    server.boots()
    assert server.boots(options={"max_crashes": 1}).settled["verified"]


def test_a_given_plan_that_kills_the_server_is_not_tried_again(
    settling: Settling, committed: Server
) -> None:
    given = f"{committed.journal}.plan.json"
    server = settling.server(options={"plan": given})
    start = server.killed(appends=3)
    assert [each["step"] for each in start.all_of("event")][-1] == "VERIFYING"
    after = server.boots()
    assert after.settled["warnings"] == [f"searched for anew: what {given} retains ended a process"]


@pytest.mark.scale
def test_after_a_kill_at_any_instant_the_next_start_serves(
    settling: Settling, committed: Server
) -> None:
    """Every second start verifies, the others search. Those that are killed late serve already."""
    instants = random.Random(SEED)
    cases = [(number % 2 == 1, instants.uniform(0, 1.1)) for number in range(INSTANTS)]
    verifying = settling.server(like=committed).boots()
    # What a start takes depends on what else the machine does: that of the last one is taken.
    lasted_s = {False: committed.starts[0].settling_s, True: verifying.settling_s}
    killed_at = set()

    def check(case: tuple[bool, float]) -> None:
        verifies, share = case
        server = settling.server(like=committed if verifies else None)
        start = server.start(serving=True)
        start.wait_for("begun")
        time.sleep(share * lasted_s[verifies])
        start.kill()
        assert start.ended() == -signal.SIGKILL, start.lines()
        server.check_journal()
        records = tuple(each.kind for each in server.run_of(start))
        killed_at.add(records)
        after = server.boots()
        lasted_s[after.settled["verified"]] = after.settling_s
        if records[-1:] == ("end",):
            assert after.settled["verified"]
        assert not any("is no " in each for each in after.settled["warnings"]), "a torn plan file"

    each_of(cases, check)
    assert len(killed_at) > 3


def test_a_signal_that_nobody_handles_is_a_crash_too(settling: Settling) -> None:
    server = settling.server()
    start = server.start(act="sigterm")
    assert start.ended() == -signal.SIGTERM
    server.boots()
    assert server.crashed() == {*server.tried(start)}


def test_of_two_starts_on_one_card_one_is_refused_until_the_other_is_killed(
    settling: Settling, tmp_path: Path
) -> None:
    options = {"lock_folder": str(tmp_path)}
    one, other = settling.server(options=options), settling.server(options=options)
    start = one.start(waits_at="TRYING")
    while not any(each["step"] == "TRYING" for each in start.all_of("event")):
        start.wait_for("event")
        time.sleep(0.01)
    pid = start.wait_for("begun")["pid"]
    said = other.raises("LockedError")["message"]
    assert f"by process {pid} (" in said
    assert "settling_program.py) on " in said
    start.kill()
    assert start.ended() == -signal.SIGKILL
    assert other.boots().settled["status"] == "committed"
    assert one.boots().settled["status"] == "committed"
