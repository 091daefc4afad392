"""The `residency` program."""

from __future__ import annotations

from typing import Annotated

import typer

from .files import APPLY_EXIT_CODES, CHECK_EXIT_CODES, apply, check, explain, schema, show
from .machine import PROBE_EXIT_CODES, cards, probe
from .plan import plan
from .screen import EXIT_CODES, GroupedCommand

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=GroupedCommand, epilog=EXIT_CODES)(plan)
app.command(epilog=EXIT_CODES)(show)
app.command(epilog=EXIT_CODES)(explain)
app.command(epilog=CHECK_EXIT_CODES)(check)
app.command(epilog=APPLY_EXIT_CODES)(apply)
app.command(epilog=EXIT_CODES)(schema)
app.command(epilog=EXIT_CODES)(cards)
app.command(epilog=PROBE_EXIT_CODES)(probe)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"residency {version('residency')}")
        except PackageNotFoundError:
            typer.echo("residency (not installed)")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def residency(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Decide which model weights of a diffusion pipeline stay on the GPU between its phases."""


def main() -> None:
    app(prog_name="residency")


if __name__ == "__main__":
    main()
