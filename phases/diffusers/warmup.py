"""The warmup: requests at the largest shapes, of few steps."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...offload.errors import InputError, PhaseError, StoppedError
from ..host import Failure, Made, Output, Passes
from ..shape import Shape
from .conductor import Conductor
from .pipeline import DiffusersPipeline

STEPS = 2
"""Denoise steps of a warmup request. Later ones are like the second, and take no more memory."""


class Warmup:
    """Runs a pipeline at the largest shapes of its envelope."""

    def __init__(
        self, pipeline: DiffusersPipeline, conductor: Conductor, shapes: Sequence[Shape]
    ) -> None:
        self.pipeline = pipeline
        self.conductor = conductor
        self.shapes = tuple(shapes)
        self._passes: dict[Shape, Passes] = {}

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

    def passes(self, shape: Shape) -> Passes:
        """Of each use at a shape, by phase and component."""
        return self._passes[shape]

    def request(self, shape: Shape) -> Made | Failure:
        """One request of a sweep's steps. Raises InputError where the pipeline refuses it,
        StoppedError where the conductor's limit ends it."""
        conductor = self.conductor
        conductor.expect(self._passes.get(shape, {}))
        trace = None
        try:
            with conductor.request() as trace, torch.no_grad():
                made = self.pipeline.run(replace(shape, steps=self.steps(shape)))
                defined = conductor.device.is_defined(made.value)
                output = TensorOutput(made.value.cpu()) if defined else None
            return Made(trace, made.shape, output)
        except (InputError, StoppedError):
            raise
        except Exception as error:
            failure = Failure.of(error, trace.phase if trace else None, shape)
        gc.collect()
        return failure


@dataclass(frozen=True, slots=True)
class TensorOutput:
    """Images or frames, on the host."""

    value: torch.Tensor

    def apart(self, other: Output) -> float:
        assert isinstance(other, TensorOutput)
        if torch.equal(self.value, other.value):
            return 0.0
        return float((self.value.double() - other.value.double()).abs().nan_to_num(0.0).max())

    def difference(self, other: Output, *, near: float) -> str | None:
        assert isinstance(other, TensorOutput)
        if torch.allclose(self.value, other.value, rtol=0.0, atol=near, equal_nan=True):
            return None
        different = int((self.value != other.value).sum())
        return f"{different} of {other.value.numel()} values differ from the baseline's"
