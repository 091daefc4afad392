"""Where the loop writes down what it is about to do, before it does it."""

from __future__ import annotations

from ..validation import Judgement
from .record import CandidateRecord


class Log:
    """This one forgets. Each call returns when what it says is safe, or raises what kept it from
    being so; then the step that it announces isn't taken."""

    def intent(self, candidate: CandidateRecord) -> None: ...

    def applied(self) -> None: ...

    def verdict(self, judgement: Judgement) -> None: ...

    def rolled_back(self) -> None: ...

    def committed(self) -> None: ...
