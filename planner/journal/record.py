"""What the journal says of a candidate, of each step that is taken with it, and of the process that
wrote it down."""

from __future__ import annotations

import os
import socket
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Literal, Self

import psutil
from pydantic import AwareDatetime, model_validator

from ...phases.schedule import Schedule, Value
from ..verdict import Verdict

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessRecord(Value):
    pid: int
    host: str
    boot: str
    """Of the host's kernel, since after a reboot a number means another process."""

    @classmethod
    def current(cls) -> ProcessRecord:
        return cls(pid=os.getpid(), host=socket.gethostname(), boot=_boot())

    @property
    def may_be_alive(self) -> bool:
        """False only where it is known to have ended. A number that was given to another process
        since then, and a process of another host, may be alive."""
        if self.host != socket.gethostname():
            return True
        return self.boot == _boot() and psutil.pid_exists(self.pid)


@cache
def _boot() -> str:
    """The kernel's own name for this boot; elsewhere than on Linux the second in which it began."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return str(round(psutil.boot_time()))


FORMAT_VERSION: Literal[2] = 2


class Kind(StrEnum):
    """Each is durable before what it announces is done, or tells what has been done."""

    BEGIN = "begin"
    """A run of the planner starts."""
    INTENT = "intent"
    """A candidate is about to be applied."""
    APPLIED = "applied"
    """It is applied, and is about to be validated."""
    VERDICT = "verdict"
    """What validation said of it."""
    COMMITTED = "committed"
    """It was accepted, and stays applied."""
    ROLLED_BACK = "rolled_back"
    """The pipeline is back at its baseline; behind a commit, the commit is taken back."""
    CRASH = "crash"
    """A later run found that the process ended between intent and end."""
    END = "end"
    """The run is over, in good order."""


class JournalRecord(Value):
    """One line of the journal."""

    format_version: Literal[2]
    kind: Kind
    run: str
    """Names the planner's run that this is about."""
    attempt: int | None
    """Counts the candidates that a run tries, from 1; None where it is about the run itself."""
    fingerprint: str
    """The digest of the fingerprint that the run was made under."""
    candidate: Schedule | None
    """None where the record is about the run itself."""
    verdict: Verdict | None
    """With `verdict`, and with a commit that is taken back because of it."""
    detail: str | None
    """For people."""
    process: ProcessRecord
    """Who wrote this."""
    time: AwareDatetime
    """When, in UTC. Records are in the order of the file, whatever their times."""

    @model_validator(mode="after")
    def _is_of_a_run_or_an_attempt(self) -> Self:
        of_run = self.kind in (Kind.BEGIN, Kind.END)
        if (self.attempt is None) != of_run or (self.candidate is None) != of_run:
            raise ValueError(f"{self.kind} with attempt {self.attempt} and such a candidate")
        return self

    def to_line(self) -> bytes:
        return self.model_dump_json().encode() + b"\n"
