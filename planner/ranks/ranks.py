"""Ranks of torch.distributed, which agree over a store that they share.

All that ranks say goes through a TCPStore and nothing through collectives, although a gloo group
would carry it too:

    who is missing    a key a rank tells; a collective says that somebody is
    who comes late    what a rank said stays there when it has died or left
    one end for all   the end of a step is one key, which `compare_set` writes once: whoever sees
                      everything first, or misses somebody first, decides for all
    the server        its groups, and the order of collectives in them, aren't touched

Signs of life (`pulse.py`) tell a rank that died from one that is slow, so a step may be given
minutes and a death is still told in seconds. The one thing that can't be decided for all is a step
in which the store itself is lost, with rank 0 or the launcher: a rank that saw the end of the step
before goes on, the others raise. So a step after a commit shows whether all have seen it.

As everything between ranks of torch.distributed, what is exchanged is pickled and not
authenticated: the ranks have to trust one another and their network."""

from __future__ import annotations

import json
import pickle
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from ...offload.errors import InputError, RankError, ResidencyError
from .agreement import Agreement
from .pulse import FAILED, Pulse

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


POLL_S = 0.05
LINGER_S = 5.0
"""How long the rank that holds the store waits for the others to leave."""
STOP_S = 2.0
MAX_SAID_BYTES = 8 << 20
"""What a TCPStore takes for one value."""

_ALL = "all"


@dataclass(frozen=True, slots=True)
class _Failure:
    ranks: tuple[int, ...]
    message: str
    hint: str | None

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> RankError:
        written = json.loads(text)
        return RankError(written["message"], hint=written["hint"], ranks=written["ranks"])


