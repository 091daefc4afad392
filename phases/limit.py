"""How long a run may take, and whether it is still wanted."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ..offload.errors import CancelledError, OvertimeError

GRACE_S = 1.0
"""Given to code that checks its limit before it is interrupted."""

AGAIN_S = 5.0
"""Until it is interrupted again, where it goes on: it may have caught the error, or have been in a
callback of the garbage collector's, whose errors are ignored."""


class Limit:
    """Checked wherever a component is entered, and by anything else that may take long.

    Any thread may call `cancel`. Deadlines nest: the earliest holds.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._cancelled = threading.Event()
        self._deadlines: list[tuple[float, float]] = []
        if seconds is not None:
            self._push(seconds)

    def cancel(self) -> None:
        """Whoever checks next is stopped."""
        self._cancelled.set()

    @property
    def left_s(self) -> float | None:
        """Until the earliest deadline, 0 at least; None without one."""
        if not self._deadlines:
            return None
        at, _ = min(self._deadlines)
        return max(at - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        return self.left_s == 0.0

    def check(self) -> None:
        """Raises CancelledError if it was cancelled, OvertimeError past a deadline."""
        if self._cancelled.is_set():
            raise CancelledError("cancelled", hint="the pipeline is as it was given")
        if self._deadlines and self.is_over:
            _, seconds = min(self._deadlines)
            raise OvertimeError(f"it took longer than the {seconds:.1f} s that it was given")

    @contextmanager
    def within(self, seconds: float | None, *, interrupt: bool = False) -> Iterator[None]:
        """Inside, no more than so many seconds; None adds no limit.

        `interrupt`: past the earliest deadline OvertimeError is raised in the middle of whatever
        Python code this thread runs, for code that never checks. A call into C that doesn't return
        isn't ended by it.
        """
        pushed = None if seconds is None else self._push(seconds)
        try:
            with _interrupted(self.left_s) if interrupt and self._deadlines else nullcontext():
                yield
        finally:
            if pushed is not None:
                self._deadlines.remove(pushed)

    def _push(self, seconds: float) -> tuple[float, float]:
        deadline = (time.monotonic() + seconds, seconds)
        self._deadlines.append(deadline)
        return deadline


@contextmanager
def _interrupted(after_s: float | None) -> Iterator[None]:
    """Raises OvertimeError in this thread where the block takes `GRACE_S` longer than that."""
    assert after_s is not None
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    done = threading.Event()
    fired = False

    def fire() -> None:
        nonlocal fired
        wait_s = after_s + GRACE_S
        while not done.wait(wait_s):
            with lock:
                if not done.is_set():
                    fired = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Overtime))
            wait_s = AGAIN_S

    threading.Thread(target=fire, name="limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            done.set()
        if fired:  # and not arrived yet, maybe
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)


class _Overtime(OvertimeError):
    """Raised from outside, where only a class can be given."""

    def __init__(self) -> None:
        super().__init__("it hung: nothing checked the time when it was up")
