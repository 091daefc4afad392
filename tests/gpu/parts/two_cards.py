"""One pipeline, one set of layers, two cards made out of a larger one: opposite decisions.

With the peaks that a simulated card predicts, and the seconds that retaining saves.
"""

from __future__ import annotations

from residency.offload.device import Device, Reading
from residency.offload.hardware import Hardware
from residency.planner.choosing.prices import Pricing
from residency.planner.loop import run_loop

from ..capped import capped
from ..notes import Notes
from ..pipelines import ENCODER, Source
from ..planning import Planning, peaks, retained, told
from ..target import Target


def run(target: Target, notes: Notes) -> None:
    source, why = target.source_for_two_cards()
    notes.note("pipeline", source.name)
    notes.note("pipeline_because", why)
    notes.note("shape", str(source.shape))
    pipeline = source.build()
    weights = sum(each.nbytes for c in pipeline.components for each in c.module.parameters())
    notes.note("weight_bytes", weights)
    planning = Planning(target, source, pipeline)
    measured: dict[str, dict[str, int]] = {}
    with target.device() as device:
        pricing = Pricing.of(Hardware.of(device), {}, None)
        notes.note("copy_rate", pricing.source)
        small, large = source.cards_bytes or _like_them(planning, device, pricing)
        for name, total_bytes in (("small", small), ("large", large)):
            device.release_cache()
            reading, measured[name] = _plan(planning, device, pricing, name, total_bytes, notes)
    # Of the baseline, which is the same on both: what a card has too little of ends it.
    predicted = _predicted(target, source, reading)
    notes.note("peak_predicted_bytes", predicted)
    for name, found in measured.items():
        notes.note(
            f"{name}_peak_predicted_over_measured",
            {phase: predicted[phase] / found[phase] for phase in found},
        )


def _like_them(planning: Planning, device: Device, pricing: Pricing) -> tuple[int, int]:
    needs = planning.needs(device, pricing)
    return needs.too_small_bytes, needs.large_enough_bytes


def _plan(
    planning: Planning,
    device: Device,
    pricing: Pricing,
    name: str,
    total_bytes: int,
    notes: Notes,
) -> tuple[Reading, dict[str, int]]:
    """The reading before, and the peaks of the baseline."""
    with capped(planning.target, device, total_bytes) as card:
        notes.note(f"{name}_card_bytes", card.total_bytes)
        notes.note(f"{name}_usable_bytes", card.usable_bytes)
        notes.note(f"{name}_off_bytes", card.off_bytes)
        reading = device.read()
        outcome = planning.run(device, pricing, explore=1)
        found = dict(peaks(outcome))
        notes.note(f"{name}_retains", list(retained(outcome)))
        notes.note(f"{name}_tries", [told(each) for each in outcome.tries])
        notes.note(f"{name}_peak_measured_bytes", found)
        notes.note(f"{name}_headroom_bytes", {h.phase: h.headroom_bytes for h in outcome.headrooms})
        wanted = (ENCODER,) if name == "large" else ()
        notes.require(
            retained(outcome) == wanted,
            f"the {name} card retains {', '.join(retained(outcome)) or 'nothing'}",
        )
        outcome.close()
    return reading, found


def _predicted(target: Target, source: Source, reading: Reading) -> dict[str, int]:
    """By the same loop on a simulated card with that reading's total, context and others."""
    pipeline = source.build_virtual()
    planning = Planning(target, source, pipeline)
    with target.predicting(reading) as card:
        pricing = Pricing.assumed(card.card)
        settings = planning.settings(pricing, card, measure_only=True)
        outcome = run_loop(planning.host(card, pricing), settings)
        if outcome.failure is not None:
            raise RuntimeError(f"it doesn't run on a simulated card: {outcome.failure.detail}")
        found = dict(peaks(outcome))
        outcome.close()
        del outcome
    return found
