"""The loop on a capped card, and what it leaves behind, for the parts that plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from residency.offload.device import Device, Reading
from residency.offload.hardware import Hardware
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.planner.choosing.prices import Pricing
from residency.planner.loop import Outcome, Try, run_loop
from residency.planner.proof import Settings
from residency.planner.verdict import Listener, ignore

from .pipelines import ENCODER, Source
from .target import Target


@dataclass(frozen=True, slots=True)
class Needs:
    """Of a pipeline's baseline, and of what may be retained beside it."""

    context_bytes: int
    peak_bytes: int
    """The largest of any phase."""
    retained_bytes: int
    margin_bytes: int

    @property
    def too_small_bytes(self) -> int:
        """A card that runs the baseline, and has a third of what retaining takes besides."""
        return self.baseline_bytes + self.retained_bytes // 3

    @property
    def large_enough_bytes(self) -> int:
        """A card that has half as much again as retaining takes."""
        return self.baseline_bytes + self.retained_bytes * 3 // 2

    @property
    def baseline_bytes(self) -> int:
        return self.context_bytes + self.peak_bytes + self.margin_bytes


@dataclass(frozen=True, slots=True)
class Planning:
    """One pipeline, declared as in `make plan`."""

    target: Target
    source: Source
    pipeline: DiffusersPipeline

    def settings(self, pricing: Pricing, device: Device, **changed: Any) -> Settings:
        given: dict[str, Any] = {
            "margin_bytes": self.target.scale.margin_bytes,
            "pricing": pricing,
            "sample_s": Hardware.of(device).sample_s,
        }
        return Settings(**{**given, **changed})

    def needs(self, device: Device, pricing: Pricing) -> Needs:
        """By a baseline on the whole card, which is as it was afterwards."""
        outcome = self.run(device, pricing, measure_only=True)
        try:
            reading = device.read()
            (encoder,) = (each for each in outcome.host.components() if each.name == ENCODER)
            declared = sum(encoder.layers[i].buffer_bytes for i in encoder.declared)
            return Needs(
                reading.context_bytes,
                max(each.peak_bytes for each in outcome.headrooms),
                declared + encoder.non_layer_bytes,
                self.target.scale.margin_bytes,
            )
        finally:
            outcome.close()

    def host(self, device: Device, pricing: Pricing) -> DiffusersHost:
        return DiffusersHost(
            self.pipeline,
            device,
            (self.source.shape,),
            self.source.declarations(self.pipeline),
            host_bytes=pricing.host_budget_bytes,
        )

    def run(
        self, device: Device, pricing: Pricing, *, listen: Listener = ignore, **changed: Any
    ) -> Outcome:
        """Raises RuntimeError where the baseline doesn't run."""
        settings = self.settings(pricing, device, **changed)
        outcome = run_loop(self.host(device, pricing), settings, listen=listen)
        if outcome.failure is not None:
            raise RuntimeError(f"the baseline doesn't run: {outcome.failure.detail}")
        return outcome


def retained(outcome: Outcome) -> tuple[str, ...]:
    return () if outcome.committed is None else outcome.committed.retaining


def told(each: Try) -> dict[str, Any]:
    judgement = each.judgement
    return {
        "retained": list(each.schedule.retaining),
        "verdict": str(judgement.verdict),
        "phase": judgement.phase,
        "shortfall_bytes": each.shortfall_bytes,
        "predicted_shortfall_bytes": 0 if each.shortage is None else each.shortage.short_bytes,
        "detail": judgement.detail,
        "rolled_back": each.rolled_back,
        "seconds": seconds(each),
    }


def seconds(each: Try) -> dict[str, float] | None:
    """Of a request of the sweep's steps, in turns with the baseline's."""
    if not each.comparisons:
        return None
    (found,) = each.comparisons
    baseline_s, candidate_s = median(found.baseline_s), median(found.candidate_s)
    return {
        "baseline_s": baseline_s,
        "candidate_s": candidate_s,
        "saved_s": baseline_s - candidate_s,
        "noise_s": found.noise_s,
    }


def peaks(outcome: Outcome) -> Mapping[str, int]:
    """Of the baseline, by phase."""
    return {each.phase: each.peak_bytes for each in outcome.headrooms}


def apart_bytes(before: Reading, after: Reading) -> dict[str, int]:
    """What isn't back: allocated by tensors, and missing of what was free in the driver."""
    return {
        "allocated_bytes": after.allocated_bytes - before.allocated_bytes,
        "missing_free_bytes": before.free_bytes - after.free_bytes,
    }
