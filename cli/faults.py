"""What a person sees when a command fails, and with which exit code it ends."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from ..offload.errors import BaselineError, ResidencyError
from .screen import console

DOES_NOT_FIT = 1
FAILED = 2
PIPE_CLOSED = 141
"""As a shell reports a program that SIGPIPE ended."""

EXIT_CODES = """\b
Exit codes:
  0    done: a plan for every card, even where it is to retain nothing
  1    the pipeline doesn't fit at least one card with nothing retained; the phase, the
       shape and the missing bytes are named
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
