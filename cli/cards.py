"""`residency cards`"""

from __future__ import annotations

from .faults import TracebackOption, reported


def cards(traceback: TracebackOption = False) -> None:
    """List the cards that can be simulated."""
    with reported(traceback):
        from ..offload.cards import CARDS
        from .render.cards import cards_view
        from .screen import show

        show(cards_view(CARDS.values()))
