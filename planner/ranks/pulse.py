"""Signs of life: each rank beats into the store, and watches the beats of the others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

BEAT_S = 0.5
FAILED = "failed"
"""The key under which the first failure is written."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A beat, and whether the rank has left."""

    number: int
    left: bool


class Pulse:
    """A thread that beats, on a connection of its own.

    How long another rank has been silent is counted in this rank's own rounds: one that was stopped
    itself doesn't take the others for dead when it goes on.
    """

    def __init__(self, connect: Callable[[], Store], rank: int, world_size: int) -> None:
        self.failure: str | None = None
        """What is written under FAILED, as soon as this rank has seen it."""
        self._rank = rank
        self._others = [each for each in range(world_size) if each != rank]
        self._signs: dict[int, Sign] = {}
        self._quiet_rounds = dict.fromkeys(self._others, 0)
        self._left = self._stopped = False
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(connect,), name="residency pulse", daemon=True
        )
        self._thread.start()

    def sign(self, rank: int) -> Sign | None:
        """The last one seen; None where there was none yet."""
        return self._signs.get(rank)

    def silent_s(self, rank: int) -> float:
        """How long a rank that was seen hasn't beaten."""
        return self._quiet_rounds.get(rank, 0) * BEAT_S

    def leave(self) -> None:
        """Say that this rank takes part in no further step. It beats until `stop`."""
        self._left = True
        self._wake.set()

    def await_others(self, within_s: float, silence_s: float, *, unseen: bool) -> None:
        """Until all others have left, or have been silent for `silence_s`. `unseen`: also those
        that were never seen."""
        end = time.monotonic() + within_s
        while time.monotonic() < end and self._thread.is_alive():
            signs = [(each, self.sign(each)) for each in self._others]
            if not any(
                unseen if sign is None else not sign.left and self.silent_s(each) < silence_s
                for each, sign in signs
            ):
                return
            time.sleep(BEAT_S / 5)

    def stop(self, within_s: float) -> None:
        """Beat once more and end."""
        self._stopped = True
        self._wake.set()
        self._thread.join(within_s)

    def _run(self, connect: Callable[[], Store]) -> None:
        try:
            store = connect()
            number = 0
            while not self._stopped:
                number += 1
                self._round(store, number)
                self._wake.wait(BEAT_S)
                self._wake.clear()
            self._beat(store, number + 1)
        except RuntimeError:
            return  # the store is gone; whoever waits in a step learns it from its own calls

    def _round(self, store: Store, number: int) -> None:
        self._beat(store, number)
        for rank in self._others:
            self._quiet_rounds[rank] += rank in self._signs
            if rank in self._signs or store.check([_key(rank)]):
                sign = Sign(**json.loads(store.get(_key(rank))))
                if sign != self._signs.get(rank):
                    self._signs[rank] = sign
                    self._quiet_rounds[rank] = 0
        if self.failure is None and store.check([FAILED]):
            self.failure = store.get(FAILED).decode()

    def _beat(self, store: Store, number: int) -> None:
        store.set(_key(self._rank), json.dumps(asdict(Sign(number, self._left))))


def _key(rank: int) -> str:
    return f"beat/{rank}"
