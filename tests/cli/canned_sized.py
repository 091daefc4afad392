"""Plans whose sets were sized, with explanations: one for each thing that can bind.

In Qwen-Image-2.1's text encoder 36 of 66 layers run, of 367 MiB each.
"""

from canned import (
    COMPONENTS,
    CONTEXT_BYTES,
    INFEASIBLE,
    MARGIN_BYTES,
    PEAK_BYTES,
    SHAPE,
    attempt,
    encoder_use,
    gib,
    phases,
    plan,
    uses,
)

from residency.phases.schedule import NOTHING
from residency.planner.plan import (
    BytesPerRequest,
    ComponentStop,
    Explanation,
    FixedCost,
    FrontierPoint,
    HostPlan,
    Plan,
    Reason,
    SetPlan,
    Status,
    Stop,
    Worth,
)
from residency.planner.verdict import Verdict

OPEN_COMPONENTS = (COMPONENTS[0].model_copy(update={"resident_layers": 0}), *COMPONENTS[1:])
LAYER_BYTES = gib(0.3586)
LAYERS = 36
NON_LAYER_BYTES = gib(2.41)
ALL_BYTES = NON_LAYER_BYTES + LAYERS * LAYER_BYTES
RATE = 25.2e9
RESIDENT = ("transformer=resident", "vae=resident")
CARDS = {
    15.48: "RTX 5080",
    22.03: "L4",
    23.52: "RTX 4090",
    24.52: None,
    31.4: "RTX 5090",
    39.4: "A100 40GB",
    47.4: "RTX A6000",
}


def set_bytes(layers: int) -> int:
    return NON_LAYER_BYTES + layers * LAYER_BYTES if layers else 0


def seconds(size: int) -> float:
    return size / RATE


def room_bytes(capacity_gib: float) -> int:
    return gib(capacity_gib) - CONTEXT_BYTES - MARGIN_BYTES - PEAK_BYTES["vae_decode"]


