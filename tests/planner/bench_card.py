"""A tiny pipeline on a simulated card, declared as the planner would find it in use."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.declaration import Declaration, declare
from residency.phases.diffusers import DiffusersPipeline
from residency.phases.family import find_family
from residency.phases.shape import Shape
from residency.planner.pricing import Pricing
from residency.planner.settings import Settings

GIB = 1 << 30


@dataclass
class Bench:
    card: SimulatedCard
    pipeline: DiffusersPipeline
    declarations: dict[str, Declaration]
    shape: Shape

    def settings(self, **changed) -> Settings:
        given = {
            "shapes": (self.shape,),
            "declarations": self.declarations,
            "margin_bytes": 0,
            "pricing": Pricing(1e9, "assumed"),
        }
        return Settings(**{**given, **changed})


def tiny(family: str) -> DiffusersPipeline:
    found = find_family(family, tiny=True)
    return DiffusersPipeline(found.build(), name=family, request=found.request)


@contextmanager
def bench(
    family: str,
    *,
    capacity_bytes: int = GIB,
    resident_layers: str = "0.5",
    guidance: float = 1.0,
    pipeline: DiffusersPipeline | None = None,
) -> Iterator[Bench]:
    """Everything but the VAE layerwise; the exact allocator, no context."""
    pipeline = pipeline or tiny(family)
    residency = {"dit": "layerwise-offload", "text_encoder": "layerwise-offload"}
    declarations = declare(
        pipeline.components, residency, dict.fromkeys(residency, resident_layers)
    )
    size = find_family(family, tiny=True).request
    shape = Shape(size.width, size.height, size.frames, tokens=size.tokens, guidance=guidance)
    with SimulatedCard(custom_card(capacity_bytes), allocator="exact", context_bytes=0) as card:
        yield Bench(card, pipeline, declarations, shape)


FAMILIES = ("qwen-image-2.1", "qwen-image", "flux.1-dev", "wan2.1-t2v-14b")
each_family = pytest.mark.parametrize("family", FAMILIES)
