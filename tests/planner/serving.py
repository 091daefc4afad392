"""A settled pipeline on a simulated card, to be served with a guard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from bench_card import Bench, bench

from residency.offload.simulated.card import SimulatedCard
from residency.phases.diffusers.host import DiffusersHost
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.shape import Shape
from residency.planner.loop import Outcome
from residency.planner.proof import Transaction
from residency.planner.serving.guard import Guard
from residency.planner.serving.metrics import Metrics

FAMILY = "qwen-image-2.1"


@dataclass
class Served:
    test: Bench
    outcome: Outcome
    outputs: dict[tuple[Shape, int], torch.Tensor] = field(default_factory=dict)

    @property
    def card(self) -> SimulatedCard:
        return self.test.card

    @property
    def pipeline(self) -> DiffusersPipeline:
        return self.test.pipeline

    @property
    def host(self) -> DiffusersHost:
        return self.outcome.host

    @property
    def shape(self) -> Shape:
        return replace(self.test.shape, steps=2)

    def guard(self, **given) -> Guard:
        guard = Guard(**given)
        guard.renew(self.outcome)
        return guard

    def call(self, shape: Shape | None = None, *, seed: int = 0) -> Callable[[], torch.Tensor]:
        return lambda: self.pipeline.run(shape or self.shape, seed=seed).value.cpu()

    def baseline(self, shape: Shape | None = None, *, seed: int = 0) -> torch.Tensor:
        """The output with nothing retained, without a guard."""
        at = shape or self.shape, seed
        if at not in self.outputs:
            with self.at_baseline(), self.host.request(*at[:1], self.host.shapes[0]):
                self.outputs[at] = self.call(shape, seed=seed)()
        return self.outputs[at]

    @contextmanager
    def at_baseline(self) -> Iterator[None]:
        to_baseline = Transaction(self.host, self.host.baseline)
        to_baseline.apply()
        yield
        to_baseline.rollback()

    def retained(self) -> dict[str, frozenset[int]]:
        """Layers on the device by component, of those that are streamed."""
        placements = self.host.placements
        return {name: p.on_device for name, p in placements.items() if hasattr(p, "on_device")}

    def retaining(self) -> list[str]:
        return [use.component for use in self.host.schedule.uses if use.retain_resident_layers]

    @property
    def planned_peak(self) -> int:
        return peak(self.outcome.planned)

    @property
    def baseline_peak(self) -> int:
        return peak(self.outcome.baseline.sweep)

    def leave(self, nbytes: int) -> None:
        """Others take all but so many bytes of the card."""
        self.card.others_bytes = self.card.card.total_bytes - nbytes

    def reset(self) -> None:
        """As it was settled, for the next test."""
        self.card.others_bytes = 0
        self.card.faults.clear()
        Transaction(self.host, self.outcome.committed).apply()
        self.host.release()


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    """As a scrape finds it now; None where there is none with these labels."""
    return metrics.registry.get_sample_value(f"residency_{name}", labels)


def peak(sweep) -> int:
    phases = {at.phase for run in sweep.runs for trace in run.traces for at in trace.readings}
    return max(run.peak_bytes(phase) for run in sweep.runs for phase in phases)


@contextmanager
def settled(family: str = FAMILY, *, changed: dict | None = None, **given) -> Iterator[Served]:
    with bench(family, **given) as test:
        outcome = test.loop(**(changed or {}))
        served = Served(test, outcome)
        yield served
        test.card.others_bytes = 0
        served.outcome.close()
