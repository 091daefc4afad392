"""Measured tables: `make bench`. Seconds are of this machine; compare rows of one run."""

import sys

from rich.console import Console

from . import choosing, hooks, planning, settling, startup

if __name__ == "__main__":
    console = Console(width=110)
    for table in (planning.table, choosing.table, hooks.table, settling.table, startup.table):
        console.print(table())
        sys.stdout.flush()
