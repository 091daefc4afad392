"""The report as a plain HTML page."""

from __future__ import annotations

import html
import io

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from ...planner.report import Report
from .report import report_view

_WIDTH = 140
"""Columns; tables that need more scroll."""

_THEME = TerminalTheme(
    (255, 255, 255),
    (28, 30, 33),
    [
        (28, 30, 33),
        (176, 32, 32),
        (20, 110, 60),
        (140, 90, 0),
        (30, 80, 160),
        (120, 50, 130),
        (0, 105, 115),
        (90, 95, 100),
    ],
)

_FRAME = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{{stylesheet}}
body {{{{ color: {{foreground}}; background: {{background}}; margin: 2rem; }}}}
pre {{{{ font: 14px/1.35 ui-monospace, monospace; overflow-x: auto; margin: 0; }}}}
</style>
</head>
<body><pre>{{code}}</pre></body>
</html>
"""


def report_page(report: Report) -> str:
    """What `residency show` prints, in one file that needs nothing else."""
    console = Console(
        file=io.StringIO(),
        width=_WIDTH,
        record=True,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(report_view(report))
    names = ", ".join(dict.fromkeys(plan.card for plan in report.plans))
    title = _escaped(f"residency: {report.pipeline} on {names}")
    return console.export_html(theme=_THEME, code_format=_FRAME.format(title=title))


def _escaped(text: str) -> str:
    """For HTML, and for the format that it becomes a part of."""
    return html.escape(text).replace("{", "{{").replace("}", "}}")
