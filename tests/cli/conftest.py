import sys

import pytest
from canned_program import CannedService, Result, Run

import residency.planner.dry_run
from residency.cli.main import main


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


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> CannedService:
    canned = CannedService()
    monkeypatch.setattr(residency.planner.dry_run, "plan", canned.plan)
    return canned
