"""The `residency` program."""

from __future__ import annotations

from typing import Annotated

import typer

from .cards import cards
from .explain import explain
from .faults import EXIT_CODES
from .plan import plan
from .show import show

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=EXIT_CODES)(plan)
app.command(epilog=EXIT_CODES)(show)
app.command(epilog=EXIT_CODES)(explain)
app.command(epilog=EXIT_CODES)(cards)


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
