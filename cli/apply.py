"""`residency apply`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .faults import TracebackOption, reported

if TYPE_CHECKING:
    from ..planner.planfile.apply import Applied

REFUTED = 1

EXIT_CODES = """\b
Exit codes:
  0    every plan of the file was applied, and held in one sweep
  1    a plan doesn't hold any more; where it failed is said
  2    bad input, a stale plan, or a failure of residency itself
  130  interrupted
"""


def apply(
    file: Annotated[Path, typer.Argument(metavar="PLAN.JSON", help="A file that --out wrote.")],
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
        from .progress import shown_progress

        with shown_progress() as listen:
            from ..planner.planfile.apply import apply_plans

            applied = apply_plans(file, device=device, tiny=tiny, listen=listen)
        _print(applied)
    if not all(each.holds for each in applied):
        raise typer.Exit(REFUTED)


def _print(applied: tuple[Applied, ...]) -> None:
    from . import screen
    from .render.applied import applied_view

    screen.show(applied_view(applied))
