"""Progress of a planning run, on stderr: a status line on a terminal, else a line an event."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from .screen import console

if TYPE_CHECKING:
    from ..planner.request import Listener, Progress


@contextmanager
def shown_progress() -> Iterator[Listener]:
    from rich.text import Text

    screen = console(sys.stderr)
    if screen.is_terminal and not screen.is_dumb_terminal:
        with screen.status(Text("starting")) as status:
            yield lambda progress: status.update(Text(_line(progress)))
    else:
        yield _print_line


def _print_line(progress: Progress) -> None:
    # Nobody reads on: that is no reason to stop planning halfway.
    with suppress(BrokenPipeError):
        print(_line(progress), file=sys.stderr, flush=True)


def _line(progress: Progress) -> str:
    return f"{progress.card}: {progress.doing}"
