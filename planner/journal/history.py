"""What a journal says that earlier starts came to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from ...phases.schedule import Schedule
from ..verdict import Verdict
from .record import JournalRecord, Kind


class State(Enum):
    """Of one attempt."""

    OPEN = auto()
    """It was announced, and nothing says how it ended."""
    UNDONE = auto()
    """It was rolled back and not refuted: whoever ended it may try it again."""
    REFUTED = auto()
    COMMITTED = auto()
    TAKEN_BACK = auto()
    """It was committed and rolled back later, for no fault of its own that is known."""
    CRASHED = auto()


@dataclass(slots=True)
class Attempt:
    """`records` are those of one run and number, in order."""

    records: list[JournalRecord]

    @property
    def candidate(self) -> Schedule:
        found = self.records[0].candidate
        assert found is not None
        return found

    @property
    def fingerprint(self) -> str:
        return self.records[0].fingerprint

    @property
    def state(self) -> State:
        state = State.OPEN
        for record in self.records:
            refutes = record.verdict not in (None, Verdict.ACCEPTED)
            match record.kind:
                case Kind.COMMITTED:
                    state = State.COMMITTED
                case Kind.CRASH:
                    state = State.CRASHED
                case Kind.VERDICT | Kind.ROLLED_BACK if refutes:
                    state = State.REFUTED
                case Kind.ROLLED_BACK if state in (State.COMMITTED, State.TAKEN_BACK):
                    state = State.TAKEN_BACK
                case Kind.ROLLED_BACK if state is not State.REFUTED:
                    state = State.UNDONE
        return state


@dataclass(frozen=True, slots=True)
class History:
    """What is known under one fingerprint. A candidate is in one place at most: where the last
    attempt left it that came to anything."""

    crashed: tuple[Schedule, ...] = ()
    """Never to be tried again: the process ended with them applied, or about to be."""
    refuted: tuple[Schedule, ...] = ()
    committed: Schedule | None = None
    """The last one that was committed and not taken back, refuted or crashed with since."""

    @classmethod
    def of(cls, records: Iterable[JournalRecord], fingerprint: str) -> History:
        """`fingerprint` is a digest."""
        crashed, refuted, committed = [], [], None
        for each in telling(records):
            if each.fingerprint != fingerprint:
                continue
            match each.state:
                case State.COMMITTED:
                    committed = each.candidate
                case State.REFUTED:
                    refuted.append(each.candidate)
                case State.OPEN | State.CRASHED:
                    crashed.append(each.candidate)
        return cls(tuple(crashed), tuple(refuted), committed)


def attempts(records: Iterable[JournalRecord]) -> list[Attempt]:
    """In the order of their last records."""
    found: dict[tuple[str, int], Attempt] = {}
    for record in records:
        if record.attempt is not None:
            at = (record.run, record.attempt)
            attempt = found[at] = found.pop(at, Attempt([]))
            attempt.records.append(record)
    return [*found.values()]


def telling(records: Iterable[JournalRecord]) -> list[Attempt]:
    """Of each candidate under each fingerprint, the last attempt that came to anything."""
    found: dict[tuple[str, str], Attempt] = {}
    for each in attempts(records):
        if each.state is not State.UNDONE:
            at = (each.fingerprint, each.candidate.key)
            found.pop(at, None)
            found[at] = each
    return [*found.values()]
