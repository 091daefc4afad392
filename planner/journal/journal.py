"""The journal: what the planner is about to do, on disk before it is done.

A file of JSON lines, a record a line, which is only appended to. Several processes may write it:
each record is appended under the lock of a file beside it, `<name>.lock`. A start costs about half
a KB, and four or five records of about 1 KB for each candidate that it tries.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from filelock import FileLock, Timeout
from pydantic import ValidationError

from ...offload.errors import JournalError
from ...offload.file import replace_file, sync_folder, write_all
from ...phases.schedule import Schedule
from ..fingerprint import Fingerprint
from ..verdict import Judgement, Verdict
from .history import Attempt, History, State, attempts, telling
from .record import FORMAT_VERSION, JournalRecord, Kind, ProcessRecord

MAX_BYTES = 4 << 20
LOCK_TIMEOUT_S = 10.0
"""A lock is held while one record is written, or the file is read once."""

_HEAD = b'{"format_version":%d,' % FORMAT_VERSION
_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


class Journal:
    """`open` it. All methods raise JournalError where the file can't be read or written; what was
    to be appended isn't there then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        """What was wrong with the file, for the server's log."""

    @classmethod
    def open(cls, path: Path, *, max_bytes: int = MAX_BYTES) -> Journal:
        """The journal at `path`, made with its parents where it isn't there.

        A last line that was torn is cut off. A file that is damaged otherwise, or of another
        format version, is set aside as `<name>.corrupt-<time>`, with a warning, and a new one
        begun. One of more than `max_bytes` is rewritten with what `history` is made of.
        """
        journal = cls(Path(os.path.realpath(path)))
        with journal._locked("opened"):
            records = journal._load()
            if journal.path.stat().st_size > max_bytes:
                lasting = (record for each in telling(records) for record in each.records)
                replace_file(journal.path, b"".join(map(JournalRecord.to_line, lasting)))
        return journal

    def records(self) -> tuple[JournalRecord, ...]:
        with self._locked("read"):
            return self._load()

    def history(self, fingerprint: str) -> History:
        """What runs under the fingerprint of this digest have come to."""
        return History.of(self.records(), fingerprint)

    def begin(self, fingerprint: Fingerprint) -> Run:
        """A run of the planner. What runs under the same fingerprint left open is recorded as a
        crash first: whoever begins holds the card's lock, so none of them goes on."""
        digest = fingerprint.digest
        for left in attempts(self.records()):
            if left.fingerprint == digest and left.state is State.OPEN:
                self.append(_crash(left))
        run = Run(self, digest, self.history(digest))
        run.begin()
        return run

    def append(self, record: JournalRecord) -> None:
        """The record is durable when this returns."""
        with self._locked("written"):
            if not _is_whole(self.path):
                self._load()
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | _FLAGS)
            try:
                size = os.fstat(file).st_size
                try:
                    write_all(file, record.to_line())
                    os.fsync(file)
                except BaseException:
                    # What can't be cut off here is a torn line, and cut off before the next one.
                    with suppress(OSError):
                        os.ftruncate(file, size)
                    raise
            finally:
                os.close(file)

    @contextmanager
    def _locked(self, done: str) -> Iterator[None]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=LOCK_TIMEOUT_S):
                yield
        except Timeout as error:
            why = f"{error.lock_file} was held by another process for {LOCK_TIMEOUT_S:.0f} s"
            raise self._error(done, why) from error
        except OSError as error:
            raise self._error(done, error.strerror or str(error)) from error

    def _error(self, done: str, why: str) -> JournalError:
        return JournalError(
            f"the journal {self.path} can't be {done}: {why}",
            hint="name a journal in another place, or plan without one",
        )

    def _load(self) -> tuple[JournalRecord, ...]:
        """Inside the lock. Raises OSError."""
        if self.path.exists() and not self.path.is_file():
            raise self._error("read", "it is no file")
        if not self.path.exists():
            self._create()
        data = self.path.read_bytes()
        try:
            records, whole_bytes = read_records(data)
        except ValueError as damage:
            self._set_aside(str(damage))
            return ()
        if whole_bytes < len(data):
            os.truncate(self.path, whole_bytes)
            torn = len(data) - whole_bytes
            self.warnings.append(f"{self.path}: {torn} bytes of a torn last line were cut off")
        return records

    def _create(self) -> None:
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | _FLAGS, 0o666))
        sync_folder(self.path.parent)

    def _set_aside(self, damage: str) -> None:
        name = f"{self.path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        aside = self.path.with_name(name)
        number = 1
        while aside.exists():
            number += 1
            aside = self.path.with_name(f"{name}-{number}")
        self.path.rename(aside)
        self._create()
        self.warnings.append(
            f"{self.path} is no journal that can be read ({damage}): it was set aside as "
            f"{aside.name}, and what earlier starts came to isn't known"
        )


