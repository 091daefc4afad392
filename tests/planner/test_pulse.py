"""Signs of life, on a store in which the test plays the other rank."""

import json
import time
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore

from residency.planner.ranks import pulse
from residency.planner.ranks.pulse import Pulse

ENDS_S = 30.0


@pytest.fixture
def store() -> HashStore:
    return HashStore()


@pytest.fixture
def mine(store: HashStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pulse]:
    """Of rank 0 of 2."""
    monkeypatch.setattr(pulse, "BEAT_S", 0.01)
    made = Pulse(lambda: store, 0, 2)
    yield made
    made.stop(ENDS_S)


def beat(store: HashStore, number: int, *, left: bool = False) -> None:
    store.set("beat/1", json.dumps({"number": number, "left": left}))


def becomes(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + ENDS_S
    while not true() and time.monotonic() < end:
        time.sleep(0.001)
    return true()


def test_a_rank_is_silent_until_it_beats_again(store: HashStore, mine: Pulse) -> None:
    beat(store, 1)
    assert becomes(lambda: mine.silent_s(1) > 0.5)
    long_s = mine.silent_s(1)
    numbers = iter(range(2, 100_000))

    def beats() -> bool:
        beat(store, next(numbers))
        return mine.silent_s(1) < long_s

    assert becomes(beats)


def test_a_rank_that_was_never_seen_is_not_silent(store: HashStore, mine: Pulse) -> None:
    assert becomes(lambda: store.check(["beat/0"]))
    first = store.get("beat/0")
    assert becomes(lambda: store.get("beat/0") != first)
    assert mine.sign(1) is None
    assert mine.silent_s(1) == 0


def test_others_are_awaited_until_they_leave(store: HashStore, mine: Pulse) -> None:
    beat(store, 1)
    assert becomes(lambda: mine.sign(1) is not None)
    begun = time.monotonic()
    mine.await_others(0.1, ENDS_S, unseen=True)
    assert time.monotonic() - begun >= 0.1
    beat(store, 2, left=True)
    mine.await_others(ENDS_S * 10, ENDS_S, unseen=True)


def test_others_that_are_silent_or_were_never_seen_are_not_awaited(
    store: HashStore, mine: Pulse
) -> None:
    mine.await_others(ENDS_S * 10, ENDS_S, unseen=False)
    beat(store, 1)
    mine.await_others(ENDS_S * 10, 0.1, unseen=True)


def test_the_last_beat_says_that_a_rank_has_left(store: HashStore, mine: Pulse) -> None:
    mine.leave()
    mine.stop(ENDS_S)
    assert json.loads(store.get("beat/0"))["left"] is True
