"""What is sized for each pipeline on each card: `make sizes` prints the README's table."""

import sys

from residency.offload.cards import find_card
from residency.phases.shape import Shape
from residency.planner.dry_run import PlanRequest, plan
from residency.planner.plan import Plan, Status

GIB = 1 << 30

CASES = (
    ("qwen-image-2.1", "720x720"),
    ("qwen-image-2.1", "1024x1024"),
    ("qwen-image", "1328x1328"),
    ("flux.1-dev", "1024x1024"),
    ("wan2.1-t2v-14b", "832x480x81"),
    ("wan2.1-t2v-14b", "1280x720x81"),
)
CARDS = ("RTX 4090", "RTX 5090", "A100 40GB", "H100 80GB")


def main() -> None:
    columns = ("pipeline", "shape", "card", "held in its use / retained", "copied a request, GiB")
    print(f"| {' | '.join((*columns, 'copy seconds', 'tries'))} |")
    print("|" + "---|" * (len(columns) + 2))
    for family, shape in CASES:
        for card in CARDS:
            request = PlanRequest(family, (find_card(card),), (Shape.parse(shape),), size="auto")
            (made,) = plan(request).plans
            print(f"| {' | '.join((family, shape, card, *_row(made)))} |")
            sys.stdout.flush()


def _row(made: Plan) -> tuple[str, str, str, str]:
    explained, copied = made.explanation, made.h2d_bytes_per_request
    if made.status is Status.INFEASIBLE or explained is None or copied is None:
        found = made.infeasible
        short = 0 if found is None else (found.shortfall_bytes or 0)
        where = "start" if found is None else found.phase
        return f"doesn't fit: {where} is short by {short / GIB:.2f} GiB", "-", "-", "-"
    sets = ", ".join(
        f"{stop.component} {stop.resident_layers} / {stop.retained_layers} of {stop.running_layers}"
        for stop in explained.stops
    )
    return (
        sets,
        f"{copied.baseline / GIB:.1f} → {copied.planned / GIB:.1f}",
        f"{explained.baseline_copy_s:.2f} → {explained.copy_s:.2f}",
        str(len(made.attempts)),
    )


if __name__ == "__main__":
    main()
