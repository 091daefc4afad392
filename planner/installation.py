"""A pipeline on a device: components placed as declared, and their uses conducted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..offload.device import Device
from ..offload.errors import OffloadError
from ..offload.placement import Placement
from ..offload.strategy import Strategy
from ..phases.component import ComponentGroup
from ..phases.conductor import Conductor
from ..phases.declaration import Declaration
from ..phases.diffusers import DiffusersPipeline
from ..phases.graph import PhaseGraph
from ..phases.shape import Shape
from ..phases.use import ComponentUse
from ..phases.warmup import Warmup
from .transaction import Bind, Conduct, Onload, Operation, Transaction


class Installation:
    """Nothing is moved until the transaction of `transaction()` is applied.

    Raises OffloadError where a component can't be placed as declared, or where two components
    share weights that would have to be in two places.
    """

    def __init__(
        self,
        pipeline: DiffusersPipeline,
        device: Device,
        declarations: Mapping[str, Declaration],
        shapes: Sequence[Shape],
        *,
        prefetch: int = 1,
    ) -> None:
        _check_sharing(pipeline)
        self.prefetch = prefetch
        self.pipeline = pipeline
        self.device = device
        self.declarations = declarations
        self.placements: dict[str, Placement] = {
            component.name: declarations[component.name].place(component, device, prefetch=prefetch)
            for component in pipeline.components
        }
        strategies = {name: Strategy(each) for name, each in self.placements.items()}
        self.conductor = Conductor(pipeline.components, strategies, device)
        self.warmup = Warmup(pipeline, self.conductor, shapes)

    @property
    def graph(self) -> PhaseGraph:
        graph = self.conductor.graph
        assert graph is not None, "discover the phases first"
        return graph

    def transaction(self) -> Transaction:
        operations: list[Operation] = [Bind(self.pipeline, self.device)]
        operations += [Onload(placement) for placement in self.placements.values()]
        operations.append(Conduct(self.conductor))
        return Transaction(self.pipeline, self.device, operations)

    @contextmanager
    def at_baseline(self) -> Iterator[None]:
        """Inside, every use is as declared and retains nothing; afterwards as it was before.

        What was retained is released on the way in, and comes back when it is next used.
        """
        planned = [*self.graph.uses]
        self.assign(ComponentUse(use.phase, use.component) for use in planned)
        try:
            yield
        finally:
            self.assign(planned)

    def assign(self, uses: Iterable[ComponentUse]) -> None:
        """Give uses their sets, and release what is on the device of those that change."""
        changed = {use.component for use in uses if self.graph.assign(use)}
        for component in changed:
            self.placements[component].release_all()

    def _held(self, use: ComponentUse, passes: int) -> frozenset[int]:
        if passes == 1 and not use.retain_resident_layers:
            return frozenset()
        declared = self.placements[use.component].resident_set
        return declared if use.resident_layers is None else use.resident_layers

    def h2d_bytes(self, shape: Shape, swept_bytes: int, uses: Iterable[ComponentUse]) -> int:
        """Bytes of a request at `shape`, from those of a sweep's request, which has fewer steps.

        `uses` are as they were in the sweep.
        """
        served = self.served_passes(shape)
        more = 0
        for use in uses:
            passes = self.warmup.passes(shape)[use.phase, use.component]
            a_pass = self.placements[use.component].pass_bytes(self._held(use, passes))
            more += a_pass * (served[use.phase, use.component] - passes)
        return swept_bytes + more

    def served_passes(self, shape: Shape) -> dict[tuple[str, str], int]:
        """Passes of each use in a request of all its steps, where a sweep runs fewer."""
        swept = self.warmup.steps(shape)
        steps = self.pipeline.steps(shape) or swept
        return {
            (phase, component): passes * steps // swept
            if ComponentGroup.of(component) is ComponentGroup.DIT
            else passes
            for (phase, component), passes in self.warmup.passes(shape).items()
        }


def _check_sharing(pipeline: DiffusersPipeline) -> None:
    owners: dict[int, str] = {}
    for component in pipeline.components:
        for tensor in (*component.module.parameters(), *component.module.buffers()):
            owner = owners.setdefault(tensor.untyped_storage()._cdata, component.name)
            if owner != component.name and tensor.numel():
                raise OffloadError(
                    f"{owner} and {component.name} of {pipeline.name} share a storage of "
                    f"{tensor.untyped_storage().nbytes()} bytes",
                    hint="give each component weights of its own before it is planned",
                )
