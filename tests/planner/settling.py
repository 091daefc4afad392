"""Starts of one server after another, and what must hold after each.

A start is run here, in the test's own process, unless it is to end before its time. What one that
was killed leaves is the journal up to the record at which it was killed (see
`test_what_a_kill_leaves_are_the_records_before_it`), so `Server.cut` makes it without a process.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, Protocol, TypeVar

import settling_program

T = TypeVar("T")
Record = dict[str, Any]
"""A line of a journal."""

PROGRAM = Path(settling_program.__file__)
ENDS_S = 130
"""Longer than the program lets a start live."""


class Runner(Protocol):
    def start(self, told: Path, **job: object) -> None: ...

    @property
    def runs(self) -> bool: ...


class Here:
    """One pipeline in this process, which is as it was given after each start."""

    runs = True

    def __init__(self) -> None:
        self.pipeline = settling_program.built()
        gc.collect()
        gc.freeze()  # each rollback collects garbage, and this is none

    def start(self, told: Path, **job: Any) -> None:
        settling_program.Start(settling_program.Job(told=str(told), **job), self.pipeline).run()


class Program:
    """The process whose children the starts are."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", str(PROGRAM)],
            stdin=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._lock = threading.Lock()

    def start(self, told: Path, **job: object) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with self._lock:
            pipe.write(json.dumps({"told": str(told), **job}) + "\n")
            pipe.flush()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """With all that it has started."""
        with suppress(ProcessLookupError):  # where all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


@dataclass(frozen=True)
class Start:
    program: Runner
    told: Path
    records_before: int = 0
    """What the journal had when it began."""

    def lines(self) -> list[dict[str, Any]]:
        if not self.told.exists():
            return []
        *whole, _ = self.told.read_text().split("\n")
        return [json.loads(line) for line in whole]

    def all_of(self, what: str) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["what"] == what]

    def wait_for(self, what: str) -> dict[str, Any]:
        until = time.monotonic() + ENDS_S
        size = 0
        while time.monotonic() < until:
            if self.told.exists() and (now := self.told.stat().st_size) > size:
                size, lines = now, self.lines()
                for line in lines:
                    if line["what"] == what:
                        return line
                assert not lines or lines[-1]["what"] != "ended", (what, lines)
            assert self.program.runs, "the program ended; see what it wrote to stderr"
            time.sleep(0.005)
        raise AssertionError(f"{what} took longer than {ENDS_S} s: {self.lines()}")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.wait_for("begun")["pid"], number)

    def ended(self) -> int:
        """The exit status, once it has ended."""
        status: int = self.wait_for("ended")["status"]
        return status

    @property
    def settled(self) -> dict[str, Any]:
        (settled,) = self.all_of("settled")
        return settled


