"""Reports as the planner makes them, with the numbers of Qwen-Image-2.1 written down by hand."""

from residency.phases.schedule import NOTHING
from residency.planner.plan import (
    Attempt,
    BytesPerRequest,
    ComponentPlan,
    Infeasible,
    PhasePlan,
    Plan,
    Reason,
    Report,
    SetPlan,
    ShapePlan,
    Status,
    UsePlan,
)
from residency.planner.verdict import Verdict

MIB = 1 << 20
SHAPE = "720x720:steps=4"
CONTEXT_BYTES = 376 * MIB
MARGIN_BYTES = 256 * MIB


def gib(size: float) -> int:
    return round(size * (1 << 30))


PEAK_BYTES = {"text_encode": gib(15.36), "denoise": gib(15.9), "vae_decode": gib(16.7)}
SET_BYTES = gib(11.33)

COMPONENTS = (
    ComponentPlan(
        name="text_encoder",
        residency="layerwise-offload",
        resident_layers=43,
        total_layers=66,
        weight_bytes=gib(16.33),
        non_layer_bytes=gib(2.41),
    ),
    ComponentPlan(
        name="transformer",
        residency="resident",
        resident_layers=32,
        total_layers=32,
        weight_bytes=gib(13.27),
        non_layer_bytes=gib(0.41),
    ),
    ComponentPlan(
        name="vae",
        residency="resident",
        resident_layers=0,
        total_layers=0,
        weight_bytes=gib(1.33),
        non_layer_bytes=gib(1.33),
    ),
)

ENCODER_SET = SetPlan(
    component="text_encoder", phase="text_encode", resident_layers=43, retained_layers=43
)


def resident_use(phase: str, component: str, layers: int) -> UsePlan:
    return UsePlan(
        phase=phase,
        component=component,
        retain_resident_layers=False,
        resident_layers=layers,
        retained_layers=0,
        total_layers=layers,
        retained_bytes=0,
        saved_h2d_bytes=0,
        saved_s=0.0,
        reason=Reason.RESIDENT,
        shortfall_bytes=None,
        limiting_phase=None,
        limiting_shape=None,
    )


def encoder_use(reason: Reason, saved_s: float, shortfall_bytes: int | None = None) -> UsePlan:
    retains = reason in (Reason.RETAINED, Reason.PARTLY_RETAINED)
    return UsePlan(
        phase="text_encode",
        component="text_encoder",
        retain_resident_layers=retains,
        resident_layers=43,
        retained_layers=43 if retains else 0,
        total_layers=66,
        retained_bytes=SET_BYTES,
        saved_h2d_bytes=gib(10.93),
        saved_s=saved_s,
        reason=reason,
        shortfall_bytes=shortfall_bytes,
        limiting_phase=None if reason is Reason.RETAINED else "vae_decode",
        limiting_shape=None if reason is Reason.RETAINED else SHAPE,
    )


def phases(capacity_bytes: int, retained_bytes: int) -> tuple[PhasePlan, ...]:
    return tuple(
        PhasePlan(
            name=name,
            shape=SHAPE,
            peak_bytes=peak_bytes,
            headroom_bytes=capacity_bytes - CONTEXT_BYTES - peak_bytes - MARGIN_BYTES,
            retained_bytes=retained_bytes,
            learnt_bytes=0,
            binding=name == "vae_decode",
        )
        for name, peak_bytes in PEAK_BYTES.items()
    )


def plan(card: str, capacity_gib: float, status: Status, **others: object) -> Plan:
    values: dict[str, object] = {
        "card": card,
        "capacity_bytes": gib(capacity_gib),
        "others_bytes": 0,
        "context_bytes": CONTEXT_BYTES,
        "margin_bytes": MARGIN_BYTES,
        "status": status,
        "components": COMPONENTS,
        "shapes": (ShapePlan(asked=SHAPE, run="704x704"),),
        "schedule": NOTHING,
        "uses": (),
        "phases": phases(gib(capacity_gib), 0),
        "attempts": (),
        "infeasible": None,
        "h2d_bytes_per_request": BytesPerRequest(baseline=gib(12.94), planned=gib(12.94)),
        "copy_bytes_per_s": 25.2e9,
        "copy_rate_source": "assumed: 80% of PCIe 4.0 x16, no copy hidden behind compute",
        "sizing": "declared",
        "explanation": None,
        "device": "simulated",
        "fingerprint": None,
    }
    return Plan.model_validate(values | others)


def uses(encoder: UsePlan) -> tuple[UsePlan, ...]:
    return (
        encoder,
        resident_use("denoise", "transformer", 32),
        resident_use("vae_decode", "vae", 0),
    )


def attempt(verdict: Verdict, **others: object) -> Attempt:
    values: dict[str, object] = {
        "retained": ("text_encoder",),
        "sets": (ENCODER_SET,),
        "beyond_model": False,
        "predicted_shortfall_bytes": 0,
        "verdict": verdict,
        "phase": None,
        "shape": None,
        "shortfall_bytes": None,
        "detail": None,
        "neighbour_bytes": 0,
        "seconds": None,
        "baseline_seconds": None,
        "rolled_back": verdict is not Verdict.ACCEPTED,
    }
    return Attempt.model_validate(values | others)


COMMITTED = plan(
    "RTX 5090",
    31.4,
    Status.COMMITTED,
    schedule=NOTHING,
    uses=uses(encoder_use(Reason.RETAINED, saved_s=0.233)),
    phases=phases(gib(31.4), SET_BYTES),
    attempts=(attempt(Verdict.ACCEPTED),),
    h2d_bytes_per_request=BytesPerRequest(baseline=gib(12.94), planned=gib(2.01)),
    copy_bytes_per_s=50.4e9,
    copy_rate_source="assumed: 80% of PCIe 5.0 x16, no copy hidden behind compute",
)

NO_HEADROOM = plan(
    "RTX 4090",
    23.52,
    Status.BASELINE_ONLY,
    schedule=NOTHING,
    uses=uses(encoder_use(Reason.NO_HEADROOM, saved_s=0.466, shortfall_bytes=gib(5.13))),
)

REFUTED = plan(
    "RTX 4090",
    23.52,
    Status.BASELINE_ONLY,
    schedule=NOTHING,
    uses=uses(encoder_use(Reason.REFUTED, saved_s=0.466, shortfall_bytes=gib(1.59))),
    attempts=(
        attempt(
            Verdict.OOM,
            beyond_model=True,
            predicted_shortfall_bytes=gib(5.13),
            phase="vae_decode",
            shape=SHAPE,
            shortfall_bytes=gib(1.59),
            detail="CUDA out of memory. Tried to allocate 2.14 GiB. GPU 0 has a total capacity of "
            "23.52 GiB of which 563.20 MiB is free. [simulated RTX 4090]",
        ),
    ),
)

INFEASIBLE = plan(
    "RTX 5080",
    15.48,
    Status.INFEASIBLE,
    shapes=(ShapePlan(asked=SHAPE, run=None),),
    schedule=NOTHING,
    uses=(),
    phases=(),
    infeasible=Infeasible(
        phase="vae_decode",
        shape=SHAPE,
        shortfall_bytes=gib(1.2),
        detail="CUDA out of memory. Tried to allocate 2.14 GiB.",
    ),
    h2d_bytes_per_request=None,
)


def report(*plans: Plan, pipeline: str = "qwen-image-2.1") -> Report:
    return Report(residency_version="0.1.0", pipeline=pipeline, plans=plans)
