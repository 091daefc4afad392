"""The warmup: each largest shape, twice, so that the gap into the next request counts."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..offload.errors import InputError, PhaseError
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
        seen: BaseException | None = error
        while seen is not None:
            traceback.clear_frames(seen.__traceback__)
            seen.__traceback__ = None
            seen = seen.__context__
        return failure


@dataclass(frozen=True, slots=True)
class Sweep:
    runs: tuple[ShapeRun, ...]
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class _Request:
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
                result = self._request(shape)
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
            done: list[_Request] = []
            for _ in range(REQUESTS):
                result = self._request(shape)
                if isinstance(result, Failure):
                    return Sweep(tuple(runs), result)
                done.append(result)
            traces = tuple(request.trace for request in done)
            runs.append(ShapeRun(shape, done[-1].shape, traces, done[-1].output))
        return Sweep(tuple(runs))

    def _request(self, shape: Shape) -> _Request | Failure:
        conductor = self.conductor
        if conductor.graph is not None and shape in self._passes:
            conductor.graph.expect(self._passes[shape])
        trace = None
        try:
            with conductor.request() as trace, torch.no_grad():
                made = self.pipeline.run(replace(shape, steps=self.steps(shape)))
                defined = conductor.device.is_defined(made.value)
                output = made.value.cpu() if defined else None
            return _Request(trace, made.shape, output)
        except InputError:
            raise
        except Exception as error:
            failure = Failure.of(error, trace.phase if trace else None, shape)
        gc.collect()
        return failure
