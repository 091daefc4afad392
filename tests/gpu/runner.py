"""Parts in processes of their own: one that fails, crashes or hangs costs the others nothing."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .notes import Notes, Read, UnmetError
from .part import Part
from .results import PartResult, Status

SIMULATED = "simulated"

_STACKS_BEFORE_S = 1.0
"""So long before the end of its time a part writes down where it stands."""
_EXIT_S = 15.0
"""How long a part that has ended may take to leave its process."""
_SHOWN_LINES = 25

_HEAVY = ("tests.gpu.parts.two_cards", "tests.gpu.parts.settle", "tests.gpu.warm")


@dataclass(frozen=True, slots=True)
class Task:
    """What a part's process is told."""

    part: Part
    device: str
    scale: str
    limit_s: float
    folder: Path
    """For its notes, its log, and what it writes."""

    @property
    def notes(self) -> Path:
        return self.folder / "notes.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / "log"


class Runner:
    """`device`: `cuda:0`, or `simulated`. `scale`: see `Target.of`."""

    def __init__(self, device: str, scale: str, folder: Path) -> None:
        self.device = device
        self.scale = scale
        self.folder = folder
        self.machine: dict[str, str | None] = {}
        """Of the first part that read it."""
        # A process that has started CUDA can't be forked, and libraries may start it as they are
        # imported; without CUDA, imports that are done once save most of the time.
        method = "forkserver" if device == SIMULATED else "spawn"
        self._context = multiprocessing.get_context(method)
        if method == "forkserver":
            self._context.set_forkserver_preload([*_HEAVY])

    def warm(self) -> None:
        """Do what is done once, so that it is in no part's time."""
        process = self._context.Process(target=_nothing)
        process.start()
        process.join()

    def run(self, part: Part, left_s: float) -> PartResult:
        """`left_s` is what the whole report has left."""
        if part.missing:
            return skipped(part, f"not importable: {', '.join(part.missing)}")
        limit_s = min(part.limit_s, left_s)
        task = Task(part, self.device, self.scale, limit_s, self.folder / part.name)
        task.folder.mkdir(parents=True)
        began = time.monotonic()
        process = self._context.Process(target=_work, args=(task,), name=part.name)
        process.start()
        while process.is_alive() and time.monotonic() - began < limit_s:
            process.join(0.1)
            if Read.of(task.notes).is_done:
                process.join(_EXIT_S)
                break
        seconds = time.monotonic() - began
        is_cut_off = process.is_alive()
        _end(process.pid, process)
        read = Read.of(task.notes)
        self.machine = self.machine or read.machine
        error = read.failed
        if error is None and not read.ended:
            why = f"cut off after {seconds:.0f} s" if is_cut_off else _died(process.exitcode)
            error = f"{why}\n{_tail(task.log)}".rstrip()
        status = Status.OK if error is None else Status.FAILED
        return PartResult(part.name, status, round(seconds, 1), read.numbers, error)


def skipped(part: Part, why: str) -> PartResult:
    return PartResult(part.name, Status.SKIPPED, 0.0, {}, why)


def _end(pid: int | None, process: multiprocessing.process.BaseProcess) -> None:
    """With all that it started: whoever holds memory of the card for it."""
    if pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    process.kill()
    process.join()


def _died(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with {code}"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-_SHOWN_LINES:])


def _nothing() -> None:
    pass


def _work(task: Task) -> None:
    os.setsid()
    # Libraries, and the driver, write to the descriptors.
    with task.log.open("w") as log:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
    faulthandler.enable(sys.__stderr__)
    faulthandler.dump_traceback_later(
        max(task.limit_s - _STACKS_BEFORE_S, task.limit_s / 2), file=sys.__stderr__
    )
    os.environ["XDG_CACHE_HOME"] = str(task.folder / "cache")  # rates are measured anew
    notes = Notes(task.notes)
    try:
        from .target import Target

        module, _, name = task.part.run.partition(":")
        getattr(import_module(module), name)(Target.of(task, notes), notes)
        notes.end()
    except UnmetError as error:
        notes.failed(str(error))
    except Exception:
        notes.failed(traceback.format_exc())