def layers_that_fit(capacity_gib: float) -> int:
    return max(0, min(LAYERS, (room_bytes(capacity_gib) - NON_LAYER_BYTES) // LAYER_BYTES))


def point(capacity_gib: float, pinned_bytes: int = 0) -> FrontierPoint:
    size = set_bytes(layers_that_fit(capacity_gib))
    if pinned_bytes:
        size = pinned_bytes if room_bytes(capacity_gib) >= pinned_bytes else 0
    return FrontierPoint(
        capacity_bytes=gib(capacity_gib),
        card=CARDS[capacity_gib],
        fits=room_bytes(capacity_gib) >= 0,
        retained_bytes=size,
        resident_bytes=0,
        copy_s=seconds(ALL_BYTES - size),
        h2d_bytes=ALL_BYTES - size,
    )


def encoder_stop(stop: Stop, layers: int, **others: object) -> ComponentStop:
    values: dict[str, object] = {
        "component": "text_encoder",
        "phase": "text_encode",
        "retained_layers": layers,
        "running_layers": LAYERS,
        "resident_layers": layers,
        "passes": 1,
        "stop": stop,
        "limiting_phase": None,
        "limiting_shape": None,
        "step_bytes": None,
        "short_bytes": None,
    }
    return ComponentStop.model_validate(values | others)


def resident_stop(component: str, phase: str, layers: int) -> ComponentStop:
    return encoder_stop(
        Stop.FIXED, 0, component=component, phase=phase, running_layers=layers, passes=4
    )


RESIDENT_STOPS = (
    resident_stop("transformer", "denoise", 32),
    resident_stop("vae", "vae_decode", 0),
)


def explanation(
    capacity_gib: float, size: int, stop: ComponentStop, **others: object
) -> Explanation:
    values: dict[str, object] = {
        "binding_phase": "vae_decode",
        "binding_shape": SHAPE,
        "left_bytes": room_bytes(capacity_gib) - size,
        "stops": (stop, *RESIDENT_STOPS),
        "one_more_gib": Worth(layers=0, seconds=0.0),
        "frontier": tuple(point(each) for each in CARDS),
        "fixed": tuple(
            FixedCost(component=text.partition("=")[0], fixed=text, seconds=0.0)
            for text in RESIDENT
        ),
        "host": HostPlan(
            budget_bytes=None,
            charged_bytes=gib(22.5),
            wanted_bytes=gib(22.5),
            pinned=("text_encoder",),
            pageable=(),
        ),
        "copy_s": seconds(ALL_BYTES - size),
        "baseline_copy_s": seconds(ALL_BYTES),
        "bound_s": seconds(ALL_BYTES - size),
        "proven": True,
        "unfit": None,
    }
    return Explanation.model_validate(values | others)


def sized(
    capacity_gib: float, layers: int, size: int, reason: Reason, explained: Explanation
) -> Plan:
    use = encoder_use(reason, seconds(size)).model_copy(
        update={
            "resident_layers": layers,
            "retained_layers": layers,
            "retained_bytes": size,
            "saved_h2d_bytes": size,
            "limiting_phase": "vae_decode" if reason is Reason.PARTLY_RETAINED else None,
        }
    )
    tried = SetPlan(
        component="text_encoder",
        phase="text_encode",
        resident_layers=layers,
        retained_layers=layers,
    )
    return plan(
        CARDS[capacity_gib] or "",
        capacity_gib,
        Status.COMMITTED,
        components=COMPONENTS if layers == 43 else OPEN_COMPONENTS,
        schedule=NOTHING,
        uses=uses(use),
        phases=phases(gib(capacity_gib), size),
        attempts=(attempt(Verdict.ACCEPTED, sets=(tried,)),),
        h2d_bytes_per_request=BytesPerRequest(baseline=ALL_BYTES, planned=ALL_BYTES - size),
        sizing="auto",
        explanation=explained,
    )


EVERYTHING_FITS = sized(
    47.4, 36, ALL_BYTES, Reason.RETAINED, explanation(47.4, ALL_BYTES, encoder_stop(Stop.WHOLE, 36))
)

ONE_PHASE_BINDS = sized(
    23.52,
    10,
    set_bytes(10),
    Reason.PARTLY_RETAINED,
    explanation(
        23.52,
        set_bytes(10),
        encoder_stop(
            Stop.ROOM,
            10,
            limiting_phase="vae_decode",
            limiting_shape=SHAPE,
            step_bytes=LAYER_BYTES,
            short_bytes=set_bytes(11) - room_bytes(23.52),
        ),
        one_more_gib=Worth(layers=3, seconds=seconds(3 * LAYER_BYTES)),
    ),
)

# 0.65 of each layer group is 43 layers, of which 23 run.
FIXED_BINDS = sized(
    31.4,
    43,
    gib(11.33),
    Reason.RETAINED,
    explanation(
        31.4,
        gib(11.33),
        encoder_stop(Stop.FIXED, 43),
        fixed=(
            FixedCost(
                component="text_encoder",
                fixed="text_encoder=0.65",
                seconds=seconds(set_bytes(32) - gib(11.33)),
            ),
            FixedCost(component="transformer", fixed="dit=resident", seconds=0.0),
        ),
        frontier=tuple(point(each, gib(11.33)) for each in CARDS),
    ),
)

NOTHING_FITS = INFEASIBLE.model_copy(
    update={
        "sizing": "auto",
        "explanation": explanation(
            15.48,
            0,
            encoder_stop(Stop.ROOM, 0),
            stops=(),
            left_bytes=None,
            one_more_gib=None,
            copy_s=0.0,
            baseline_copy_s=0.0,
            bound_s=0.0,
            unfit=f"vae_decode at {SHAPE} is short by 1288490189 bytes, even with everything "
            "streamed that isn't fixed",
        ),
    }
)
