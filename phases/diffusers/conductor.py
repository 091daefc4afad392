"""Conducting the uses: weights are prepared when a phase begins and released when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ...offload.compiled import retrace, untraced
from ...offload.device import Device, Transfers
from ...offload.placement import Strategy
from ..component import Component
from ..graph import ComponentUse, PhaseGraph
from ..host import Passes, PhaseReading, RequestTrace
from ..limit import Limit
from ..schedule import NOTHING, Schedule
from .watch import Call, phases, watch


class Conductor:
    """Tells from the components' own calls which phase a pipeline is in.

    A use begins when its component is first called in a phase, and ends when the next phase
    begins or the request ends: no code of the pipeline's has to say so. Without a graph each
    component that works is a phase of its own, which is how the graph is found.

    What each use holds is read from `schedule`, which is handed over whole.
    """

    def __init__(
        self,
        components: Iterable[Component],
        strategies: Mapping[str, Strategy],
        device: Device,
    ) -> None:
        self.components = tuple(components)
        self.strategies = strategies
        self.device = device
        self.graph: PhaseGraph | None = None
        self.schedule = NOTHING
        self.limit = Limit()
        self._passes: Passes = {}
        self._entries: frozenset[Call] = frozenset()
        self._handles: list[RemovableHandle] = []
        self._hooks: list[tuple[nn.Module, Callable[..., object]]] = []
        """Every hook that was put on since `install`, and where."""
        self._phase: str | None = None
        self._open: dict[str, ComponentUse] = {}
        self._trace: RequestTrace | None = None
        self._since = Transfers()

    def install(self) -> None:
        """Hook the modules through which the components are entered: each component, its
        children, and what else was seen to be called from outside."""
        self._hooks.clear()
        for component in self.components:
            entered = {component.module, *component.module.children()}
            entered |= {
                component.module.get_submodule(call.entry)
                for call in self._entries
                if call.component == component.name
            }
            for module in entered:
                if not isinstance(module, nn.ModuleList):
                    # before those of a layer that is entered itself, which need the use begun
                    hook = untraced(_Entered(self, component.name))
                    self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
                    self._hooks.append((module, hook))
        retrace()

    def follow(self, schedule: Schedule) -> None:
        """From now on uses hold what `schedule` says. What the components of which it says
        something else have on the device is given up."""
        changed = self.schedule.changed(schedule)
        self.schedule = schedule
        with ExitStack() as undo:
            for component in changed:
                undo.callback(self.strategies[component].placement.release_all)

    def expect(self, passes: Passes) -> None:
        """How often the uses of the requests to come are called; of others the graph says it."""
        self._passes = passes

    def _use(self, phase: str, component: str) -> ComponentUse:
        """As it is to be prepared or finished now: the one place where the schedule is read."""
        if self.graph is None:
            return ComponentUse(phase, component)
        use = self.graph.uses_in(phase)[component]
        passes = self._passes.get(use.at, use.passes)
        return use.holding(self.schedule.hold(phase, component), passes)

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._phase = None
        self._open.clear()

    def hooked(self) -> Iterator[str]:
        """The hooks of ours that are still on a module, in words."""
        for module, hook in self._hooks:
            if any(each is hook for each in module._forward_pre_hooks.values()):
                yield f"a hook of the conductor's is on a {type(module).__name__}"

    @contextmanager
    def request(self) -> Iterator[RequestTrace]:
        """One request. An error inside gives up what the phase under way has on the device."""
        trace = RequestTrace()
        try:
            self._settle()  # uses that were begun outside of any request aren't this one's
            self._begin_reading()
            self._trace = trace
            begin = self._since
            began = self.device.mark() if self.device.traits.timed else None
            yield trace
            self._end_phase()
            trace.transfers = self.device.transfers - begin
            if began is not None:
                trace.seconds = self.device.seconds(began, self.device.mark())
        except BaseException:
            self._phase = None
            with ExitStack() as undo:
                undo.callback(self._open.clear)
                for component in self._open:
                    undo.callback(self.strategies[component].placement.release_all)
            raise
        finally:
            self._trace = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, each component that works is a phase of its own; afterwards the graph is what
        they showed, or None if none worked."""
        self.graph = None
        with watch(self.components, self.enter) as calls:
            yield
            self._end_phase()
        self.graph = PhaseGraph(phases(calls)) if calls else None
        if not self._entries.issuperset(calls):
            self._entries |= {*calls}
            if self._handles:
                self.remove()
                self.install()

    def enter(self, component: str) -> None:
        """`component` is about to work. Raises torch.OutOfMemoryError where its weights don't fit,
        PhaseError where no phase uses it, StoppedError where `limit` says so."""
        self.limit.check()
        if component in self._open:
            return
        phase = self._phase_of(component)
        if phase != self._phase:
            self._end_phase()
            self._phase = phase
            if self._trace is not None:
                self._trace.phase = phase
        use = self._use(phase, component)
        self._open[component] = use
        self.strategies[component].prepare(use)

    def _phase_of(self, component: str) -> str:
        if self.graph is None:
            return component
        return self.graph.phase_of(component, since=self._phase or self.graph.first)

    def _end_phase(self) -> None:
        if self._phase is None:
            return
        if self._trace is not None:
            moved = self.device.transfers - self._since
            self._trace.readings.append(PhaseReading(self._phase, self.device.read(), moved))
        self._settle()
        self._begin_reading()

    def _settle(self) -> None:
        """Finish the uses that are open: those of the phase that ended."""
        while self._open:
            component, use = next(reversed(self._open.items()))
            use = self._use(use.phase, component)
            strategy = self.strategies[component]
            if self._trace is not None:
                ran = frozenset(strategy.placement.layers_run_in_use)
                self._trace.layers_run[use.phase, component] = ran
                if strategy.placement.timer is not None:
                    self._trace.use_times[use.phase, component] = strategy.placement.timer.use()
            strategy.finish(use)
            del self._open[component]
        self._phase = None

    def _begin_reading(self) -> None:
        """Each phase begins without cached blocks. Else a tensor that lives on is put into the
        cached buffer of a layer, and keeps all of it from the layers of the next phase; and what
        a phase reserves at its peak depends on the phases before."""
        self.device.release_cache()
        self.device.reset_peaks()
        self._since = self.device.transfers


@dataclass(frozen=True, slots=True)
class _Entered:
    conductor: Conductor
    component: str

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.conductor.enter(self.component)
