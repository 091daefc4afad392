"""A tiny pipeline on a simulated card, declared as the planner would find it in use."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import pytest

from residency.offload.cards import custom_card
from residency.offload.simulated.card import SimulatedCard
from residency.phases.component import Declaration, declare
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.undo import Residue
from residency.phases.host import Sweep
from residency.phases.shape import Shape
from residency.planner.choosing.prices import Pricing
from residency.planner.loop import Outcome, run_loop
from residency.planner.proof import Settings
from residency.planner.verdict import Verdict, ignore

GIB = 1 << 30


@dataclass
class Bench:
    card: SimulatedCard
    pipeline: DiffusersPipeline
    declarations: dict[str, Declaration]
    shape: Shape

    def host(self, pipeline=None, **changed) -> DiffusersHost:
        """`changed`: `shapes`, and what else a host is told."""
        given = {"shapes": (self.shape,), "declarations": self.declarations} | changed
        shapes, declarations = given.pop("shapes"), given.pop("declarations")
        device = given.pop("device", self.card)
        return DiffusersHost(pipeline or self.pipeline, device, shapes, declarations, **given)

    def settings(self, **changed) -> Settings:
        given = {"margin_bytes": 0, "pricing": Pricing(1e9, "assumed")}
        return Settings(**{**given, **changed})

    def loop(self, *, listen=ignore, **changed) -> Outcome:
        """`changed`: of the host, and of the settings."""
        of_host = {key: changed.pop(key) for key in {*OF_HOST} & changed.keys()}
        settings = self.settings(**changed)
        of_host.setdefault("host_bytes", settings.pricing.host_budget_bytes)
        return run_loop(self.host(**of_host), settings, listen=listen)


OF_HOST = ("pipeline", "device", "shapes", "declarations", "sized", "prefetch", "host_bytes")


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
    others_bytes: int = 0,
    context_bytes: int = 0,
) -> Iterator[Bench]:
    """Everything but the VAE layerwise; the exact allocator."""
    pipeline = pipeline or tiny(family)
    residency = {"dit": "layerwise-offload", "text_encoder": "layerwise-offload"}
    declarations = declare(
        pipeline.components, residency, dict.fromkeys(residency, resident_layers)
    )
    size = find_family(family, tiny=True).request
    shape = Shape(size.width, size.height, size.frames, tokens=size.tokens, guidance=guidance)
    with SimulatedCard(
        custom_card(capacity_bytes),
        allocator="exact",
        context_bytes=context_bytes,
        others_bytes=others_bytes,
    ) as card:
        residue = Residue(pipeline)  # what requests leave on a pipeline may be on the card
        try:
            yield Bench(card, pipeline, declarations, shape)
        finally:
            residue.restore()


def verdicts(outcome: Outcome) -> list[Verdict]:
    return [each.judgement.verdict for each in outcome.tries]


def peak_bytes(sweep: Sweep) -> int:
    """The most that tensors held in any phase of any request."""
    return max(
        at.reading.peak_allocated_bytes
        for run in sweep.runs
        for trace in run.traces
        for at in trace.readings
    )


CONTEXT_BYTES, OTHERS_BYTES = 300_000, 500_000


@cache
def settled(family: str, guidance: float = 1.0) -> tuple[Outcome, Sweep]:
    """The loop where nothing is short, beside a context and others, and a sweep under what it
    committed. For who only reads, and has no card of his own in the slot yet."""
    beside = {"context_bytes": CONTEXT_BYTES, "others_bytes": OTHERS_BYTES}
    with bench(family, guidance=guidance, **beside) as test:
        outcome = test.loop()
        again = outcome.host.sweep()
        outcome.close()
    return outcome, again


def peak_needed(family: str) -> int:
    """Bytes that the best candidate takes at its peak."""
    outcome, _ = settled(family)
    return peak_bytes(outcome.planned)


FAMILIES = ("qwen-image-2.1", "qwen-image", "flux.1-dev", "wan2.1-t2v-14b")
each_family = pytest.mark.parametrize("family", FAMILIES)
