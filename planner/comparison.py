"""Whether a candidate is slower than the baseline: both are run in turns, and noise is measured."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

from ..phases.prestate import PreState
from ..phases.shape import Shape
from ..phases.warmup import Failure
from .installation import Installation

ROUNDS = 3

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


def compare(
    installation: Installation, *, rounds: int = ROUNDS
) -> tuple[Comparison, ...] | Failure:
    """Run baseline and candidate in turns at each largest shape. The candidate is applied, before
    and afterwards.

    The first request of each turn isn't counted: it brings in what is retained, or gives it up,
    and may be the first of its shape. Raises StoppedError.
    """
    state = PreState(installation.pipeline)
    try:
        return _compare(installation, rounds)
    finally:
        state.restore()


def _compare(installation: Installation, rounds: int) -> tuple[Comparison, ...] | Failure:
    found = []
    for shape in installation.warmup.shapes:
        baseline_s: list[float] = []
        candidate_s: list[float] = []
        turns = ((baseline_s, installation.at_baseline), (candidate_s, nullcontext))
        for _ in range(rounds):
            for seconds, turn in turns:
                with turn():
                    last = _last_request(installation, shape)
                if isinstance(last, Failure):
                    return last
                seconds.append(last)
        found.append(Comparison(shape, tuple(baseline_s), tuple(candidate_s)))
    return tuple(found)


def _last_request(installation: Installation, shape: Shape) -> float | Failure:
    """Seconds of the second of two requests."""
    first = installation.warmup.request(shape)
    if isinstance(first, Failure):
        return first
    second = installation.warmup.request(shape)
    if isinstance(second, Failure):
        return second
    assert second.trace.seconds is not None, "the device has no clock"
    return second.trace.seconds