def read_records(data: bytes) -> tuple[tuple[JournalRecord, ...], int]:
    """The records, and the bytes that they take: what is behind them is a torn line.

    Raises ValueError where something else than a torn last line is wrong.
    """
    *lines, tail = data.split(b"\n")
    records: list[JournalRecord] = []
    whole_bytes = 0
    for number, line in enumerate(lines, 1):
        try:
            records.append(JournalRecord.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            is_last = number == len(lines) and not tail
            if is_last and records and first["type"] == "json_invalid":
                break
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"line {number}: {where or 'JSON'}: {first['msg']}") from error
        whole_bytes += len(line) + 1
    if tail and not records and not (tail.startswith(_HEAD) or _HEAD.startswith(tail)):
        raise ValueError("line 1 doesn't begin as a record does")
    return tuple(records), whole_bytes


def _is_whole(path: Path) -> bool:
    """Whether the file is there, and ends as it does behind a record."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return True
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"
    except FileNotFoundError:
        return False


def _crash(left: Attempt) -> JournalRecord:
    last = left.records[-1]
    return last.model_copy(
        update={
            "kind": Kind.CRASH,
            "verdict": Verdict.CRASH,
            "detail": f"process {last.process.pid} on {last.process.host} ended after "
            f"{last.kind} at {last.time:%Y-%m-%d %H:%M:%S} UTC",
            "process": ProcessRecord.current(),
            "time": datetime.now(UTC),
        }
    )


@dataclass(slots=True)
class Run:
    """One run of the planner. Each method returns when its record is durable; all raise
    JournalError, and then the step that the record announces must not be taken."""

    journal: Journal
    fingerprint: str
    """A digest."""
    history: History
    """What was known when the run began."""
    name: str = field(default_factory=lambda: token_hex(6))
    _candidates: dict[int, Schedule] = field(default_factory=dict)

    def begin(self) -> None:
        self._write(Kind.BEGIN, None)

    def intent(self, attempt: int, candidate: Schedule) -> None:
        """`attempt` counts the candidates of the run, from 1; the other methods name it again."""
        assert attempt not in self._candidates, f"attempt {attempt} is announced twice"
        self._candidates[attempt] = candidate
        self._write(Kind.INTENT, attempt)

    def applied(self, attempt: int) -> None:
        self._write(Kind.APPLIED, attempt)

    def verdict(self, attempt: int, verdict: Verdict, detail: str | None = None) -> None:
        self._write(Kind.VERDICT, attempt, verdict, detail)

    def committed(self, attempt: int, detail: str | None = None) -> None:
        self._write(Kind.COMMITTED, attempt, None, detail)

    def rolled_back(
        self, attempt: int, verdict: Verdict | None = None, detail: str | None = None
    ) -> None:
        """Behind a commit this takes it back; with a verdict, it refutes the candidate as well."""
        self._write(Kind.ROLLED_BACK, attempt, verdict, detail)

    def crashed(self, attempt: int, detail: str) -> None:
        """For a candidate that ended another process than this one."""
        self._write(Kind.CRASH, attempt, Verdict.CRASH, detail)

    def close(self) -> None:
        """The run is over; what it committed stays committed."""
        self._write(Kind.END, None)

    def _write(
        self,
        kind: Kind,
        attempt: int | None,
        verdict: Verdict | None = None,
        detail: str | None = None,
    ) -> None:
        self.journal.append(
            JournalRecord(
                format_version=FORMAT_VERSION,
                kind=kind,
                run=self.name,
                attempt=attempt,
                fingerprint=self.fingerprint,
                candidate=None if attempt is None else self._candidates[attempt],
                verdict=verdict,
                detail=detail,
                process=ProcessRecord.current(),
                time=datetime.now(UTC),
            )
        )


class Log:
    """This one forgets. Each call returns when what it says is safe, or raises what kept it from
    being so; then the step that it announces isn't taken."""

    def intent(self, candidate: Schedule) -> None: ...

    def applied(self) -> None: ...

    def verdict(self, judgement: Judgement) -> None: ...

    def rolled_back(self) -> None: ...

    def committed(self) -> None: ...


class JournalLog(Log):
    """Of one run. Raises JournalError; what it was to announce must not be done then."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._attempt = 0
        self.is_committed = False

    def intent(self, candidate: Schedule) -> None:
        self._attempt += 1
        self.run.intent(self._attempt, candidate)

    def applied(self) -> None:
        self.run.applied(self._attempt)

    def verdict(self, judgement: Judgement) -> None:
        # What a neighbour caused, or another rank refused, isn't held against the candidate.
        if judgement.neighbour_bytes == 0 and judgement.rank is None:
            self.run.verdict(self._attempt, judgement.verdict, judgement.detail)

    def rolled_back(self) -> None:
        self.run.rolled_back(self._attempt)
        self.is_committed = False

    def committed(self) -> None:
        self.run.committed(self._attempt)
        self.is_committed = True

    def taken_back(self, verdict: Verdict, detail: str) -> None:
        """What was committed is given up: the next start searches."""
        if self.is_committed:
            self.run.rolled_back(self._attempt, verdict, detail)
            self.is_committed = False
