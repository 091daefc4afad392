"""A start that hangs, or is told to end: it does, and the pipeline is as it was given."""

import signal

import pytest
from settling import Server, Settling, each_of

from residency.planner.journal.record import Kind


@pytest.mark.parametrize("act", ["hang", "hang_stubbornly", "hang_in_component"])
def test_a_proof_that_hangs_ends_when_the_time_is_used_up(settling: Settling, act: str) -> None:
    server = settling.server()
    start = server.boots(act=act, requests=4)
    assert start.all_of("acting")
    settled = start.settled
    assert (settled["status"], settled["verdicts"]) == ("baseline_only", ["slower"])
    assert "the time is used up" in settled["warnings"][-1]
    refuted = server.tried(start)
    assert server.boots().settled["status"] == "committed"
    assert server.tried(server.starts[-1]) == refuted, "it is no crash, and may do better now"


def test_without_a_limit_a_candidate_that_hangs_is_slower_and_the_next_is_tried(
    settling: Settling,
) -> None:
    start = settling.server().boots(act="hang", options={"least_patience_s": 0.1})
    assert start.settled["status"] == "committed"
    assert start.settled["verdicts"] == ["slower", "accepted"]


def test_without_a_limit_a_verification_that_hangs_ends_and_another_is_searched_for(
    settling: Settling, committed: Server
) -> None:
    server = settling.server(like=committed)
    start = server.boots(act="hang", options={"least_patience_s": 0.1})
    assert start.settled["verdicts"] == ["slower", "accepted"]
    assert not start.settled["verified"]


def test_what_hangs_in_c_ends_with_the_process_and_is_a_crash(settling: Settling) -> None:
    server = settling.server()
    start = server.start(act="hang_in_c")
    start.wait_for("acting")
    start.kill()
    assert start.ended() == -signal.SIGKILL
    server.boots()
    assert server.crashed() == {*server.tried(start)}


def check_may_be_tried_again(server: Server, last: str) -> None:
    """After the only start, which was ended in good order."""
    (start,) = server.starts
    assert server.kinds()[-1] == last
    tried = server.tried(start)
    after = server.boots()
    assert after.settled["status"] == "committed"
    assert Kind.CRASH not in server.kinds()
    assert server.tried(after) == tried or not tried


def test_a_server_that_is_told_to_end_may_cancel_and_nothing_is_held_against_the_candidate(
    settling: Settling,
) -> None:
    server = settling.server()
    server.raises("CancelledError", act="sigterm_handled")
    check_may_be_tried_again(server, "rolled_back")


def test_an_interrupt_in_a_proof_leaves_the_pipeline_as_it_was_given(settling: Settling) -> None:
    server = settling.server()
    server.raises("KeyboardInterrupt", act="sigint")
    check_may_be_tried_again(server, "rolled_back")


def test_an_interrupt_at_any_record_leaves_the_pipeline_as_it_was_given(
    settling: Settling,
) -> None:
    """Each comes just before the record would be written."""
    last = {2: "begin", 3: "rolled_back", 4: "rolled_back", 5: "rolled_back", 6: "committed"}

    def check(number: int) -> None:
        server = settling.server()
        server.raises("KeyboardInterrupt", appends=number, where="sigint")
        check_may_be_tried_again(server, last[number])

    each_of(last, check)


def test_an_interrupt_at_any_step_leaves_the_pipeline_as_it_was_given(settling: Settling) -> None:
    last = {
        "PLACING": "begin",
        "DISCOVERING": "begin",
        "MEASURING": "begin",
        "TRYING": "begin",
        "REFUTED": "rolled_back",
        "COMMITTED": "committed",
    }

    def check(step: str) -> None:
        server = settling.server()
        server.raises("KeyboardInterrupt", at=step, refuted=step == "REFUTED")
        check_may_be_tried_again(server, last[step])

    each_of(last, check)


def test_a_limit_is_of_the_call_that_it_was_given_to(settling: Settling) -> None:
    """The program cancels it before it serves, and before it settles again."""
    start = settling.server().boots(resettles=True)
    assert len(start.all_of("served")) == 2
