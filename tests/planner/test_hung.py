"""A start that hangs, or is told to end: it does, and the pipeline is as it was given."""

import signal

import pytest
from settling import Server, Settling, each_of

long = pytest.mark.long


LIMIT_S = 4.0
"""Past it a proof is ended. Whatever else the machine does, one that hangs has begun by then."""


def test_a_proof_that_hangs_ends_when_the_time_is_used_up(settling: Settling) -> None:
    servers = {}

    def check(act: str) -> None:
        server = servers[act] = settling.server()
        start = server.boots(apart=True, act=act, limit_s=LIMIT_S)
        assert start.all_of("acting")
        settled = start.settled
        assert (settled["status"], settled["verdicts"]) == ("baseline_only", ["slower"])
        assert "the time is used up" in settled["warnings"][-1]

    assert settling.image  # which is made here, where one card is
    each_of(["hang", "hang_stubbornly", "hang_in_component"], check)
    server = servers["hang"]
    refuted = server.tried(server.starts[0])
    after = server.boots()
    assert after.settled["status"] == "committed"
    assert server.tried(after) == refuted, "it is no crash, and may do better now"


def test_without_a_limit_a_candidate_that_hangs_is_slower_and_the_next_is_tried(
    settling: Settling, committed: Server
) -> None:
    def check(server: Server) -> None:
        start = server.boots(apart=True, act="hang", options={"least_patience_s": LIMIT_S})
        assert start.settled["status"] == "committed"
        assert start.settled["verdicts"] == ["slower", "accepted"]
        assert not start.settled["verified"]

    each_of([settling.server(), settling.server(like=committed)], check)


def test_what_hangs_in_c_ends_with_the_process_and_is_a_crash(settling: Settling) -> None:
    server = settling.server()
    start = server.start(apart=True, act="hang_in_c")
    start.wait_for("acting")
    start.kill()
    assert start.ended() == -signal.SIGKILL
    tried = server.tried(start)
    server.boots()
    assert len(tried) == 1
    assert server.crashed() == tried


def check_may_be_tried_again(server: Server, last: str) -> None:
    """After the only start, which was ended in good order."""
    (start,) = server.starts
    assert server.kinds()[-1] == last
    tried = server.tried(start)
    after = server.boots()
    assert after.settled["status"] == "committed"
    assert "crash" not in server.kinds()
    assert server.tried(after) == tried or not tried


def test_a_server_that_is_told_to_end_may_cancel_and_nothing_is_held_against_the_candidate(
    settling: Settling,
) -> None:
    server = settling.server()
    server.raises("CancelledError", apart=True, act="sigterm_handled")
    check_may_be_tried_again(server, "rolled_back")


def test_an_interrupt_in_a_proof_leaves_the_pipeline_as_it_was_given(settling: Settling) -> None:
    server = settling.server()
    server.raises("KeyboardInterrupt", apart=True, act="sigint")
    check_may_be_tried_again(server, "rolled_back")


@pytest.mark.parametrize(
    ("number", "last"),
    [
        pytest.param(2, "begin", marks=long),
        (3, "rolled_back"),
        pytest.param(4, "rolled_back", marks=long),
        (5, "rolled_back"),
        (6, "committed"),
    ],
)
def test_an_interrupt_at_any_record_leaves_the_pipeline_as_it_was_given(
    settling: Settling, number: int, last: str
) -> None:
    """Each comes just before the record would be written."""
    server = settling.server()
    server.raises("KeyboardInterrupt", appends=number, where="sigint")
    check_may_be_tried_again(server, last)


@pytest.mark.parametrize(
    ("step", "last"),
    [
        ("PLACING", "begin"),
        ("MEASURING", "begin"),
        pytest.param("TRYING", "begin", marks=long),
        ("REFUTED", "rolled_back"),
        pytest.param("COMMITTED", "committed", marks=long),
    ],
)
def test_an_interrupt_at_any_step_leaves_the_pipeline_as_it_was_given(
    settling: Settling, step: str, last: str
) -> None:
    server = settling.server()
    server.raises("KeyboardInterrupt", at=step, refuted=step == "REFUTED")
    check_may_be_tried_again(server, last)


def test_a_limit_is_of_the_call_that_it_was_given_to(settling: Settling) -> None:
    """The program cancels it before it serves, and before it settles again."""
    start = settling.server().boots(resettles=True)
    assert len(start.all_of("served")) == 2
