"""What a real card says of what the tests here claim: `python -m tests.gpu.report --help`.

Each part runs in a process of its own and within a time limit; what failed is reported, and so
are the others. `--device simulated` runs the same code on a simulated card, with a tiny pipeline
and an assumed clock: its seconds and rates say nothing of any card.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from .namespace import importable
from .part import Part, chosen
from .results import PartResult, Results, Status
from .runner import Runner, skipped

_LEAST_S = 15.0
"""With less time than this left no part is begun."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.report", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or simulated")
    parser.add_argument("--out", type=Path, default=Path("results.json"), help="where results go")
    parser.add_argument("--parts", help="which parts, with commas between; all by default")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all parts together")
    parser.add_argument(
        "--scale",
        choices=("auto", "mid", "full"),
        default="auto",
        help="of the pipeline on two cards; auto: full where host memory and time allow it",
    )
    given = parser.parse_args(arguments)
    try:
        parts = chosen(given.parts.split(",") if given.parts else None)
    except ValueError as error:
        parser.error(str(error))
    with importable(), TemporaryDirectory(prefix="residency-report-") as folder:
        results = report(
            parts,
            device=given.device,
            scale=given.scale,
            minutes=given.minutes,
            out=given.out,
            folder=Path(folder),
        )
    print(results.text())
    return 0 if results.passed else 1


def report(
    parts: Sequence[Part],
    *,
    device: str,
    minutes: float,
    out: Path,
    folder: Path,
    scale: str = "auto",
) -> Results:
    """Runs the parts in order. `out` holds what is known after each, and progress is on stderr."""
    deadline = time.monotonic() + minutes * 60
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    missing = tuple(dict.fromkeys(name for part in parts for name in part.missing))
    for name in missing:
        without = ", ".join(part.name for part in parts if name in part.missing)
        _tell(f"{name} can't be imported: without it there is no {without}")
    runner = Runner(device, scale, folder)
    done: list[PartResult] = []
    results = _results(device, date, missing, runner, done)
    results.write(out)
    runner.warm()
    for part in parts:
        left_s = deadline - time.monotonic()
        if left_s < _LEAST_S:
            result = skipped(part, f"no time is left of {minutes:g} minutes")
        else:
            _tell(f"{part.name} …")
            result = runner.run(part, left_s)
        _tell(f"{part.name}: {result.status} in {result.seconds:.1f} s")
        if result.status is not Status.OK and result.error:
            _tell(f"  {result.error.splitlines()[-1]}")
        done.append(result)
        results = _results(device, date, missing, runner, done)
        results.write(out)
    return results


def _results(
    device: str,
    date: str,
    missing: tuple[str, ...],
    runner: Runner,
    done: Sequence[PartResult],
) -> Results:
    machine = runner.machine
    return Results(
        device=device,
        card=machine.get("card"),
        driver=machine.get("driver"),
        torch=machine.get("torch"),
        python=platform.python_version(),
        date=date,
        missing=missing,
        parts=tuple(done),
    )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
