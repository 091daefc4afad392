"""What planning a full-scale pipeline on one card takes."""

import json
import resource
import subprocess
import sys
import time

from rich.table import Table

CASES = (
    ("qwen-image-2.1", "RTX 4090", "1024x1024", "dit=resident"),
    ("qwen-image", "RTX 5090", "1328x1328", "dit=layerwise-offload"),
    ("flux.1-dev", "RTX 4090", "1024x1024", "dit=layerwise-offload"),
    ("wan2.1-t2v-14b", "RTX 5090", "832x480x81", "dit=layerwise-offload"),
)


def table() -> Table:
    """One process a row: imports, building the pipeline, and the whole loop."""
    made = Table(title="Planning one full-scale pipeline on one simulated card, one process each")
    for column in ("pipeline", "card", "shape", "decision"):
        made.add_column(column)
    for column in ("seconds", "process memory"):
        made.add_column(column, justify="right")
    for case in CASES:
        made.add_row(*case[:3], *_measure(*case))
    return made


def _measure(family: str, card: str, shape: str, residency: str) -> tuple[str, str, str]:
    command = [sys.executable, __file__, family, card, shape, residency]
    start = time.perf_counter()
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    found = json.loads(told.stdout)
    return found["decision"], f"{seconds:.1f}", f"{found['rss_kib'] / 1024:.0f} MiB"


def main(family: str, card: str, shape: str, residency: str) -> None:
    from residency.offload.cards import find_card
    from residency.phases.shape import Shape
    from residency.planner.dry_run import PlanRequest, plan

    declared = dict([residency.split("=")])
    shapes = (Shape.parse(shape),)
    request = PlanRequest(family, (find_card(card),), shapes, declared, size="auto")
    (made,) = plan(request).plans
    retained = [use.component for use in made.uses if use.retain_resident_layers]
    decision = f"retains {', '.join(retained)}" if retained else made.status.replace("_", " ")
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"decision": decision, "rss_kib": rss}))


if __name__ == "__main__":
    main(*sys.argv[1:])
