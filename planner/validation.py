"""Validation: what a sweep with a candidate applied says of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..phases.shape import Shape
from ..phases.warmup import ShapeRun, Sweep
from .plan import Verdict


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    place: tuple[str, Shape] | None = None
    """The phase and shape where it failed, if it was in one."""
    phase: str | None = None
    shape: str | None = None
    shortfall_bytes: int | None = None
    detail: str | None = None


def judge(sweep: Sweep, baseline: Sweep, *, margin_bytes: int) -> Judgement:
    """The first thing that speaks against the candidate, in the order of what is worst."""
    failure = sweep.failure
    if failure is not None:
        shortfall = failure.shortfall
        return Judgement(
            Verdict.OOM if failure.is_oom else Verdict.CRASH,
            (failure.phase, failure.shape) if failure.phase and failure.shape else None,
            failure.phase,
            None if failure.shape is None else str(failure.shape),
            None if shortfall is None else shortfall.short_bytes,
            failure.detail,
        )
    for run, before in zip(sweep.runs, baseline.runs, strict=True):
        refutation = (
            _output(run, before) or _headroom(run, margin_bytes) or _bytes_moved(run, before)
        )
        if refutation is not None:
            return refutation
    return Judgement(Verdict.ACCEPTED)


def _output(run: ShapeRun, before: ShapeRun) -> Judgement | None:
    if run.output is None or before.output is None or torch.equal(run.output, before.output):
        return None
    different = int((run.output != before.output).sum())
    return Judgement(
        Verdict.OUTPUT,
        shape=str(run.asked),
        detail=f"{different} of {before.output.numel()} values differ from the baseline's",
    )


def _headroom(run: ShapeRun, margin_bytes: int) -> Judgement | None:
    for trace in run.traces:
        for at in trace.readings:
            left = at.reading.usable_bytes - at.reading.peak_allocated_bytes
            if left < margin_bytes:
                return Judgement(
                    Verdict.HEADROOM,
                    (at.phase, run.asked),
                    at.phase,
                    str(run.asked),
                    margin_bytes - left,
                    f"{left} bytes were left at the peak, the margin is {margin_bytes}",
                )
    return None


def _bytes_moved(run: ShapeRun, before: ShapeRun) -> Judgement | None:
    if run.h2d_bytes <= before.h2d_bytes:
        return None
    return Judgement(
        Verdict.SLOWER,
        shape=str(run.asked),
        detail=f"{run.h2d_bytes} bytes are copied a request, {before.h2d_bytes} in the baseline",
    )
