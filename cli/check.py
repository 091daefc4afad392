"""`residency check`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..offload.errors import DeviceError, InputError
from .faults import TracebackOption, reported
from .selection import select_cards

if TYPE_CHECKING:
    from ..offload.cuda.nvml import Nvml
    from ..planner.planfile.check import Check
    from ..planner.report import Report

STALE = 1

EXIT_CODES = """\b
Exit codes:
  0    every plan of the file holds, as far as it was compared
  1    a plan is stale; the first difference is named
  2    bad input, cards that can't be listed, or a failure of residency itself
  130  interrupted
"""


def check(
    file: Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A file that --out wrote.")],
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
        from ..planner.report import Report
        from . import screen
        from .render.check import check_view

        if pipeline is None and (card or capacity or tiny):
            raise InputError(
                "--card, --capacity and --tiny are for a pipeline, and none is named",
                hint="add --pipeline, or leave them out",
            )
        cards = select_cards(card or [], capacity) if card or capacity else ()
        report = Report.read(file)
        if pipeline is None:
            found = _check_machine(report)
        else:
            from ..planner.planfile.rebuild import check_pipeline

            found = check_pipeline(report, pipeline, cards, tiny=tiny)
        if json:
            screen.write(found.model_dump_json(indent=2) + "\n")
        else:
            screen.show(check_view(found))
    if not found.holds:
        raise typer.Exit(STALE)


def _check_machine(report: Report) -> Check:
    from ..planner.planfile.check import check_machine

    return check_machine(report, _ThisMachine())


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
