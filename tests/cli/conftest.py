import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import residency.planner
from residency.cli.main import main
from residency.planner.report import Report
from residency.planner.request import Listener, PlanRequest, Progress

Run = Callable[..., "Result"]


@dataclass(frozen=True)
class Result:
    code: object
    out: str
    err: str


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "RESIDENCY_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the program with these arguments, in this process."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["residency", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            main()
        return Result(exit.value.code, *capsys.readouterr())

    return run


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
            listen(Progress(card.name, "measuring the baseline at 720x720"))
        if isinstance(self.answer, BaseException):
            raise self.answer
        assert self.answer is not None
        return self.answer


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> CannedService:
    canned = CannedService()
    monkeypatch.setattr(
        residency.planner, "service", SimpleNamespace(plan=canned.plan), raising=False
    )
    return canned
