"""`residency explain`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .faults import TracebackOption, reported

if TYPE_CHECKING:
    from ..planner.report import Report


def explain(
    file: Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A file that --out wrote.")],
    json: Annotated[bool, typer.Option("--json", help="Print the explanations as JSON.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Explain a plan that was saved with --out.

    Which phase binds, what kept each component from being retained whole, what more memory would
    buy, and what the user's own settings cost.

    The exit code is 0 whatever the plan says.
    """
    with reported(traceback):
        from ..planner.report import Report
        from . import screen
        from .render.explanation import explanation_view

        report = Report.read(file)
        if json:
            screen.write(_to_json(report))
        else:
            screen.show(explanation_view(report))


def _to_json(report: Report) -> str:
    from json import dumps

    explanations = [
        {
            "card": plan.card,
            "capacity_bytes": plan.capacity_bytes,
            "explanation": plan.explanation and plan.explanation.model_dump(mode="json"),
        }
        for plan in report.plans
    ]
    document = report.model_dump(mode="json", exclude={"plans"}) | {"explanations": explanations}
    return dumps(document, indent=2, ensure_ascii=False) + "\n"
