"""Whose turn it is: one request at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from ...offload.errors import BusyError, InputError, ReentryError


class Concurrency(StrEnum):
    """What becomes of a request that is made while another one runs."""

    WAIT = "wait"
    REFUSE = "refuse"


class Turn:
    """Held by one thread at a time, from before a request until it is cleaned up.

    `wait_s`: how long a thread waits for it at the most; None has no limit.
    Raises InputError for a `wait_s` that is below 0, or where nobody waits.
    """

    def __init__(
        self, concurrency: Concurrency = Concurrency.WAIT, wait_s: float | None = None
    ) -> None:
        if wait_s is not None and (wait_s < 0 or concurrency is Concurrency.REFUSE):
            raise InputError(
                f"wait_s is {wait_s}, and concurrency is {concurrency}",
                hint="wait_s is 0 or more, and needs concurrency=wait",
            )
        self.concurrency = concurrency
        self.wait_s = wait_s
        self._lock = threading.Lock()
        self._owner: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Raises BusyError where it isn't to be had in time, ReentryError where this thread has it
        already: waiting for itself would have no end."""
        if self._owner == threading.get_ident():
            raise ReentryError(
                "this thread is inside a request already",
                hint="end it before the next one begins; requests don't nest",
            )
        waits = self.concurrency is Concurrency.WAIT
        within = self.wait_s if waits and self.wait_s is not None else -1
        if not self._lock.acquire(blocking=waits, timeout=within):
            waited = f", and still did after {within:g} s" if waits else ""
            raise BusyError(
                f"another request runs{waited}",
                hint="try again later, or let requests wait longer (concurrency, wait_s)",
            )
        with self._owned():
            yield

    @contextmanager
    def taken_if_free(self) -> Iterator[bool]:
        """Never waits and never raises. Whether it is taken, inside."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        with self._owned():
            yield True

    @contextmanager
    def _owned(self) -> Iterator[None]:
        self._owner = threading.get_ident()
        try:
            yield
        finally:
            self._owner = None
            self._lock.release()
