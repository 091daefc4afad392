"""The warmup: each largest shape, twice, so that the gap into the next request counts."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..offload.errors import InputError, PhaseError, StoppedError
from ..offload.frames import cut_off
from ..offload.oom import Shortfall
from .conductor import Conductor, RequestTrace
from .diffusers import DiffusersPipeline
from .prestate import PreState
from .shape import Shape

REQUESTS = 2
STEPS = 2
"""Denoise steps of a warmup request. Later ones are like the second, and take no more memory."""


@dataclass(frozen=True, slots=True)
class ShapeRun:
    """What a sweep saw at one shape."""

    asked: Shape
    run: Shape
    traces: tuple[RequestTrace, ...]
    """Of the requests, in order."""
    output: torch.Tensor | None
    """On the host; None where the data is virtual."""
    deviation: float = 0.0
    """How far the outputs of its requests, which ask for the same, are apart at the most."""

    @property
    def seconds(self) -> float | None:
        """Of a request in the steady state: the last. None where the device has no clock."""
        return self.traces[-1].seconds

    def peak_bytes(self, phase: str) -> int:
        """The most that tensors held in `phase`, over all requests."""
        return max(
            reading.reading.peak_allocated_bytes
            for trace in self.traces
            for reading in trace.readings
            if reading.phase == phase
        )

    def fragmentation_bytes(self, phase: str) -> int:
        """The most that was reserved in `phase` beyond what was allocated: about what is lost.

        Under pressure the allocator releases what is cached, and may lose less or more.
        """
        return max(
            reading.reading.peak_reserved_bytes - reading.reading.peak_allocated_bytes
            for trace in self.traces
            for reading in trace.readings
            if reading.phase == phase
        )

    @property
    def retries(self) -> int:
        """How often the allocator ran out and tried again, in a request of the steady state."""
        last, before = self.traces[-1].readings, self.traces[-2].readings
        return last[-1].reading.alloc_retries - before[-1].reading.alloc_retries

    @property
    def h2d_bytes(self) -> int:
        """Of a request in the steady state: the last."""
        return self.traces[-1].transfers.h2d_bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that ended a sweep, and where. Holds none of the error's tensors."""

    phase: str | None
    shape: Shape | None
    is_oom: bool
    shortfall: Shortfall | None
    detail: str

    @classmethod
    def of(cls, error: BaseException, phase: str | None, shape: Shape | None) -> Failure:
        """What `error` says; its frames let go of what they hold."""
        is_oom = isinstance(error, torch.OutOfMemoryError)
        kind = "" if is_oom else f"{type(error).__name__}: "
        failure = cls(
            phase, shape, is_oom, Shortfall.of(error) if is_oom else None, f"{kind}{error}"
        )
        cut_off(error)
        return failure


@dataclass(frozen=True, slots=True)
class Sweep:
    runs: tuple[ShapeRun, ...]
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """What one request of a sweep made."""

    trace: RequestTrace
    shape: Shape
    output: torch.Tensor | None


class Warmup:
    """Runs a pipeline at the largest shapes of its envelope."""

    def __init__(
        self, pipeline: DiffusersPipeline, conductor: Conductor, shapes: Sequence[Shape]
    ) -> None:
        self.pipeline = pipeline
        self.conductor = conductor
        self.shapes = tuple(shapes)
        self._passes: dict[Shape, dict[tuple[str, str], int]] = {}

    def discover(self) -> Failure | None:
        """Watch a request of each shape; the conductor has the graph of phases afterwards.

        Raises PhaseError where two shapes have different phases, InputError where the pipeline
        refuses one.
        """
        first = None
        for shape in self.shapes:
            with self.conductor.watching():
                result = self.request(shape)
            graph = self.conductor.graph
            if isinstance(result, Failure):
                return replace(result, phase=None if graph is None else graph.phases[-1])
            if graph is None:
                raise PhaseError(f"no component of {self.pipeline.name} worked at {shape}")
            first = first or graph
            if not graph.is_like(first):
                raise PhaseError(
                    f"{shape} runs {' → '.join(graph.phases)}, and {self.shapes[0]} runs "
                    f"{' → '.join(first.phases)}",
                    hint="plan shapes that have different phases apart",
                )
            self._passes[shape] = graph.passes
            self.conductor.graph = first
        return None

    def steps(self, shape: Shape) -> int:
        """Denoise steps that a sweep runs at `shape`."""
        return min(self.pipeline.steps(shape) or STEPS, STEPS)

    def passes(self, shape: Shape) -> dict[tuple[str, str], int]:
        """Of each use at a shape, by phase and component."""
        return self._passes[shape]

    def sweep(self) -> Sweep:
        """Run the shapes, and stop at the first error.

        What requests leave in the pipeline for the next, such as a scheduler's history, is there
        for the second request of a shape, and gone when the sweep ends.
        """
        state = PreState(self.pipeline)
        try:
            return self._sweep()
        finally:
            state.restore()

    def _sweep(self) -> Sweep:
        runs: list[ShapeRun] = []
        for shape in self.shapes:
            done: list[Made] = []
            for _ in range(REQUESTS):
                result = self.request(shape)
                if isinstance(result, Failure):
                    return Sweep(tuple(runs), result)
                done.append(result)
            traces = tuple(request.trace for request in done)
            output = done[-1].output
            apart = max(_apart(each.output, output) for each in done)
            runs.append(ShapeRun(shape, done[-1].shape, traces, output, apart))
        return Sweep(tuple(runs))

    def request(self, shape: Shape) -> Made | Failure:
        """One request of a sweep's steps. Raises InputError where the pipeline refuses it,
        StoppedError where the conductor's limit ends it."""
        conductor = self.conductor
        if conductor.graph is not None and shape in self._passes:
            conductor.graph.expect(self._passes[shape])
        trace = None
        try:
            with conductor.request() as trace, torch.no_grad():
                made = self.pipeline.run(replace(shape, steps=self.steps(shape)))
                defined = conductor.device.is_defined(made.value)
                output = made.value.cpu() if defined else None
            return Made(trace, made.shape, output)
        except (InputError, StoppedError):
            raise
        except Exception as error:
            failure = Failure.of(error, trace.phase if trace else None, shape)
        gc.collect()
        return failure


def _apart(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None or torch.equal(one, other):
        return 0.0
    return float((one.double() - other.double()).abs().nan_to_num(0.0).max())
