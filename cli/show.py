"""`residency show`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .faults import TracebackOption, reported


def show(
    file: Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A file that --out wrote.")],
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Show a plan that was saved with --out.

    The exit code is 0 whatever the plan says.
    """
    with reported(traceback):
        from ..planner.report import Report
        from . import screen
        from .render.report import report_view

        report = Report.read(file)
        if json:
            screen.write(report.to_json())
        else:
            screen.show(report_view(report))
