"""Agreements of one rank, and what leaving one does."""

import pytest

from residency.offload.errors import PhaseError, RankError
from residency.planner.ranks.agreement import Solo, T
from residency.planner.ranks.rendezvous import meet


class Recorded(Solo):
    def __init__(self) -> None:
        self.failed: list[BaseException] = []
        self.closed = 0

    def exchange(self, step: str, mine: T, *, deadline_s: float | None = None) -> tuple[T, ...]:
        raise RankError("rank 1 is gone", ranks=[1])

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)

    def close(self) -> None:
        self.closed += 1


def test_one_rank_hears_itself() -> None:
    with Solo() as agreement:
        assert agreement.exchange("measured", {"room": 3}) == ({"room": 3},)
        assert (agreement.rank, agreement.world_size, agreement.local_ranks) == (0, 1, 1)


def test_a_process_that_nobody_else_was_started_with_is_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(meet(), Solo)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert isinstance(meet(), Solo)


def test_a_rank_that_leaves_by_an_error_tells_the_others() -> None:
    agreement, error = Recorded(), PhaseError("two graphs")
    with pytest.raises(PhaseError), agreement:
        raise error
    assert (agreement.failed, agreement.closed) == ([error], 1)


def test_a_rank_that_others_have_failed_has_nothing_to_tell() -> None:
    agreement = Recorded()
    with pytest.raises(RankError) as caught, agreement:
        agreement.exchange("measured", 1)
    assert caught.value.ranks == (1,)
    assert (agreement.failed, agreement.closed) == ([], 1)


def test_ranks_of_a_machine_are_those_of_the_same_name() -> None:
    agreement = Solo()
    agreement.nodes = ("a", "b", "a")
    agreement.rank = 2
    assert agreement.local_ranks == 2
