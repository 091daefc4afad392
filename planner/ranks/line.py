"""A connection to the store that ranks share, on which no call blocks for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")


class LineError(Exception):
    """The store can't be reached, or doesn't answer."""


class Line:
    """A store and a thread that makes all calls on it.

    A TCPStore waits for its host without a limit where that is stopped or cut off, whatever its
    own time-out. Here the caller goes on after `patience_s`; the thread stays behind.
    """

    def __init__(self, connect: Callable[[], Store], patience_s: float) -> None:
        self.patience_s = patience_s
        self._fault: LineError | None = None
        self._calls: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(
            target=_serve, args=(connect, self._calls), name="residency line", daemon=True
        ).start()

    def call(self, what: Callable[[Store], T], *, patience_s: float | None = None) -> T:
        """Raises LineError, and from then on at once."""
        if self._fault is not None:
            raise self._fault
        patience_s = self.patience_s if patience_s is None else patience_s
        answer: Future[T] = Future()
        self._calls.put((what, answer))
        try:
            return answer.result(patience_s)
        except TimeoutError:
            self._fault = LineError(f"no answer for {patience_s:g} s")
        except RuntimeError as error:  # all errors of torch.distributed are
            self._fault = LineError(str(error).partition("\n")[0])
        raise self._fault

    def close(self) -> None:
        self._calls.put(None)


def _serve(
    connect: Callable[[], Store],
    calls: SimpleQueue[tuple[Callable[[Store], Any], Future[Any]] | None],
) -> None:
    store: Store | None = None
    while (call := calls.get()) is not None:
        what, answer = call
        try:
            store = store or connect()
            answer.set_result(what(store))
        except BaseException as error:
            answer.set_exception(error)