class Settling:
    """Makes servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._numbers = count(1)

    @cached_property
    def here(self) -> Here:
        return Here()

    @cached_property
    def program(self) -> Program:
        return Program()

    @cached_property
    def image(self) -> str:
        """What is served with nothing retained."""
        start = Start(self.here, self.folder / "told")
        self.here.start(start.told, mode="off")
        image: str = start.all_of("served")[0]["image"]
        return image

    def close(self) -> None:
        if "program" in self.__dict__:
            self.program.close()

    def server(self, *, like: Server | None = None, **changed: object) -> Server:
        """A new one, or one with the journal and the plan of another. `changed` is what each of its
        starts is told."""
        folder = self.folder / f"server-{next(self._numbers)}"
        if like is None:
            folder.mkdir()
        else:
            shutil.copytree(like.folder, folder)
        return Server(self, folder, folder / "journal", changed)


@dataclass
class Server:
    """One server, which is started again and again with the same journal."""

    settling: Settling
    folder: Path
    journal: Path
    changed: dict[str, object]
    starts: list[Start] = field(default_factory=list)

    @property
    def plan_file(self) -> Path:
        return Path(f"{self.journal}.plan.json")

    def start(self, *, apart: bool = False, **job: object) -> Start:
        """`job`: see the program. A start here is over when this returns; one `apart`, in a process
        of its own, has begun."""
        runner = self.settling.program if apart else self.settling.here
        told = self.folder / f"start-{token_hex(4)}"
        before = self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0
        start = Start(runner, told, before)
        runner.start(told, **({"journal": str(self.journal)} | self.changed | job))
        self.starts.append(start)
        return start

    def killed(self, **job: object) -> Start:
        """A start in a process of its own that kills itself."""
        start = self.start(apart=True, **job)
        assert start.ended() == -signal.SIGKILL, start.lines()
        self.check_journal()
        return start

    def cut(self, records: int, torn: bytes = b"") -> None:
        """As if the start that wrote the next record had been killed at it, before it had written
        more of it than `torn`. The plan file comes between what is committed and the end."""
        lines = self.journal.read_bytes().splitlines(keepends=True)
        self.journal.write_bytes(b"".join(lines[:records]) + torn)
        wrote_plan = any(json.loads(line)["kind"] == "end" for line in lines[:records])
        if not wrote_plan and not (torn and json.loads(lines[records])["kind"] == "end"):
            self.plan_file.unlink(missing_ok=True)
        self.starts.clear()

    def boots(self, *, apart: bool = False, **job: object) -> Start:
        """A start that serves one request as it has to, and puts all back."""
        left = open_attempts(self.records())
        start = self.start(apart=apart, **job)
        if apart:
            assert start.ended() == 0, start.lines()
        self.check_journal()
        assert not open_attempts(self.records())
        crashes = {
            (each["run"], each["attempt"]) for each in self.records() if each["kind"] == "crash"
        }
        assert left <= crashes
        settled = start.settled
        retains = bool(settled["retained"])
        assert settled["status"] == ("committed" if retains else "baseline_only"), settled
        assert committed(self.run_of(start)) == retains, settled
        self.check_served(start)
        self.check_put_back(start)
        return start

    def raises(self, error: str, *, apart: bool = False, **job: object) -> dict[str, Any]:
        """A start that ends with an error, and puts all back. What was raised."""
        start = self.start(apart=apart, **job)
        if apart:
            assert start.ended() == 0, start.lines()
        (raised,) = start.all_of("raised")
        assert raised["error"] == error
        self.check_put_back(start)
        self.check_journal()
        return raised

    def check_served(self, start: Start) -> None:
        served = start.all_of("served")
        assert {each["image"] for each in served} == {self.settling.image}
        assert all(each["allocated"] > 0 for each in served)

    @staticmethod
    def check_put_back(start: Start) -> None:
        (back,) = start.all_of("put back")
        assert (back["differences"], back["allocated"]) == ([], 0)

    def records(self) -> list[Record]:
        """Of the whole lines: the last may be torn."""
        if not self.journal.exists():
            return []
        *lines, _ = self.journal.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines]

    def kinds(self) -> list[str]:
        return [each["kind"] for each in self.records()]

    def crashed(self) -> list[str]:
        """What is recorded as a crash: candidates as they are written down."""
        return [key(each) for each in self.records() if each["kind"] == "crash"]

    def run_of(self, start: Start) -> list[Record]:
        """What a start wrote; of the last one only, or of one that was over when the next began."""
        later = [each.records_before for each in self.starts if each is not start]
        until = min((n for n in later if n > start.records_before), default=None)
        return self.records()[start.records_before : until]

    def tried(self, start: Start) -> list[str]:
        """The candidates that a start announced."""
        return [key(each) for each in self.run_of(start) if each["kind"] == "intent"]

    def check_journal(self) -> None:
        """No record that was promised is lost, and no candidate that ended a process was announced
        after it."""
        lines = iter(self.journal.read_text().splitlines() if self.journal.exists() else [])
        for start in self.starts:
            for promised in start.all_of("appended"):
                assert promised["line"].strip() in lines, f"lost: {promised}"
        crashed: set[str] = set()
        for record in self.records():
            if record["kind"] == "crash":
                crashed.add(key(record))
            if record["kind"] == "intent":
                assert key(record) not in crashed, f"tried again: {record}"


def key(record: Record) -> str:
    """The candidate that a record is about. How often a component is called is no part of it."""
    uses = [
        {name: what for name, what in use.items() if name != "passes"}
        for use in record["candidate"]["uses"]
    ]
    return json.dumps(uses, sort_keys=True)


def said(record: Record) -> Record:
    """What a record says, whoever wrote it and when."""
    return {name: what for name, what in record.items() if name not in ("run", "process", "time")}


def open_attempts(records: Iterable[Record]) -> set[tuple[str, int]]:
    """Those that were announced and came to nothing, by run and number."""
    left: set[tuple[str, int]] = set()
    for record in records:
        at = record["run"], record["attempt"]
        refuted = record["kind"] == "verdict" and record["verdict"] != "accepted"
        if record["kind"] == "intent":
            left.add(at)
        elif refuted or record["kind"] in ("rolled_back", "committed", "crash"):
            left.discard(at)
    return left


def committed(records: Sequence[Record]) -> bool:
    """Whether the last that was said of a candidate is that it was committed."""
    kinds = [each["kind"] for each in records if each["kind"] not in ("begin", "end")]
    return kinds[-1:] == ["committed"]


def each_of(cases: Iterable[T], check: Callable[[T], None]) -> None:
    """`check` each, as many at once as there are processors: for starts apart alone, since one
    card is here."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
        done = [(case, pool.submit(check, case)) for case in cases]
        for case, each in done:
            if (error := each.exception()) is not None:
                raise AssertionError(f"{case}: {error}") from error
