"""What the loop does, in the journal."""

from __future__ import annotations

from ..plan import Verdict
from ..validation import Judgement
from .journal import Run
from .log import Log
from .record import CandidateRecord


class JournalLog(Log):
    """Of one run. Raises JournalError; what it was to announce must not be done then."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._attempt = 0
        self.is_committed = False

    def intent(self, candidate: CandidateRecord) -> None:
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
