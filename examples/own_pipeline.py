"""A diffusers pipeline of one's own, settled and served on a simulated card.

`pipe` may be any diffusers pipeline whose components are on the CPU; a tiny one stands in here.
On a card of this machine, `device` is "cuda:0".
"""

from residency.offload.cards import find_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.families import find_family
from residency.planner import Options, settle

pipe = find_family("qwen-image", tiny=True).build()
shape = "64x64:steps=4,tokens=16"

with SimulatedCard(find_card("RTX 4090")) as device:
    settlement = settle(
        pipe,
        device=device,
        envelope=[shape, "32x64:steps=4,tokens=16"],
        options=Options(resident_layers={"text_encoder": "0.5"}),
        listen=print,
    )
    retained = [use.component for use in settlement.plan.uses if use.retain_resident_layers]
    print(f"retained between requests: {', '.join(retained) or 'nothing'}")
    with settlement.guard(shape):
        asked = {"width": 64, "height": 64, "num_inference_steps": 4, "true_cfg_scale": 1.0}
        images = pipe("a cat", output_type="pt", **asked).images
    print(f"served {tuple(images.shape)} on {images.device}")
    del images
    settlement.close()
