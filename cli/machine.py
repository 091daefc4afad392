"""`residency probe` and `residency cards`: this machine, and the cards of the catalogue."""

from __future__ import annotations

from typing import Annotated

import typer

from . import screen
from .screen import TracebackOption, reported

PROBE_EXIT_CODES = """\b
Exit codes:
  0    done, whatever the machine says; also where it has no card
  2    a card was named that isn't there or can't be read, or a failure of residency itself
  130  interrupted
"""


def probe(
    device: Annotated[
        str | None,
        typer.Option(metavar="cuda:N", help="One card. Without: all that this process sees."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON.")] = False,
    traceback: TracebackOption = False,
) -> None:
    """Show what this machine says of its cards and its memory, where each figure is from, what
    contradicts and what is assumed."""
    with reported(traceback):
        from .render.machine import machine_view
        from .survey import survey

        machine = survey(device)
        if json:
            screen.write(machine.to_json())
        else:
            screen.show(machine_view(machine))


def cards(traceback: TracebackOption = False) -> None:
    """List the cards that can be simulated."""
    with reported(traceback):
        from ..offload.cards import CARDS
        from .render.machine import cards_view

        screen.show(cards_view(CARDS.values()))
