"""The same pipeline and the same set of layers on two cards, and opposite decisions."""

from residency.offload.cards import find_card
from residency.phases.shape import Shape
from residency.planner.dry_run import PlanRequest, plan

GIB = 1 << 30

request = PlanRequest(
    pipeline="qwen-image-2.1",
    cards=(find_card("RTX 4090"), find_card("RTX 5090")),
    shapes=(Shape(720, 720),),
    component_residency={
        "dit": "resident",
        "text_encoder": "layerwise-offload",
        "vae": "resident",
    },
    resident_layers={"text_encoder": "0.65"},
    explore=1,
)

for made in plan(request).plans:
    retained = [use.component for use in made.uses if use.retain_resident_layers]
    print(f"{made.card}: {made.status}, retains {', '.join(retained) or 'nothing'}")
    for attempt in made.attempts:
        where = f" in {attempt.phase} at {attempt.shape}" if attempt.phase else ""
        undone = ", rolled back" if attempt.rolled_back else ""
        print(f"  tried {', '.join(attempt.retained)}: {attempt.verdict}{where}{undone}")
    copied = made.h2d_bytes_per_request
    print(f"  {copied.baseline / GIB:.2f} → {copied.planned / GIB:.2f} GiB copied a request")
