"""Starts of one server after another, in processes of their own, and what must hold after each."""

from __future__ import annotations

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
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from residency.planner.journal.record import JournalRecord, Kind

T = TypeVar("T")

PROGRAM = Path(__file__).with_name("settling_program.py")
ENDS_S = 130
"""Longer than the program lets a start live."""


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

    def start(self, told: Path, **job: object) -> Start:
        pipe = self._process.stdin
        assert pipe is not None
        with self._lock:
            pipe.write(json.dumps({"told": str(told), **job}) + "\n")
            pipe.flush()
        return Start(self, told)

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
    program: Program
    told: Path

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
    def settling_s(self) -> float:
        """How long it took until it was settled."""
        lasted: float = self.settled["at"] - self.wait_for("begun")["at"]
        return lasted

    @property
    def settled(self) -> dict[str, Any]:
        (settled,) = self.all_of("settled")
        return settled


class Settling:
    """Makes servers. Each is started by the same program."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program = program
        self.folder = folder
        self._numbers = count(1)
        start = program.start(folder / "told", mode="off")
        assert start.ended() == 0, start.lines()
        self.image: str = start.all_of("served")[0]["image"]

    def server(self, *, like: Server | None = None, **changed: object) -> Server:
        """A new one, or one with the journal and the plan of another. `changed` is what each of its
        starts is told."""
        folder = self.folder / f"server-{next(self._numbers)}"
        if like is None:
            folder.mkdir()
        else:
            shutil.copytree(like.folder, folder)
        return Server(self.program, folder, folder / "journal", self.image, changed)


@dataclass
class Server:
    """One server, which is started again and again with the same journal."""

    program: Program
    folder: Path
    journal: Path
    image: str
    """What it has to serve."""
    changed: dict[str, object]
    starts: list[Start] = field(default_factory=list)

    def start(self, **job: object) -> Start:
        """`job`: see the program."""
        told = self.folder / f"start-{token_hex(4)}"
        start = self.program.start(told, **({"journal": str(self.journal)} | self.changed | job))
        self.starts.append(start)
        return start

    def killed(self, **job: object) -> Start:
        """A start that kills itself."""
        start = self.start(**job)
        assert start.ended() == -signal.SIGKILL, start.lines()
        self.check_journal()
        return start

    def boots(self, **job: object) -> Start:
        """A start that serves one request as it has to, and puts all back."""
        left = open_attempts(self.records())
        start = self.start(**job)
        assert start.ended() == 0, start.lines()
        self.check_journal()
        assert not open_attempts(self.records())
        crashes = [each for each in self.records() if each.kind is Kind.CRASH]
        assert left <= {(each.run, each.attempt) for each in crashes}
        settled = start.settled
        retains = bool(settled["retained"])
        assert settled["status"] == ("committed" if retains else "baseline_only"), settled
        assert committed(self.run_of(start)) == retains, settled
        served = start.all_of("served")
        assert {each["image"] for each in served} == {self.image}
        assert all(each["allocated"] > 0 for each in served)
        self.check_put_back(start)
        return start

    def raises(self, error: str, **job: object) -> dict[str, Any]:
        """A start that ends with an error, and puts all back. What was raised."""
        start = self.start(**job)
        assert start.ended() == 0, start.lines()
        (raised,) = start.all_of("raised")
        assert raised["error"] == error
        self.check_put_back(start)
        self.check_journal()
        return raised

    @staticmethod
    def check_put_back(start: Start) -> None:
        (back,) = start.all_of("put back")
        assert (back["differences"], back["allocated"]) == ([], 0)

    def records(self) -> list[JournalRecord]:
        """Of the whole lines: the last may be torn."""
        if not self.journal.exists():
            return []
        *lines, _ = self.journal.read_bytes().split(b"\n")
        return [JournalRecord.model_validate_json(line) for line in lines]

    def kinds(self) -> list[str]:
        return [each.kind for each in self.records()]

    def crashed(self) -> set[str]:
        """The keys of candidates that are recorded as crashes."""
        return {each.candidate.key for each in self.records() if each.kind is Kind.CRASH}

    def run_of(self, start: Start) -> list[JournalRecord]:
        """What a start wrote."""
        pid = start.wait_for("begun")["pid"]
        return [each for each in self.records() if each.process.pid == pid]

    def tried(self, start: Start) -> list[str]:
        """The candidates that a start announced, by their keys."""
        records = self.run_of(start)
        return [each.candidate.key for each in records if each.kind is Kind.INTENT]

    def check_journal(self) -> None:
        """No record that was promised is lost, and no candidate that ended a process was announced
        after it."""
        lines = iter(self.journal.read_text().splitlines() if self.journal.exists() else [])
        for start in self.starts:
            for promised in start.all_of("appended"):
                assert promised["line"].strip() in lines, f"lost: {promised}"
        crashed: set[str] = set()
        for record in self.records():
            if record.kind is Kind.CRASH:
                crashed.add(record.candidate.key)
            if record.kind is Kind.INTENT:
                assert record.candidate.key not in crashed, f"tried again: {record}"


def open_attempts(records: Iterable[JournalRecord]) -> set[tuple[str, int]]:
    """Those that were announced and came to nothing, by run and number."""
    left: set[tuple[str, int]] = set()
    for record in records:
        at = record.run, record.attempt
        refuted = record.kind is Kind.VERDICT and record.verdict != "accepted"
        if record.kind is Kind.INTENT:
            left.add(at)
        elif refuted or record.kind in (Kind.ROLLED_BACK, Kind.COMMITTED, Kind.CRASH):
            left.discard(at)
    return left


def committed(records: Sequence[JournalRecord]) -> bool:
    """Whether the last that was said of a candidate is that it was committed."""
    kinds = [each.kind for each in records if each.kind not in (Kind.BEGIN, Kind.END)]
    return kinds[-1:] == [Kind.COMMITTED]


def each_of(cases: Iterable[T], check: Callable[[T], None]) -> None:
    """`check` each, as many at once as there are processors."""
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool:
        done = [(case, pool.submit(check, case)) for case in cases]
        for case, each in done:
            if (error := each.exception()) is not None:
                raise AssertionError(f"{case}: {error}") from error
