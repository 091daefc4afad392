"""The program run in this process, and a planner that answers it."""

from collections.abc import Callable
from dataclasses import dataclass

from residency.planner.dry_run import PlanRequest
from residency.planner.plan import Report
from residency.planner.verdict import Event, Listener, Step

Run = Callable[..., "Result"]


@dataclass(frozen=True)
class Result:
    code: object
    out: str
    err: str


@dataclass
class CannedService:
    """A planner that answers with `answer`, or raises it, and remembers what it was asked."""

    answer: Report | BaseException | None = None
    asked: PlanRequest | None = None
    meanwhile: Callable[[], object] = lambda: None
    """What happens to the world while the planner plans."""

    def plan(self, request: PlanRequest, listen: Listener) -> Report:
        self.asked = request
        self.meanwhile()
        for card in request.cards:
            listen(Event(Step.MEASURING, "measuring the baseline at 720x720", card.name))
        if isinstance(self.answer, BaseException):
            raise self.answer
        assert self.answer is not None
        return self.answer
