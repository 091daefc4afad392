"""Our own offload under a diffusers pipeline, or a program of the user's that is like one."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch

from ...offload.clocks import LayerTimer
from ...offload.device import Device, Reading
from ...offload.errors import OffloadError
from ...offload.host_memory import HostBudget
from ...offload.layers import module_tensors
from ...offload.layerwise import LayerwiseOffload
from ...offload.placement import Placement, Resident, Strategy
from ..component import ComponentGroup, Declaration
from ..graph import PhaseGraph
from ..host import (
    Change,
    ComponentBytes,
    Failure,
    Host,
    Made,
    Passes,
    RequestTrace,
    Sweep,
    check_undone,
    undo,
)
from ..identity import AdapterPrint, ComponentPrint, DeclarationPrint, HostIdentity, libraries
from ..limit import Limit
from ..schedule import NOTHING, Hold, Schedule
from ..shape import Shape
from .conductor import Conductor
from .pipeline import DiffusersPipeline
from .structure import Structure, class_path, pipeline_path
from .undo import Bind, Conduct, Follow, Pin, Place, Prefetch, Residue
from .warmup import Warmup

LOAD = "load"
"""Where a failure is said to be that came before any phase: resident weights didn't fit."""


class DiffusersHost(Host):
    """The components are on the host, and nothing is moved until `open`.

    `sized`: components whose sets the planner chooses. `host_bytes`: for pinned masters; None:
    nothing is pinned, and pinning isn't counted. Tells phases from the components' own calls.

    Raises OffloadError where a component can't be placed as declared, or where two components
    share weights that would have to be in two places.
    """

    def __init__(
        self,
        pipeline: DiffusersPipeline,
        device: Device,
        envelope: Iterable[Shape],
        declarations: Mapping[str, Declaration],
        *,
        sized: Iterable[str] = (),
        prefetch: int = 1,
        host_bytes: int | None = None,
    ) -> None:
        _check_sharing(pipeline)
        self.pipeline = pipeline
        self.device = device
        self.declarations = declarations
        self.sized = frozenset(sized)
        self.prefetch = prefetch
        self.host_bytes = host_bytes
        self.name = pipeline.name
        self.identity = device.identity
        self.traits = device.traits
        self.driver = device.driver
        self._asked = tuple(envelope)
        self.shapes = pipeline.largest(self._asked)
        self.baseline = NOTHING
        self.placements: dict[str, Placement] = {
            component.name: declarations[component.name].place(component, device, prefetch=prefetch)
            for component in pipeline.components
        }
        strategies = {name: Strategy(each) for name, each in self.placements.items()}
        self._conductor = Conductor(pipeline.components, strategies, device)
        self._warmup = Warmup(pipeline, self._conductor, self.shapes)
        self._put_on: list[Change] = []
        self._is_found = False
        self._is_tidied = False
        self._tensors = {each.name: module_tensors(each.module) for each in pipeline.components}

    @property
    def graph(self) -> PhaseGraph:
        graph = self._conductor.graph
        assert graph is not None, "open it first"
        return graph

    @property
    def is_open(self) -> bool:
        return bool(self._put_on)

    @property
    def schedule(self) -> Schedule:
        return self._conductor.schedule

    @property
    def limit(self) -> Limit:
        return self._conductor.limit

    @limit.setter
    def limit(self, limit: Limit) -> None:
        self._conductor.limit = limit

    def read(self) -> Reading:
        return self.device.read()

    def portrait(self) -> HostIdentity:
        pipeline = self.pipeline
        found = {each.name: Structure.of(each.module) for each in pipeline.components}
        paths = {each.name: class_path(each.module) for each in pipeline.components}
        path = pipeline_path(pipeline.pipeline)
        return HostIdentity(
            pipeline=path,
            libraries=tuple(libraries([path, *paths.values()])),
            components=tuple(
                ComponentPrint(
                    name=name,
                    class_path=paths[name],
                    weight_bytes=structure.weight_bytes,
                    structure=structure.digest,
                )
                for name, structure in sorted(found.items())
            ),
            adapters=tuple(
                AdapterPrint(component=name, **asdict(each))
                for name, structure in sorted(found.items())
                for each in structure.adapters
            ),
            declarations=tuple(
                DeclarationPrint(
                    component=name,
                    mode=declared.mode,
                    resident_layers=declared.resident_layers,
                    sized=name in self.sized,
                )
                for name, declared in sorted(self.declarations.items())
            ),
            envelope=tuple(self._envelope()),
            prefetch=self.prefetch,
        )

    def _envelope(self) -> list[str]:
        # Of shapes that cover one another the first is kept: sorted, that is always the same one.
        completed = sorted((self.completed(shape) for shape in self._asked), key=str)
        return sorted(map(str, self.pipeline.largest(completed)))

    def completed(self, shape: Shape) -> Shape:
        return self.pipeline.completed(shape)

    def components(self) -> tuple[ComponentBytes, ...]:
        return tuple(self._bytes_of(name, each) for name, each in self.placements.items())

    def _bytes_of(self, name: str, placement: Placement) -> ComponentBytes:
        declared = self.declarations[name]
        return ComponentBytes(
            name=name,
            residency=declared.mode,
            layers=placement.layers,
            weight_bytes=placement.weight_bytes,
            non_layer_bytes=placement.non_layer_bytes,
            copy_bytes=placement.copy_bytes,
            non_layer_copy_bytes=placement.non_layer_copy_bytes,
            pinned_charge_bytes=placement.pinned_charge_bytes,
            declared=placement.resident_set,
            total_layers=placement.total_layers,
            resident_layers=placement.resident_layers,
            stays=isinstance(placement, Resident),
            sized=name in self.sized,
            fixed=declared.fixed,
        )

    def passes(self, shape: Shape) -> Passes:
        return self._warmup.passes(shape)

    def served_passes(self, shape: Shape) -> Passes:
        return self._scaled(shape, self.pipeline.steps(shape))

    def _both_passes(self, shape: Shape) -> tuple[Passes, Passes]:
        return self.passes(shape), self.served_passes(shape)

    def _scaled(self, like: Shape, steps: int | None) -> Passes:
        """The passes of a sweep's request at `like`, for so many steps."""
        swept = self._warmup.steps(like)
        return {
            (phase, component): passes * (steps or swept) // swept
            if ComponentGroup.of(component) is ComponentGroup.DIT
            else passes
            for (phase, component), passes in self._warmup.passes(like).items()
        }

    def open(self) -> Failure | None:
        steps: list[Change] = [Bind(self.pipeline, self.device)]
        steps += map(Place, self.placements.values())
        steps.append(Conduct(self._conductor))
        try:
            for step in steps:
                self._put_on.append(step)
                step.apply()
        except torch.OutOfMemoryError as error:
            return Failure.of(error, LOAD, None)
        if not self._is_found:
            failure = self._discover()
            if failure is not None:
                return failure
        self._conductor.follow(self.baseline)
        return None

    def _discover(self) -> Failure | None:
        with self._tidied():
            failure = self._warmup.discover()
        if failure is None:
            self._is_found = True
            self.baseline = Schedule(uses=tuple(self._baseline()))
        return failure

    def _baseline(self) -> Iterator[Hold]:
        for name, placement in self.placements.items():
            if isinstance(placement, Resident):
                continue
            for use in self.graph.uses:
                if use.component == name:
                    passes = (by[use.at] for s in self.shapes for by in self._both_passes(s))
                    held = placement.resident_set if max(passes) > 1 else ()
                    yield Hold(
                        phase=use.phase,
                        component=name,
                        retain_resident_layers=False,
                        resident_set=tuple(sorted(held)),
                        retained_set=(),
                        prefetch=self.prefetch,
                        pinned=False,
                    )

    def close(self) -> None:
        if not self._put_on:
            return
        errors = undo(self._put_on)
        self._conductor.schedule = self.baseline
        gc.collect()
        self.device.release_cache()
        check_undone(errors, self._left_on())

    def _left_on(self) -> Iterator[str]:
        """What of ours is still there, with everything taken off."""
        yield from self.pipeline.bound()
        yield from self._conductor.hooked()
        for name, placement in self.placements.items():
            for each in placement.leftovers():
                yield f"{name}: {each}"

    def steps(self, schedule: Schedule) -> tuple[Change, ...]:
        budget = None
        if self.host_bytes is not None:
            under = (each.pinned_under for each in self.placements.values())
            budget = next(filter(None, under), None) or HostBudget(self.host_bytes)
        ways = {each.component: self.placements[each.component] for each in schedule.components}
        steps: list[Change] = []
        for each in schedule.components:
            steps.append(Pin(ways[each.component], budget if each.pinned else None))
        for each in schedule.components:
            placement = ways[each.component]
            if isinstance(placement, LayerwiseOffload):
                steps.append(Prefetch(placement, each.prefetch))
        return (*steps, Follow(self._conductor, schedule))

    def release(self) -> None:
        with ExitStack() as undo:
            for placement in self.placements.values():
                undo.callback(placement.release_all)

    def check_restored(self) -> None:
        gc.collect()
        self.device.release_cache()
        check_undone((), self._differences())

    def _differences(self) -> Iterator[str]:
        """Where what we put on isn't as the schedule in effect has it, with nothing retained."""
        ways = {each.component: each for each in self.schedule.components}
        for name, placement in self.placements.items():
            try:
                placement.check_integrity()
            except OffloadError as error:
                yield f"{name}: {error}"
            if name not in ways:
                continue
            if placement.allocated_bytes:
                yield f"{name}: {placement.allocated_bytes} bytes of its buffers are still there"
            pinned = placement.pinned_under is not None
            if pinned != (ways[name].pinned and self.host_bytes is not None):
                yield f"{name}: its masters are {'pinned' if pinned else 'pageable'}"
            depth = getattr(placement, "prefetch", ways[name].prefetch)
            if depth != ways[name].prefetch:
                yield f"{name}: it fetches {depth} layers ahead"

    def measure(self) -> Sweep:
        if self.traits.timed:
            for placement in self.placements.values():
                if isinstance(placement, LayerwiseOffload):
                    placement.timer = LayerTimer(self.device)
        try:
            return self.sweep()
        finally:
            for placement in self.placements.values():
                placement.timer = None

    def sweep(self) -> Sweep:
        """What requests leave in the pipeline for the next, such as a scheduler's history, is there
        for the second request of a shape, and gone when the sweep ends."""
        with self._tidied():
            return super().sweep()

    def run(self, shape: Shape) -> Made | Failure:
        with self._tidied():
            return self._warmup.request(shape)

    @contextmanager
    def _tidied(self) -> Iterator[None]:
        """What is run inside leaves nothing on the pipeline. The outermost block counts."""
        if self._is_tidied:
            yield
            return
        residue, self._is_tidied = Residue(self.pipeline), True
        try:
            yield
        finally:
            self._is_tidied = False
            residue.restore()

    @contextmanager
    def request(self, asked: Shape, like: Shape) -> Iterator[RequestTrace]:
        self._conductor.expect(self._expected(asked, like))
        with torch.no_grad(), self._conductor.request() as trace:
            yield trace

    def _expected(self, asked: Shape, like: Shape) -> Passes:
        """By phase and component, for a request at `asked` that is run as the validated `like`.

        The number itself only decides what is fetched ahead where a pass ends: where fewer or more
        run, a layer is copied in vain or waited for. Whether it is 1 decides whether the resident
        set is held, so it is 1 where nothing was held when `like` was validated, and else more.
        """
        validated, served = (
            self._warmup.passes(like),
            self._scaled(like, self.pipeline.steps(asked)),
        )
        expected = {}
        for at, passes in validated.items():
            hold = self.schedule.hold(*at)
            is_held = passes > 1 or (hold is not None and hold.retain_resident_layers)
            expected[at] = max(served[at], min(passes, 2)) if is_held else 1
        return expected

    def held_bytes(self) -> dict[str, int]:
        """A component's tensors are those that it had when it was placed. What it gets later, such
        as an adapter's parameters, isn't its own."""
        held = dict.fromkeys(self._tensors, 0)
        seen: set[int] = set()
        for name, tensors in self._tensors.items():
            for tensor in tensors:
                if tensor.device.type == "cpu":
                    continue
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    held[name] += storage.nbytes()
        return held

    def reclaim(self) -> None:
        gc.collect()
        self.device.synchronize()
        self.device.release_cache()


def _check_sharing(pipeline: DiffusersPipeline) -> None:
    owners: dict[int, str] = {}
    for component in pipeline.components:
        for tensor in module_tensors(component.module):
            if tensor.layout is not torch.strided:
                continue  # no placement takes it, and says so
            owner = owners.setdefault(tensor.untyped_storage()._cdata, component.name)
            if owner != component.name and tensor.numel():
                raise OffloadError(
                    f"{owner} and {component.name} of {pipeline.name} share a storage of "
                    f"{tensor.untyped_storage().nbytes()} bytes",
                    hint="give each component weights of its own before it is planned",
                )
