"""What the command line takes before it does anything."""

import statistics
import subprocess
import sys
import time

from rich.table import Table

ROUNDS = 7
PROGRAMS = {
    "python that imports typer": "import typer",
    "residency plan --help": "from residency.cli.main import main; main()",
}


def table() -> Table:
    """Processes taking turns in one run; medians."""
    made = Table(title="Seconds of a process, medians")
    made.add_column("program")
    made.add_column("seconds", justify="right")
    seconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for _ in range(ROUNDS):
        for name, program in PROGRAMS.items():
            start = time.perf_counter()
            command = [sys.executable, "-c", program, "plan", "--help"]
            subprocess.run(command, check=True, capture_output=True)
            seconds[name].append(time.perf_counter() - start)
    for name, each in seconds.items():
        made.add_row(name, f"{statistics.median(each):.2f}")
    return made
