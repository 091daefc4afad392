"""Pipelines on a simulated card, with their components placed and their uses conducted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from residency.offload.cards import find_card
from residency.offload.placement import Placement, Strategy, Use
from residency.offload.simulated.card import SimulatedCard
from residency.phases.component import Component, declare
from residency.phases.diffusers.conductor import Conductor
from residency.phases.diffusers.families import find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.diffusers.undo import Residue
from residency.phases.diffusers.warmup import Warmup
from residency.phases.graph import ComponentUse
from residency.phases.host import Failure, Host, Made, Sweep
from residency.phases.schedule import Hold, Schedule
from residency.phases.shape import Shape

WIDTH = 8


class Stack(nn.Module):
    """Layers in a row, behind an embedding that is in no layer."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Not a forward: enters by a child."""
        return self.embed(x)

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Not a forward either: enters by the layers themselves."""
        for layer in self.layers:
            x = layer(x)
        return x


class Codec(nn.Module):
    """A VAE: it has no forward of its own that anybody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)


def toys() -> tuple[Component, ...]:
    """A text encoder, a denoiser and a VAE."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = {"text_encoder": Stack(), "transformer": Stack(), "vae": Codec()}
    return tuple(Component(name, module) for name, module in made.items())


def paint(
    components: Sequence[Component], x: torch.Tensor, *, steps: int = 2, prompts: int = 1
) -> torch.Tensor:
    """What a pipeline does with them."""
    parts = {component.name: component.module for component in components}
    for _ in range(prompts):
        x = parts["text_encoder"](x)
    for _ in range(steps):
        x = parts["transformer"](x)
    return parts["vae"].decode(x) if "vae" in parts else x


class TellingStrategy(Strategy):
    """Also tells a log what it is told."""

    def __init__(self, placement: Placement, tell: Callable[[str], None]) -> None:
        super().__init__(placement)
        self._tell = tell

    def prepare(self, use: Use) -> None:
        self._tell(f"prepare {use.phase}/{use.component}")
        super().prepare(use)

    def finish(self, use: Use) -> None:
        self._tell(f"finish {use.phase}/{use.component}")
        super().finish(use)


@dataclass
class Stage:
    card: SimulatedCard
    components: tuple[Component, ...]
    placements: dict[str, Placement]
    conductor: Conductor
    log: list[str] = field(default_factory=list)
    """What the strategies were told, in order."""

    def retain(self, use: ComponentUse, retained: bool = True) -> None:
        """From the next time that it is prepared or finished, `use` retains what was declared."""
        conductor, placement = self.conductor, self.placements[use.component]
        declared = tuple(sorted(placement.resident_set))
        hold = Hold(
            phase=use.phase,
            component=use.component,
            retain_resident_layers=retained,
            resident_set=declared,
            retained_set=declared if retained else (),
            prefetch=getattr(placement, "prefetch", 0),
            pinned=False,
        )
        others = [each for each in conductor.schedule.uses if each.at != use.at]
        conductor.schedule = Schedule(uses=(*others, hold))

    def hold_what_is_declared(self) -> None:
        for use in self.conductor.graph.uses:
            self.retain(use, False)

    def check_integrity(self) -> None:
        self.card.check_integrity()
        for placement in self.placements.values():
            placement.check_integrity()


@contextmanager
def staged(
    components: Sequence[Component],
    *,
    residency: Mapping[str, str] | None = None,
    resident_layers: Mapping[str, str] | None = None,
    virtual: bool = False,
    card: str = "RTX 5090",
) -> Iterator[Stage]:
    """Installed and conducted inside the block; afterwards put back."""
    allocator = "caching" if virtual else "exact"
    with SimulatedCard(find_card(card), allocator=allocator, virtual=virtual) as device:
        declared = declare(components, residency or {}, resident_layers or {})
        placements = {c.name: declared[c.name].place(c, device, prefetch=1) for c in components}
        log: list[str] = []
        strategies = {n: TellingStrategy(each, log.append) for n, each in placements.items()}
        conductor = Conductor(components, strategies, device)
        for placement in placements.values():
            placement.install()
        conductor.install()
        try:
            yield Stage(device, tuple(components), placements, conductor, log)
        finally:
            conductor.remove()
            for placement in placements.values():
                placement.remove()


def tiny(name: str) -> DiffusersPipeline:
    family = find_family(name, tiny=True)
    return DiffusersPipeline(family.build(), name=name, request=family.request)


@dataclass
class PipelineStage(Stage):
    pipeline: DiffusersPipeline = field(kw_only=True)
    warmup: Warmup = field(kw_only=True)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.warmup.shapes

    def run(self, shape: Shape) -> Made | Failure:
        return self.warmup.request(shape)

    def discover(self) -> Failure | None:
        """And from then on uses hold what was declared, as in a baseline."""
        failure = self.warmup.discover()
        if failure is None:
            self.hold_what_is_declared()
        return failure

    def sweep(self) -> Sweep:
        residue = Residue(self.pipeline)
        try:
            return Host.sweep(self)
        finally:
            residue.restore()


@contextmanager
def staged_pipeline(
    pipeline: DiffusersPipeline,
    shapes: Sequence[Shape] = (),
    *,
    residency: Mapping[str, str] | None = None,
    resident_layers: Mapping[str, str] | None = None,
    virtual: bool = False,
    card: str = "RTX 5090",
) -> Iterator[PipelineStage]:
    """Bound as well. What runs left on the pipeline and in caches of methods is dropped."""
    before = Residue(pipeline)
    try:
        with staged(
            pipeline.components,
            residency=residency,
            resident_layers=resident_layers,
            virtual=virtual,
            card=card,
        ) as stage:
            pipeline.bind(stage.card)
            warmup = Warmup(pipeline, stage.conductor, shapes)
            try:
                yield PipelineStage(
                    stage.card,
                    stage.components,
                    stage.placements,
                    stage.conductor,
                    stage.log,
                    pipeline=pipeline,
                    warmup=warmup,
                )
            finally:
                pipeline.unbind()
    finally:
        before.restore()


def anatomy(components: Sequence[Component]) -> dict[str, object]:
    """All that hangs on the modules: attributes, tables with their keys, and where tensors are.

    Objects by their address: compare while they live.
    """
    found: dict[str, object] = {}
    for component in components:
        for path, module in component.module.named_modules(prefix=component.name):
            for name, value in vars(module).items():
                keys = list(value) if isinstance(value, dict | set) else id(value)
                found[f"{path}.{name}"] = keys
        for path, tensor in component.module.state_dict(keep_vars=True).items():
            found[f"{component.name}.{path}:"] = (id(tensor), tensor.device, tensor.data_ptr())
    return found
