"""FLUX.1-dev with too little host memory to pin its weights, and a set held across the steps.

Its transformer has 19 layers of 649 MiB and 38 of 270 MiB, and runs 28 times; compute hides 98 % of
the copies meanwhile. Pinning it would take 38 GiB, since each layer is rounded to a power of two.
"""

from canned import CONTEXT_BYTES, MARGIN_BYTES, attempt, gib, plan, resident_use

from residency.phases.schedule import NOTHING
from residency.planner.plan import (
    BytesPerRequest,
    ComponentPlan,
    ComponentStop,
    Explanation,
    FixedCost,
    FrontierPoint,
    HostPlan,
    PhasePlan,
    Reason,
    SetPlan,
    ShapePlan,
    Status,
    Stop,
    UsePlan,
    Worth,
)
from residency.planner.verdict import Verdict

FLUX_SHAPE = "1024x1024"
PEAK_BYTES = {
    "text_encode": gib(1.6),
    "text_encode_2": gib(1.9),
    "denoise": gib(3.05),
    "vae_decode": gib(5.2),
}
T5_BYTES, HELD_BYTES = gib(8.87), gib(10.82)


def component(name: str, residency: str, layers: tuple[int, int], *sizes: float) -> ComponentPlan:
    resident, total = layers
    weights, outside = map(gib, sizes)
    return ComponentPlan(
        name=name,
        residency=residency,
        resident_layers=resident,
        total_layers=total,
        weight_bytes=weights,
        non_layer_bytes=outside,
    )


def phase(name: str) -> PhasePlan:
    taken = CONTEXT_BYTES + MARGIN_BYTES + PEAK_BYTES[name]
    return PhasePlan(
        name=name,
        shape=FLUX_SHAPE,
        peak_bytes=PEAK_BYTES[name],
        headroom_bytes=gib(23.52) - taken,
        retained_bytes=T5_BYTES + (HELD_BYTES if name == "denoise" else 0),
        learnt_bytes=0,
        binding=name == "denoise",
    )


def sets(encoder: int, transformer: int) -> tuple[SetPlan, ...]:
    return (
        SetPlan(
            component="text_encoder_2",
            phase="text_encode_2",
            resident_layers=encoder,
            retained_layers=encoder,
        ),
        SetPlan(
            component="transformer",
            phase="denoise",
            resident_layers=transformer,
            retained_layers=0,
        ),
    )


def point(capacity: float, card: str | None, retained: float, *numbers: float) -> FrontierPoint:
    resident, copied, seconds = numbers
    return FrontierPoint(
        capacity_bytes=gib(capacity),
        card=card,
        fits=True,
        retained_bytes=gib(retained),
        resident_bytes=gib(resident),
        h2d_bytes=gib(copied),
        copy_s=seconds,
    )


STOPS = (
    ComponentStop(
        component="text_encoder_2",
        phase="text_encode_2",
        retained_layers=24,
        running_layers=24,
        resident_layers=24,
        passes=1,
        stop=Stop.WHOLE,
        limiting_phase=None,
        limiting_shape=None,
        step_bytes=None,
        short_bytes=None,
    ),
    ComponentStop(
        component="transformer",
        phase="denoise",
        retained_layers=0,
        running_layers=57,
        resident_layers=34,
        passes=28,
        stop=Stop.ROOM,
        limiting_phase="denoise",
        limiting_shape=FLUX_SHAPE,
        step_bytes=gib(0.264),
        short_bytes=gib(0.1),
    ),
)

HOST_MEMORY_BINDS = plan(
    "RTX 4090",
    23.52,
    Status.COMMITTED,
    components=(
        component("text_encoder", "resident", (12, 12), 0.23, 0.07),
        component("text_encoder_2", "layerwise-offload", (0, 24), 8.87, 0.24),
        component("transformer", "layerwise-offload", (0, 57), 22.17, 0.11),
        component("vae", "resident", (0, 0), 0.16, 0.16),
    ),
    shapes=(ShapePlan(asked=FLUX_SHAPE, run="1024x1024"),),
    schedule=NOTHING,
    uses=(
        resident_use("text_encode", "text_encoder", 12),
        UsePlan(
            phase="text_encode_2",
            component="text_encoder_2",
            retain_resident_layers=True,
            resident_layers=24,
            retained_layers=24,
            total_layers=24,
            retained_bytes=T5_BYTES,
            saved_h2d_bytes=T5_BYTES,
            saved_s=0.945,
            reason=Reason.RETAINED,
            shortfall_bytes=None,
            limiting_phase=None,
            limiting_shape=None,
        ),
        UsePlan(
            phase="denoise",
            component="transformer",
            retain_resident_layers=False,
            resident_layers=34,
            retained_layers=0,
            total_layers=57,
            retained_bytes=gib(22.17),
            saved_h2d_bytes=0,
            saved_s=0.0,
            reason=Reason.NO_HEADROOM,
            shortfall_bytes=None,
            limiting_phase="denoise",
            limiting_shape=FLUX_SHAPE,
        ),
        resident_use("vae_decode", "vae", 0),
    ),
    phases=tuple(phase(name) for name in PEAK_BYTES),
    attempts=(
        attempt(
            Verdict.OOM,
            retained=("text_encoder_2",),
            sets=sets(24, 35),
            phase="denoise",
            shape=FLUX_SHAPE,
            shortfall_bytes=gib(0.1),
            detail="CUDA out of memory. Tried to allocate 270.00 MiB.",
        ),
        attempt(Verdict.ACCEPTED, retained=("text_encoder_2",), sets=sets(24, 34)),
    ),
    h2d_bytes_per_request=BytesPerRequest(baseline=gib(626.6), planned=gib(325.9)),
    copy_rate_source="assumed: 80% of PCIe 4.0 x16, copies 2% exposed in denoise",
    sizing="auto",
    explanation=Explanation(
        binding_phase="denoise",
        binding_shape=FLUX_SHAPE,
        left_bytes=gib(0.163),
        stops=STOPS,
        one_more_gib=Worth(layers=3, seconds=0.061),
        frontier=(
            point(15.48, "RTX 5080", 8.87, 2.75, 543.7, 1.158),
            point(23.52, "RTX 4090", 8.87, 10.82, 325.9, 0.694),
            point(24.52, None, 8.87, 11.72, 301.6, 0.633),
            point(31.4, "RTX 5090", 8.87, 18.5, 118.3, 0.252),
            point(39.4, "A100 40GB", 31.04, 0.0, 0.0, 0.0),
        ),
        fixed=(FixedCost(component="vae", fixed="vae=resident", seconds=0.0),),
        host=HostPlan(
            budget_bytes=gib(16),
            charged_bytes=0,
            wanted_bytes=gib(38.5),
            pinned=(),
            pageable=("text_encoder_2", "transformer"),
        ),
        copy_s=0.694,
        baseline_copy_s=2.261,
        bound_s=0.671,
        proven=False,
        unfit=None,
    ),
)
