"""How ranks agree: in steps, in which each says something and hears what all have said."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self, TypeVar

from ...offload.errors import RankError

T = TypeVar("T")


class Agreement(ABC):
    """All ranks go through the same steps in the same order.

    A step ends alike for all: either `exchange` returns the same on every rank, or it raises
    RankError on every rank. Once a step has failed, so do all that follow.

    As a context manager it closes itself, and a rank that leaves by an error tells the others.
    """

    rank: int
    world_size: int
    nodes: tuple[str, ...]
    """Of each rank, the name of the machine that it runs on."""

    @property
    def local_ranks(self) -> int:
        """How many ranks run on this machine."""
        return self.nodes.count(self.nodes[self.rank])

    @abstractmethod
    def exchange(self, step: str, mine: T, *, deadline_s: float | None = None) -> tuple[T, ...]:
        """What each rank says at `step`, in the order of ranks. `mine` has to be plain data.

        `deadline_s` is how long this rank waits for the others once it is there itself; None is
        the agreement's own. Raises RankError, which names ranks that said nothing in that time,
        that died, left, or failed.
        """

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """This rank can't go on: the step that others are in, or the next, fails and says why.

        Raises nothing. Where the others can't be told, they miss this rank by its silence.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. Ranks that still wait for this one are told."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, RankError):
            self.fail(error)
        self.close()


class Solo(Agreement):
    """One rank, which agrees with itself."""

    rank = 0
    world_size = 1
    nodes = ("",)

    def exchange(self, step: str, mine: T, *, deadline_s: float | None = None) -> tuple[T, ...]:
        return (mine,)

    def fail(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass
