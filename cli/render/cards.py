"""The catalogue of cards."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...offload.cards import Card
from .table import add_row, make_table
from .units import format_bytes, format_rate

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