class Ranks(Agreement):
    """`pulse` beats for this rank. `host` says in words who holds the store; `server` is the store
    where this rank does, and is let go of on `close`.

    A rank that was seen and then gives no sign of life for `silence_s` is taken for dead.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        line: Line,
        pulse: Pulse,
        *,
        host: str,
        server: Store | None,
        deadline_s: float,
        silence_s: float,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.nodes = ("",) * world_size
        self._line = line
        self._pulse = pulse
        self._host = host
        self._server = server
        self._deadline_s = deadline_s
        self._silence_s = silence_s
        self._steps = 0
        self._before = "before the first step"
        """Where all ranks are known to have been."""
        self._error: RankError | None = None

    def exchange(self, step: str, mine: T, *, deadline_s: float | None = None) -> tuple[T, ...]:
        if self._error is not None:
            raise self._error
        said = b64encode(pickle.dumps((step, mine))).decode()
        if len(said) > MAX_SAID_BYTES:
            raise InputError(
                f"rank {self.rank} has {len(said)} bytes to say at `{step}`, and at most "
                f"{MAX_SAID_BYTES} can be",
                hint="exchange numbers, and no tensors",
            )
        self._steps += 1
        try:
            waits_s = self._deadline_s if deadline_s is None else deadline_s
            heard: tuple[T, ...] = self._exchange(step, said, waits_s)
        except LineError as fault:
            self._error = self._lost(step, fault)
        except RankError as error:
            self._error = error
        if self._error is not None:
            raise self._error
        self._before = f"after `{step}`"
        return heard

    def fail(self, error: BaseException) -> None:
        if self._error is not None:
            return  # all know of a failure already
        told, hint = str(error), None
        if isinstance(error, ResidencyError):
            told, hint = error.message, error.hint
        message = f"rank {self.rank} failed {self._before}: {type(error).__name__}: {told}"
        failure = _Failure((self.rank,), message, hint).write()
        self._error = _Failure.read(failure)
        try:
            self._first(FAILED, failure)
        except LineError:
            return  # the others miss this rank by its silence, or miss the store themselves

    def close(self) -> None:
        self._pulse.leave()
        if self._server is not None:
            have_met = self._steps > 1 or self._error is None
            self._pulse.await_others(LINGER_S, self._silence_s, unseen=have_met)
        self._pulse.stop(STOP_S)
        self._line.close()
        self._server = None

    def _exchange(self, step: str, said: str, deadline_s: float) -> tuple[T, ...]:
        keys = [self._key(rank) for rank in range(self.world_size)]
        self._line.call(lambda store: store.set(keys[self.rank], said))
        end = self._ended(step, deadline_s)
        if end != _ALL:
            self._first(FAILED, end)
            raise _Failure.read(end)
        texts = self._line.call(lambda store: store.multi_get(keys))
        self._forget()
        heard: list[tuple[str, T]] = [pickle.loads(b64decode(text)) for text in texts]
        steps = [each for each, _ in heard]
        for rank, other in enumerate(steps):
            if other != steps[0]:
                raise RankError(
                    f"rank {rank} is at `{other}` where rank 0 is at `{steps[0]}`",
                    hint="start all ranks with the same settings",
                    ranks=(rank,),
                )
        return tuple(mine for _, mine in heard)

    def _ended(self, step: str, deadline_s: float) -> str:
        """How the step ended for all: _ALL, or the failure."""
        end = f"{self._steps}/end"
        until = time.monotonic() + deadline_s
        while True:
            # Before the store is read: a rank that failed writes it there before it leaves.
            gone = {rank: why for rank in range(self.world_size) if (why := self._gone(rank, step))}
            waited_s = deadline_s if time.monotonic() >= until else None
            proposed = self._line.call(self._proposed)
            if proposed is None and (gone or waited_s is not None):
                proposed = self._missing(step, gone, waited_s)
            if proposed is not None:
                return self._first(end, proposed)
            time.sleep(POLL_S)

    def _proposed(self, store: Store) -> str | None:
        """What the store says of the step: its end, or how it may end by now."""
        end, said = f"{self._steps}/end", [self._key(rank) for rank in range(self.world_size)]
        if store.check([end]):
            return store.get(end).decode()
        if store.check(said):
            return _ALL
        return store.get(FAILED).decode() if store.check([FAILED]) else None

    def _missing(self, step: str, gone: Mapping[int, str], waited_s: float | None) -> str | None:
        """The failure, where ranks are missing that are gone, or that the time is up for."""
        keys = [self._key(rank) for rank in range(self.world_size)]
        there = self._line.call(lambda store: [store.check([key]) for key in keys])
        faults = {}
        for rank, came in enumerate(there):
            if came:
                continue
            if rank in gone:
                faults[rank] = gone[rank]
            elif waited_s is not None:
                seen = "never" if self._pulse.sign(rank) is None else self._before
                faults[rank] = (
                    f"rank {rank} said nothing for {waited_s:g} s at `{step}`, last seen {seen}"
                )
        if not faults:
            return None
        hint = "the log of that rank says why"
        if waited_s is not None:
            hint += "; if the step takes so long, give it more time"
        return _Failure(tuple(faults), "; ".join(faults.values()), hint).write()

    def _gone(self, rank: int, step: str) -> str | None:
        """Why a rank won't come to the step, if it isn't there yet."""
        sign, silent_s = self._pulse.sign(rank), self._pulse.silent_s(rank)
        if sign is None:
            return None
        if sign.left:
            return f"rank {rank} left {self._before}, and rank {self.rank} is at `{step}`"
        if silent_s >= self._silence_s:
            return f"rank {rank} gave no sign of life for {silent_s:g} s, last seen {self._before}"
        return None

    def _first(self, key: str, text: str) -> str:
        """Write `text` where nothing is written yet. What is written there then."""
        return self._line.call(lambda store: store.compare_set(key, "", text)).decode()

    def _key(self, rank: int) -> str:
        return f"{self._steps}/{rank}"

    def _forget(self) -> None:
        """What this rank said a step before: all are past it, since all are in this one."""
        old = f"{self._steps - 1}/{self.rank}"
        self._line.call(lambda store: store.delete_key(old))

    def _lost(self, step: str, fault: LineError) -> RankError:
        if self._pulse.failure is not None:
            return _Failure.read(self._pulse.failure)
        return RankError(
            f"{self._host}, which holds what ranks say, doesn't answer rank {self.rank} at "
            f"`{step}`: {fault}",
            hint="its log says why it ended",
            ranks=(0,) if self._host == "rank 0" else (),
        )
