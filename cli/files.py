"""The commands on saved plan files: show, explain, check, apply and the schema; and `--out`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..offload.errors import DeviceError, InputError, UnknownNameError
from . import screen
from .arguments import select_cards
from .screen import TracebackOption, reported, shown_progress

if TYPE_CHECKING:
    from ..offload.cuda.nvml import Nvml
    from ..planner.plan import Report

NOT_HELD = 1

CHECK_EXIT_CODES = """\b
Exit codes:
  0    every plan of the file holds, as far as it was compared
  1    a plan is stale; the first difference is named
  2    bad input, cards that can't be listed, or a failure of residency itself
  130  interrupted
"""

APPLY_EXIT_CODES = """\b
Exit codes:
  0    every plan of the file was applied, and held in one sweep
  1    a plan doesn't hold any more; where it failed is said
  2    bad input, a stale plan, or a failure of residency itself
  130  interrupted
"""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_KINDS = ("plan", "journal")

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A file that --out wrote.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


def show(file: PlanFile, json: JsonOption = False, traceback: TracebackOption = False) -> None:
    """Show a plan that was saved with --out.

    The exit code is 0 whatever the plan says.
    """
    with reported(traceback):
        from ..planner.planfile import read_report
        from .render.plan import report_view

        report = read_report(file)
        if json:
            screen.write(report.to_json())
        else:
            screen.show(report_view(report))


def explain(
    file: PlanFile,
    json: Annotated[bool, typer.Option("--json", help="Print the explanations as JSON.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Explain a plan that was saved with --out.

    Which phase binds, what kept each component from being retained whole, what more memory would
    buy, and what the user's own settings cost.

    The exit code is 0 whatever the plan says.
    """
    with reported(traceback):
        from ..planner.planfile import read_report
        from .render.explanation import explanation_view

        report = read_report(file)
        if json:
            screen.write(_explanations(report))
        else:
            screen.show(explanation_view(report))


def _explanations(report: Report) -> str:
    explanations = [
        {
            "card": plan.card,
            "capacity_bytes": plan.capacity_bytes,
            "explanation": plan.explanation and plan.explanation.model_dump(mode="json"),
        }
        for plan in report.plans
    ]
    document = report.model_dump(mode="json", exclude={"plans"}) | {"explanations": explanations}
    return _to_json(document)


def check(
    file: PlanFile,
    pipeline: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Also build this family of pipelines, and compare it."),
    ] = None,
    card: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="With --pipeline: the card to simulate; repeatable."),
    ] = None,
    capacity: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="With --pipeline: that card's, or any other card's."),
    ] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="With --pipeline: the family's tiny config.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the check as JSON.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Check whether a plan that was saved with --out still holds.

    Without --pipeline, what can be told without one: that the card is in this machine, and that
    the driver, PyTorch and the libraries are those that it was planned with. A plan for a
    simulated card has no driver, and its card is always there. With --pipeline, a simulated plan
    is compared with the pipeline as it is built now.
    """
    with reported(traceback):
        from ..planner.planfile import read_report

        if pipeline is None and (card or capacity or tiny):
            raise InputError(
                "--card, --capacity and --tiny are for a pipeline, and none is named",
                hint="add --pipeline, or leave them out",
            )
        cards = select_cards(card or [], capacity) if card or capacity else ()
        report = read_report(file)

        from ..planner import planfile
        from .render.files import check_view

        if pipeline is None:
            found = planfile.check_machine(report, _ThisMachine())
        else:
            found = planfile.check_pipeline(report, pipeline, cards, tiny=tiny)
        if json:
            screen.write(found.model_dump_json(indent=2) + "\n")
        else:
            screen.show(check_view(found))
    if not found.holds:
        raise typer.Exit(NOT_HELD)


class _ThisMachine:
    """Asks NVML, and that only where there is something to ask."""

    def driver(self) -> str | None:
        driver, _ = self._nvml().ask(("nvmlSystemGetDriverVersion",))
        return driver.decode() if isinstance(driver, bytes) else driver

    def has_card(self, uuid: str) -> bool:
        return self._nvml().card(uuid).facts.missing is None

    def _nvml(self) -> Nvml:
        from ..offload.cuda.nvml import Nvml

        found = Nvml()
        if found.absence is not None:
            raise DeviceError(
                f"the cards of this machine can't be listed: {found.absence}",
                hint="check the plan on the machine that it is for",
            )
        return found


def apply(
    file: PlanFile,
    device: Annotated[
        str | None,
        typer.Option(metavar="cuda[:N]", help="The card of this machine that a plan is for."),
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The plan is for the tiny config.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Apply a saved plan and sweep it once, at the largest shapes that it is for.

    Nothing is searched for, and everything is put back: a server does the same at its startup,
    and keeps it (`residency.planner.settle` with the plan). A plan whose card, software, pipeline
    or declarations are others by now is refused with the first difference.
    """
    with reported(traceback):
        with shown_progress() as listen:
            from ..planner.dry_run import apply_plans

            applied = apply_plans(file, device=device, tiny=tiny, listen=listen)

        from .render.files import applied_view

        screen.show(applied_view(applied))
    if not all(each.holds for each in applied):
        raise typer.Exit(NOT_HELD)


def schema(
    of: Annotated[
        str,
        typer.Argument(metavar="[plan|journal]", help="The plan file, or a line of the journal."),
    ] = "plan",
    traceback: TracebackOption = False,
) -> None:
    """Print the JSON schema of the plan file, or of a record of the journal.

    Each field says what it means.
    """
    with reported(traceback):
        if of not in _KINDS:
            raise UnknownNameError("schema", of, _KINDS)
        if of == "journal":
            from ..planner.journal.record import JournalRecord

            described = JournalRecord.model_json_schema(mode="serialization")
        else:
            from ..planner.plan import Report

            described = Report.model_json_schema(mode="serialization")
        screen.write(_to_json({"$schema": _DIALECT} | described))


def _to_json(document: dict[str, object]) -> str:
    from json import dumps

    return dumps(document, indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True, slots=True)
class Destination:
    """The file that `--out` names: whole or untouched, whenever the program ends."""

    path: Path

    def check(self) -> None:
        """Raises InputError where it is plain beforehand that `write` would fail."""
        target = self._target
        directory = target.parent
        if target.exists() and not target.is_file():
            raise InputError(f"--out {self.path} is no file", hint="name a file, such as plan.json")
        if not directory.is_dir():
            raise InputError(
                f"--out {self.path} can't be written: there is no directory {directory}",
                hint="make the directory, or name another",
            )
        if not os.access(directory, os.W_OK | os.X_OK):
            raise InputError(
                f"--out {self.path} can't be written: {directory} may not be written to",
                hint="name a file in another directory",
            )

    def write(self, text: str) -> None:
        """Raises InputError."""
        from ..offload.file import replace_file

        try:
            replace_file(self.path, text.encode())
        except OSError as error:
            raise InputError(
                f"--out {self.path} can't be written: {error.strerror}",
                hint="free the disk, or name a file in another directory",
            ) from error

    @property
    def _target(self) -> Path:
        """Links are followed, as they are in writing."""
        return Path(os.path.realpath(self.path))
