"""The look that all tables share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

Align = Literal["left", "right"]


def make_table(title: str, *headings: str | tuple[str, Align]) -> Table:
    """A heading with "right" is a column of numbers. What is too wide is folded, never cut."""
    table = Table(
        title=Text(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="",
    )
    for heading in headings:
        text = heading if isinstance(heading, str) else heading[0]
        align: Align = "left" if isinstance(heading, str) else heading[1]
        table.add_column(Text(text, "dim"), justify=align, overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text) -> None:
    """Strings are shown as they are, whatever brackets are in them."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def make_facts(facts: Iterable[tuple[str, str]]) -> Table:
    """A line a fact, with its label before it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", overflow="fold")
    table.add_column(overflow="fold")
    for fact in facts:
        add_row(table, *fact)
    return table
