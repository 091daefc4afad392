"""What a person sees of a command: text on stdout and stderr, its help, progress, how it fails."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from typer.core import TyperCommand

from ..offload.errors import BaselineError, InputError, ResidencyError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ..planner.verdict import Event, Listener

WIDTH = 120
"""Columns where there is no terminal; more where a line needs more."""

DOES_NOT_FIT = 1
FAILED = 2
PIPE_CLOSED = 141
"""As a shell reports a program that SIGPIPE ended."""

EXIT_CODES = """\b
Exit codes:
  0    done: a plan for every card, even where it is to retain nothing
  1    the pipeline doesn't fit at least one card with nothing retained; the
       phase, the shape and the missing bytes are named
  2    bad input, or a failure of residency itself
  130  interrupted
"""

TracebackOption = Annotated[
    bool,
    typer.Option(
        "--traceback",
        envvar="RESIDENCY_TRACEBACK",
        help="Show Python's traceback when something fails.",
    ),
]


class GroupedCommand(TyperCommand):
    """Its help has a section for each `rich_help_panel`; typer's own heeds these in boxes only,
    where the lines of the text and of the exit codes are folded anew."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        rest: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            named = "Arguments" if param.param_type_name == "argument" else None
            panel = getattr(param, "rich_help_panel", None) or named
            (sections.setdefault(panel, []) if panel else rest).append(record)
        for title, records in {**sections, "Options": rest}.items():
            with formatter.section(title):
                formatter.write_dl(records)


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


@contextmanager
def shown_progress() -> Iterator[Listener]:
    from rich.text import Text

    screen = console(sys.stderr)
    if screen.is_terminal and not screen.is_dumb_terminal:
        with screen.status(Text("starting")) as status:
            yield lambda event: status.update(Text(_line(event)))
    else:
        yield _print_line


def _print_line(event: Event) -> None:
    # Nobody reads on: that is no reason to stop planning halfway.
    with suppress(BrokenPipeError):
        print(_line(event), file=sys.stderr, flush=True)


def _line(event: Event) -> str:
    return f"{event.card}: {event.doing}"


def say_error(message: str, hint: str | None = None) -> None:
    """`error:` and `hint:` lines on stderr."""
    from rich.text import Text

    screen = console(sys.stderr)
    screen.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)
    for line in (hint or "").splitlines():
        screen.print(Text.assemble(("hint: ", "bold cyan"), line), soft_wrap=True)


@contextmanager
def reported(show_traceback: bool) -> Iterator[None]:
    """Makes an error in the block into a message and an exit code. An interrupt passes through."""
    try:
        yield
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and would complain of the closed pipe there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(PIPE_CLOSED) from None
    except ResidencyError as error:
        if show_traceback:
            traceback.print_exc()
        say_error(error.message, error.hint)
        code = DOES_NOT_FIT if isinstance(error, BaselineError) else FAILED
        raise typer.Exit(code) from None
    except Exception as error:
        if show_traceback:
            traceback.print_exc()
        first, *_ = str(error).splitlines() or [""]
        say_error(
            f"{type(error).__name__}: {first} (this is a fault of residency)",
            None if show_traceback else "--traceback shows where; please report it",
        )
        raise typer.Exit(FAILED) from None
