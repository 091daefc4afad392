"""The loop for a diffusers pipeline of one's own, on a simulated card.

`pipe` may be any diffusers pipeline whose components are on the CPU; a tiny one stands in here.
"""

from residency.offload.cards import find_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.declaration import declare
from residency.phases.diffusers import DiffusersPipeline
from residency.phases.family import find_family
from residency.phases.shape import Shape
from residency.planner.pricing import Pricing
from residency.planner.settle import Settings, settle

pipe = find_family("qwen-image", tiny=True).build()

pipeline = DiffusersPipeline(pipe, name="mine")
card = find_card("RTX 4090")
settings = Settings(
    shapes=(Shape(64, 64, steps=4), Shape(32, 64, steps=4)),
    declarations=declare(
        pipeline.components, {"text_encoder": "layerwise-offload"}, {"text_encoder": "0.5"}
    ),
    margin_bytes=256 << 20,
    pricing=Pricing.assumed(card),
)
with SimulatedCard(card) as device:
    settlement = settle(pipeline, device, settings, listen=print)
    if settlement.committed is None:
        print("nothing is retained")
    else:
        print(f"retained between requests: {', '.join(settlement.committed.components)}")
        with settlement.installation.conductor.request():
            images = pipeline.run(Shape(64, 64, steps=4)).value
        print(f"served {tuple(images.shape)} on {images.device}")
        del images
    settlement.close()
