"""A machine as a page, what is to be known of it and its cards; and the catalogue of cards."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...offload.device import Nature
from .words import add_row, format_bytes, format_rate, make_table

if TYPE_CHECKING:
    from ...offload.cards import Card

    # Reading a machine brings torch, and the catalogue needs none.
    from ..survey import Figure, Machine, Note, ProbedCard, Unreadable

_HEADINGS = {
    Nature.CONTRADICTION: ("Contradictions", "bold red"),
    Nature.ABSENCE: ("Not known", "bold yellow"),
    Nature.ASSUMPTION: ("Assumed", "bold yellow"),
    Nature.CONDITION: ("To be known", "bold"),
}
_BYTES = re.compile(r"\b(\d+) bytes\b")


def machine_view(machine: Machine) -> RenderableType:
    pages: list[RenderableType] = [Group(*_card(card)) for card in machine.cards]
    pages += [Group(*_unreadable(each)) for each in machine.unreadable]
    if machine.no_card is not None:
        pages.append(Group(Text("No card", "bold"), *_told(machine.no_card, machine.hint)))
    if machine.no_nvml is not None:
        pages.append(Group(Text("No NVML", "bold"), Text(machine.no_nvml)))
    pages.append(_figures("Host memory", machine.host))
    versions = f"residency {machine.residency_version}, torch {machine.torch_version}"
    pages.append(Text(versions, "dim"))
    parts = [part for page in pages for part in (page, Text())]
    return Group(*parts[:-1])


def _card(card: ProbedCard) -> Iterator[RenderableType]:
    yield Text(f"{card.name} ({card.device})", "bold")
    yield Text(card.uuid or "no UUID", "dim")
    yield Text(f"this process may take {format_bytes(card.usable_bytes)} with tensors")
    if card.drift_reserve_bytes:
        yield Text(f"a margin should hold {format_bytes(card.drift_reserve_bytes)} more")
    for nature, (heading, style) in _HEADINGS.items():
        notes = [note for note in card.notes if note.nature is nature]
        if notes:
            yield Text()
            yield Text(heading, style)
            yield from (line for note in notes for line in _note(note))
    yield Text()
    yield _figures("What is read", card.figures)


def _unreadable(card: Unreadable) -> Iterator[RenderableType]:
    yield Text(f"{card.device} can't be read", "bold red")
    yield from _told(card.message, card.hint)


def _note(note: Note) -> Iterator[Text]:
    yield from _told(f"- {note.message}", note.hint, indent="  ")


def _told(message: str, hint: str | None, indent: str = "") -> Iterator[Text]:
    yield Text(_with_units(message))
    if hint is not None:
        yield Text(f"{indent}hint: {_with_units(hint)}", "cyan")


def _figures(title: str, figures: Iterable[Figure]) -> Table:
    table = make_table(title, "", ("value", "right"), "source")
    for figure in figures:
        add_row(table, figure.name, _value(figure), figure.source)
    return table


def _value(figure: Figure) -> str:
    if figure.value is None:
        return "-"
    if figure.unit == "bytes" and isinstance(figure.value, int):
        return format_bytes(figure.value)
    return f"{figure.value} {figure.unit}".rstrip()


def _with_units(text: str) -> str:
    return _BYTES.sub(lambda found: format_bytes(int(found[1])), text)


_NOTE = """\
Capacity is what CUDA reports on Linux; ~ marks an estimate. PCIe is the raw rate of one direction.
Any other card: residency plan PIPELINE --capacity 22GiB"""


def cards_view(cards: Iterable[Card]) -> RenderableType:
    cards = tuple(cards)
    return Group(_table(cards), Text(), Text(_NOTE), Text(), _totals(cards))


def _table(cards: Iterable[Card]) -> Table:
    table = make_table(
        "Cards that can be simulated",
        "card",
        ("capacity", "right"),
        ("PCIe", "right"),
        ("bus", "right"),
        ("memory", "right"),
        ("dense bf16", "right"),
    )
    for card in cards:
        memory, flops = card.memory_bandwidth_bytes_per_s, card.bf16_flops_per_s
        add_row(
            table,
            card.name,
            ("~" if card.sources.total_is_estimate else "") + format_bytes(card.total_bytes),
            f"{card.pcie_generation}.0 x{card.pcie_lanes}",
            format_rate(card.pcie_bytes_per_s),
            "-" if memory is None else format_rate(memory),
            "-" if flops is None else f"{flops / 10**12:.1f} TFLOP/s",
        )
    return table


def _totals(cards: Iterable[Card]) -> Table:
    table = make_table("Where each capacity is from", "card", "source")
    for card in cards:
        add_row(table, card.name, card.sources.total)
    return table
