"""Full-scale pipelines without weights: their phases, and what each takes.

The peak of a phase is the VAE, which is resident, the non-layer weights of the component that
works, its two largest layers (the window at a prefetch of one), and activations. The weights, and
activations beside the measured peaks below, were measured in another way: component by component,
with fake tensors (FINDINGS, A3), and without the latents and embeddings that a request carries.
"""

import pytest
from stage import staged_pipeline

from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.shape import Shape

MIB = 1 << 20

# phase -> peak in MiB = VAE + non-layer + window + activations, and what is carried along
PEAKS = {
    ("flux.1-dev", "1024x1024:steps=2,guidance=1"): {
        "text_encode": 267.4,  # 160 + 72 + 2 x 13.5 + 2
        "text_encode_2": 1245.2,  # 160 + 251 + 2 x 368.0 + 92
        "denoise": 2053.4,  # 160 + 122 + 2 x 648.2 + 468
        "vae_decode": 1706.2,  # 160 + 1537
    },
    ("qwen-image", "1024x1024:steps=2,guidance=1"): {
        "text_encode": 3614.2,  # 242 + 2167 + 2 x 444.5 + 297
        "denoise": 2006.5,  # 242 + 77 + 2 x 648.2 + 387
        "vae_decode": 3713.2,  # 242 + 3460
    },
    ("qwen-image-2.1", "1024x1024:steps=2,guidance=1"): {
        "text_encode": 4263.0,  # 644 + 2459 + 2 x 368.0 + 383
        "denoise": 2658.7,  # 644 + 259 + 2 x 416.0 + 911
        "vae_decode": 7092.3,  # 644 + 6432
    },
    ("wan2.1-t2v-14b", "832x480x81:steps=2,guidance=5"): {
        "text_encode": 3365.8,  # 484 + 2003 + 2 x 368.0 + 120
        "denoise": 5910.4,  # 484 + 445 + 2 x 670.2 + 3574
        "vae_decode": 8354.5,  # 484 + 7797
    },
}


SHORTEST = "qwen-image-2.1"


@pytest.mark.scale
@pytest.mark.parametrize(
    ("name", "asked"),
    [pytest.param(*case, marks=[] if case[0] == SHORTEST else pytest.mark.long) for case in PEAKS],
)
def test_a_full_scale_request_takes_what_its_parts_do(name, asked):
    shape = Shape.parse(asked)
    pipeline = DiffusersPipeline(find_family(name).build(), name=name)
    with staged_pipeline(pipeline, [shape], virtual=True, card="RTX PRO 6000 Blackwell") as stage:
        assert stage.discover() is None
        with stage.conductor.request() as trace:
            pipeline.run(shape)
        stage.card.check_integrity()
    peaks = {each.phase: each.reading.peak_allocated_bytes / MIB for each in trace.readings}
    assert list(peaks) == list(PEAKS[name, asked])
    assert peaks == pytest.approx(PEAKS[name, asked], rel=0.01)
