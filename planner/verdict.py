"""What is said of a candidate: while it is tried, to whoever listens, and in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from ..offload.device import FreeFloor
from ..phases.host import Failure, ShapeRun, Sweep
from ..phases.shape import Shape


class Step(StrEnum):
    BUILDING = "building"
    """The pipeline, from a config or a folder."""
    PLACING = "placing"
    MEASURING = "measuring"
    VERIFYING = "verifying"
    """A plan of an earlier start is applied and swept once."""
    TRYING = "trying"
    COMPARING = "comparing"
    """Its time with the baseline's."""
    REFUTED = "refuted"
    COMMITTED = "committed"
    BASELINE = "baseline"
    """Nothing is retained, and that is the end of it."""


@dataclass(frozen=True, slots=True)
class Event:
    """What the loop says while it works: the CLI and a server's log listen alike."""

    step: Step
    doing: str
    """For people, and without a full stop."""
    card: str = ""
    """On which, where plans are made for several."""

    def __str__(self) -> str:
        return self.doing


Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener that doesn't."""


class Verdict(StrEnum):
    """What validation said of a candidate."""

    ACCEPTED = "accepted"
    OOM = "oom"
    HEADROOM = "headroom"
    """It ran, and left less than the margin free in a phase."""
    SLOWER = "slower"
    """It moved more bytes a request than the baseline, or took longer beyond noise."""
    OUTPUT = "output"
    """Its output isn't the baseline's."""
    CRASH = "crash"
    """An error other than out of memory; or it ended an earlier process."""
    HOST_MEMORY = "host_memory"
    """The host couldn't lock what it pins."""


LEAST = 0.01
"""A difference below this share of the baseline is none: clocks of cards wander by as much."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds of requests at one shape, in the order that they ran; no first run is among them."""

    shape: Shape
    baseline_s: tuple[float, ...]
    candidate_s: tuple[float, ...]

    @property
    def slower_s(self) -> float:
        """Between the medians; negative where the candidate is faster."""
        return median(self.candidate_s) - median(self.baseline_s)

    @property
    def noise_s(self) -> float:
        """How far runs of the same are apart."""
        spreads = (max(each) - min(each) for each in (self.baseline_s, self.candidate_s))
        return max(*spreads, LEAST * median(self.baseline_s))

    @property
    def is_slower(self) -> bool:
        return self.slower_s > self.noise_s


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict
    place: tuple[str, Shape] | None = None
    """The phase and shape where it failed, if it was in one."""
    phase: str | None = None
    shape: str | None = None
    shortfall_bytes: int | None = None
    detail: str | None = None
    rank: int | None = None
    """Which other rank's it is; None: this one's."""
    neighbour_bytes: int = 0
    """What another process took meanwhile, where that explains it; then it isn't held against the
    candidate."""


def judge(
    sweep: Sweep, baseline: Sweep | None, floor: FreeFloor, *, margin_bytes: int
) -> Judgement:
    """The first thing that speaks against the candidate, in the order of what is worst.

    `floor` was kept while it was swept. Without a baseline there is nothing to compare with.
    """
    if sweep.failure is not None:
        return judge_failure(sweep.failure)
    before = {run.asked: run for run in baseline.runs} if baseline is not None else {}
    for run in sweep.runs:
        than = before.get(run.asked)
        refutation = (
            _output(run, than)
            or _headroom(run, floor, margin_bytes)
            or _bytes_moved(run, than)
            or _retries(run, than)
        )
        if refutation is not None:
            return refutation
    return Judgement(Verdict.ACCEPTED)


def judge_failure(failure: Failure) -> Judgement:
    shortfall = failure.shortfall
    return Judgement(
        Verdict.OOM if failure.is_oom else Verdict.CRASH,
        (failure.phase, failure.shape) if failure.phase and failure.shape else None,
        failure.phase,
        None if failure.shape is None else str(failure.shape),
        None if shortfall is None else shortfall.short_bytes,
        failure.detail,
    )


def judge_time(comparisons: Iterable[Comparison]) -> Judgement:
    for each in comparisons:
        if each.is_slower:
            return Judgement(
                Verdict.SLOWER,
                shape=str(each.shape),
                detail=f"{median(each.candidate_s):.4f} s a request, {median(each.baseline_s):.4f} "
                f"s in the baseline, with {each.noise_s:.4f} s of noise",
            )
    return Judgement(Verdict.ACCEPTED)


def _output(run: ShapeRun, before: ShapeRun | None) -> Judgement | None:
    """Bit for bit, or as near as the baseline comes to itself where it doesn't repeat itself."""
    if before is None or run.output is None or before.output is None:
        return None
    near = 2 * before.deviation
    difference = run.output.difference(before.output, near=near)
    if difference is None:
        return None
    itself = f", which differs from itself by {before.deviation:.2g}" if before.deviation else ""
    return Judgement(Verdict.OUTPUT, shape=str(run.asked), detail=f"{difference}{itself}")


def _headroom(run: ShapeRun, floor: FreeFloor, margin_bytes: int) -> Judgement | None:
    for trace in run.traces:
        for at in trace.readings:
            reading = at.reading
            outside = max(reading.outside_bytes, floor.most_outside_bytes)
            left = reading.total_bytes - outside - reading.peak_allocated_bytes
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


def _retries(run: ShapeRun, before: ShapeRun | None) -> Judgement | None:
    """Where time is real, each retry of the allocator waits for the device and gives up its cache:
    a request that needs them every time is at the edge of the card."""
    if before is None or run.seconds is None:
        return None
    now, then = run.retries, before.retries
    if now <= then:
        return None
    return Judgement(
        Verdict.HEADROOM,
        shape=str(run.asked),
        detail=f"the allocator ran out and tried again {now} times a request, {then} in the "
        "baseline",
    )


def _bytes_moved(run: ShapeRun, before: ShapeRun | None) -> Judgement | None:
    if before is None or run.h2d_bytes <= before.h2d_bytes:
        return None
    return Judgement(
        Verdict.SLOWER,
        shape=str(run.asked),
        detail=f"{run.h2d_bytes} bytes are copied a request, {before.h2d_bytes} in the baseline",
    )
