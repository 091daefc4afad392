"""Text for stdout and stderr: with colour where that is wanted, and never cut off."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from ..offload.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 120
"""Columns where there is no terminal; more where a line needs more."""


def console(stream: TextIO) -> Console:
    """Takes text as it is: markup and emoji codes in a name or an error mean nothing."""
    from rich.console import Console

    return Console(
        file=stream,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


class _Page(io.StringIO):
    """Takes the text that is meant for `stream`, so that rich itself writes nothing there."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return self._stream.isatty()


def rendered(view: RenderableType, stream: TextIO) -> str:
    """`view` as `stream` should show it, with no blanks at the ends of lines."""
    page = _Page(stream)
    screen = console(page)
    if not stream.isatty():
        unlimited = screen.options.update(max_width=100_000)
        screen.width = max(WIDTH, screen.measure(view, options=unlimited).maximum)
    screen.print(view)
    return "\n".join(line.rstrip() for line in page.getvalue().split("\n"))


def show(view: RenderableType) -> None:
    text = rendered(view, sys.stdout)
    encoding = sys.stdout.encoding
    # A name that the terminal can't show is no reason to show nothing.
    write(text.encode(encoding, "backslashreplace").decode(encoding))


def write(text: str) -> None:
    """To stdout, at once, so that what goes wrong is noticed here.

    Raises BrokenPipeError where nobody reads on, InputError where stdout can't take the text.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise InputError(
            f"stdout can't be written: {error.strerror}", hint="free the disk that it goes to"
        ) from error
