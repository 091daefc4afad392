"""How a step ends where ranks are about to see different ends of it; both ranks in one process."""

import json
import pickle
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from torch.distributed import HashStore

from residency.offload.errors import RankError
from residency.planner.ranks.pulse import FAILED, Pulse
from residency.planner.ranks.ranks import Line, LineError, Ranks

FAILURE = json.dumps({"ranks": [1], "message": "rank 1 is late", "hint": None})

Joined = Callable[..., Ranks]


@pytest.fixture
def joined() -> Iterator[Joined]:
    """Rank 0 of 2, on a store in which the test plays rank 1."""
    with ExitStack() as left:

        def join(store: HashStore, deadline_s: float = 60.0) -> Ranks:
            ranks = Ranks(
                0,
                2,
                Line(lambda: store, 60.0),
                Pulse(lambda: store, 0, 2),
                host="rank 0",
                server=None,
                deadline_s=deadline_s,
                silence_s=60.0,
            )
            left.callback(ranks.close)
            return ranks

        yield join


def say(store: HashStore, number: int, step: str, what: object) -> None:
    store.set(f"{number}/1", b64encode(pickle.dumps((step, what))).decode())


class Beaten(HashStore):
    """Somebody else is always just before whoever writes what is to be written once."""

    def __init__(self, end: str) -> None:
        super().__init__()
        self.end = end

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        say(self, 1, "measured", 5)
        super().compare_set(key, expected_value, self.end)
        return super().compare_set(key, expected_value, desired_value)


def test_who_has_heard_all_raises_where_another_has_ended_the_step_before(joined: Joined) -> None:
    store = Beaten(FAILURE)
    say(store, 1, "measured", 5)
    with pytest.raises(RankError, match="rank 1 is late"):
        joined(store).exchange("measured", 4)


def test_who_has_waited_too_long_goes_on_where_another_has_heard_all_before(
    joined: Joined,
) -> None:
    assert joined(Beaten("all"), deadline_s=0.0).exchange("measured", 4) == (4, 5)


@pytest.mark.parametrize("all_are_there", [True, False])
def test_a_rank_that_comes_to_a_failed_step_learns_it_at_once(
    joined: Joined, all_are_there: bool
) -> None:
    store = HashStore()
    store.set("1/end", FAILURE)
    if all_are_there:
        say(store, 1, "measured", 5)
    with pytest.raises(RankError, match="rank 1 is late"):
        joined(store).exchange("measured", 4)
    assert store.get(FAILED).decode() == FAILURE


def test_a_failure_behind_a_step_that_all_have_reached_ends_the_next(joined: Joined) -> None:
    store = HashStore()
    say(store, 1, "measured", 5)
    store.set(FAILED, FAILURE)
    ranks = joined(store)
    assert ranks.exchange("measured", 4) == (4, 5)
    with pytest.raises(RankError, match="rank 1 is late"):
        ranks.exchange("applied", 4)


def test_behind_a_failed_step_there_is_no_other(joined: Joined) -> None:
    store = HashStore()
    ranks = joined(store, deadline_s=0.0)
    with pytest.raises(RankError, match="rank 1 said nothing for 0 s at `measured`"):
        ranks.exchange("measured", 4)
    say(store, 2, "applied", 5)
    with pytest.raises(RankError, match="at `measured`"):
        ranks.exchange("applied", 4)


def test_the_first_failure_is_the_one_that_is_told(joined: Joined) -> None:
    store = HashStore()
    store.set(FAILED, FAILURE)
    ranks = joined(store)
    ranks.fail(ValueError("mine"))
    assert store.get(FAILED).decode() == FAILURE
    with pytest.raises(RankError, match="rank 0 failed before the first step: ValueError: mine"):
        ranks.exchange("measured", 4)


def test_who_has_learnt_of_a_failure_has_none_to_tell(joined: Joined) -> None:
    store = HashStore()
    ranks = joined(store, deadline_s=0.0)
    with pytest.raises(RankError) as caught:
        ranks.exchange("measured", 4)
    store.delete_key(FAILED)
    ranks.fail(caught.value)
    assert not store.check([FAILED])


def test_what_was_said_is_let_go_of_a_step_later(joined: Joined) -> None:
    store = HashStore()
    ranks = joined(store)
    for number in (1, 2):
        say(store, number, "measured", 5)
        ranks.exchange("measured", 4)
    assert not store.check(["1/0"])
    assert store.check(["2/0"])


def test_a_line_that_was_lost_stays_lost() -> None:
    def refuse(store: HashStore) -> None:
        raise RuntimeError("connection reset\nat socket.cpp")

    line = Line(HashStore, 60.0)
    assert line.call(lambda store: store.check(["a"])) is False
    for call in (refuse, lambda store: store.check(["a"])):
        with pytest.raises(LineError, match=r"^connection reset$"):
            line.call(call)
    line.close()
