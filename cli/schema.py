"""`residency schema`"""

from __future__ import annotations

from typing import Annotated

import typer

from ..offload.errors import UnknownNameError
from .faults import TracebackOption, reported

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_KINDS = ("plan", "journal")


def schema(
    of: Annotated[
        str,
        typer.Argument(metavar="[plan|journal]", help="The plan file, or a line of the journal."),
    ] = "plan",
    traceback: TracebackOption = False,
) -> None:
    """Print the JSON schema of the plan file, or of a record of the journal.

    Each field says what it means.
    """
    with reported(traceback):
        from json import dumps

        from ..planner.journal.record import JournalRecord
        from ..planner.report import Report
        from . import screen

        if of not in _KINDS:
            raise UnknownNameError("schema", of, _KINDS)
        model = JournalRecord if of == "journal" else Report
        document = {"$schema": _DIALECT} | model.model_json_schema(mode="serialization")
        screen.write(dumps(document, indent=2, ensure_ascii=False) + "\n")
