"""Parts that end as parts do on a bad day."""

import os
import signal
import time

from tests.gpu.notes import Notes
from tests.gpu.target import Target


def passes(target: Target, notes: Notes) -> None:
    notes.machine("a card", "580.1", "2.11.0")
    notes.note("answer", 42)


def raises(target: Target, notes: Notes) -> None:
    notes.note("until_then", 1)
    raise ArithmeticError("the card said no")


def misses(target: Target, notes: Notes) -> None:
    notes.require(1 > 2, "1 isn't above 2")
    notes.note("afterwards", 2)
    notes.require(3 > 4, "3 isn't above 4")


def hangs_in_a_call(target: Target, notes: Notes) -> None:
    notes.note("pid", os.getpid())
    notes.note("child", os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "600"))
    time.sleep(600)


def is_killed(target: Target, notes: Notes) -> None:
    notes.note("until_then", 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(target: Target, notes: Notes) -> None:
    print("a library says why", flush=True)
    os._exit(3)
