"""Qwen-Image-2.1's text encoder at 720x720, DiT and VAE resident: retain 43 of 66 layers or not."""

from __future__ import annotations

from residency.planner.choosing.model import (
    Choice,
    Fixed,
    Instance,
    LayerClass,
    Mode,
    Part,
    Room,
    UseSpan,
)

GIB = 1 << 30

PEAKS_BYTES = {
    "text_encode": round(17.42 * GIB),
    "denoise": round(14.49 * GIB),
    "vae_decode": round(16.87 * GIB),
}
"""With nothing retained; the text encoder's non-layer weights and its window are in the first."""
MARGIN_BYTES = GIB // 4
SET_BYTES = round(11.33 * GIB)
"""43 layers and the non-layer weights."""
LAYER_BYTES = 240 << 20
NON_LAYER_BYTES = SET_BYTES - 43 * LAYER_BYTES
_WINDOW_BYTES = 2 * LAYER_BYTES

_PART = Part(
    "text_encoder",
    NON_LAYER_BYTES,
    NON_LAYER_BYTES,
    (LayerClass("layers", 66, LAYER_BYTES, LAYER_BYTES, (True,)),),
    (UseSpan("text_encode", (0,), (1,), 1, (1, 2), 1.0),),
    (Mode(1, False, 1e-10, 0),),
    Fixed(resident=(43,), retained=(43,)),
)

BASELINE_BYTES = max(PEAKS_BYTES.values()) + MARGIN_BYTES
"""The least that this process must be able to take."""
RETAINING_BYTES = (
    max(
        PEAKS_BYTES["text_encode"] + SET_BYTES - NON_LAYER_BYTES,
        PEAKS_BYTES["denoise"] + SET_BYTES,
        PEAKS_BYTES["vae_decode"] + SET_BYTES,
    )
    + MARGIN_BYTES
)


def instance(room_bytes: int, *, compute_s: float = 0.0) -> Instance:
    """`room_bytes`: what this process may take, less the margin."""
    streamed = {"text_encode": NON_LAYER_BYTES + _WINDOW_BYTES}
    places = (
        Room(phase, "720x720", room_bytes - peak + streamed.get(phase, 0))
        for phase, peak in PEAKS_BYTES.items()
    )
    return Instance(tuple(places), (_PART,), fixed_seconds=compute_s)


def retains(choice: Choice) -> bool:
    return choice[0].retains[0]
