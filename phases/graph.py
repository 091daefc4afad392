"""The phase graph: what a request does, in order, which components each phase uses, and the gaps
in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import networkx as nx

from ..offload.errors import PhaseError
from .schedule import Hold
from .shape import Shape


@dataclass(frozen=True, slots=True)
class ComponentUse:
    """One interval in which `component` must be ready.

    In a graph it says which component works where, and how often. When it is to be prepared or
    finished, `holding` gives it what the schedule says; `retain_resident_layers` is read when the
    use finishes.
    """

    phase: str
    component: str
    passes: int = 1
    """How often the component is called before the use ends."""
    retain_resident_layers: bool = False
    resident_layers: frozenset[int] = frozenset()
    """The resident set: layers counted over all groups."""
    retained_layers: frozenset[int] = frozenset()
    """Of the resident set, what is retained if the use retains."""

    @property
    def at(self) -> tuple[str, str]:
        return self.phase, self.component

    def holding(self, hold: Hold | None, passes: int) -> ComponentUse:
        """This use under a schedule, of which `hold` is what it says of it."""
        if hold is None:
            return ComponentUse(self.phase, self.component, passes)
        return ComponentUse(
            self.phase,
            self.component,
            passes,
            hold.retain_resident_layers,
            frozenset(hold.resident_set),
            frozenset(hold.retained_set),
        )


@dataclass(frozen=True, slots=True)
class Gap:
    """From the end of `use` to `next_use` of the same component, which may be itself."""

    use: ComponentUse
    next_use: ComponentUse
    phases: tuple[str, ...]
    """The phases in between, in order."""
    wraps: bool
    """Whether it reaches into the next request."""


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    uses: tuple[ComponentUse, ...]


class PhaseGraph:
    """A cycle of phases: requests repeat, so the last phase leads to the first of the next request.

    The nodes of `graph` are phase names with their uses by component; the edge that leads into
    the next request has `wraps`.
    """

    def __init__(self, phases: Iterable[Phase]) -> None:
        self.graph: nx.DiGraph[str] = nx.DiGraph()
        ordered = list(phases)
        if not ordered:
            raise PhaseError(
                "no component worked in the run that was watched",
                hint="hand over a pipeline whose components are torch modules",
            )
        for phase in ordered:
            if phase.name in self.graph:
                raise PhaseError(f"two phases are named {phase.name}")
            self.graph.add_node(phase.name, uses={use.component: use for use in phase.uses})
        names = [phase.name for phase in ordered]
        for name, after in zip(names, names[1:] + names[:1], strict=True):
            self.graph.add_edge(name, after, wraps=after == names[0])
        self._first = names[0]

    @property
    def phases(self) -> tuple[str, ...]:
        """Names, in the order of a request."""
        return tuple(self.graph)

    @property
    def first(self) -> str:
        return self._first

    def uses_in(self, phase: str) -> dict[str, ComponentUse]:
        """The uses of a phase, by component."""
        uses: dict[str, ComponentUse] = self.graph.nodes[phase]["uses"]
        return uses

    @property
    def uses(self) -> Iterator[ComponentUse]:
        for phase in self.graph:
            yield from self.uses_in(phase).values()

    def after(self, phase: str) -> str:
        following: str = next(iter(self.graph.successors(phase)))
        return following

    def phase_of(self, component: str, *, since: str) -> str:
        """The first phase from `since` on, itself included, that uses `component`.

        Raises PhaseError if none does.
        """
        phase = since
        for _ in self.graph:
            if component in self.uses_in(phase):
                return phase
            phase = self.after(phase)
        raise PhaseError(
            f"{component} works, and no phase of {' → '.join(self.phases)} uses it",
            hint="measure the pipeline again with a request that uses it",
        )

    @property
    def passes(self) -> dict[tuple[str, str], int]:
        """Passes of each use, by phase and component."""
        return {use.at: use.passes for use in self.uses}

    def gap(self, use: ComponentUse) -> Gap:
        between: list[str] = []
        phase, wraps = use.phase, False
        while True:
            following = self.after(phase)
            wraps = wraps or self.graph.edges[phase, following]["wraps"]
            phase = following
            if use.component in self.uses_in(phase):
                return Gap(use, self.uses_in(phase)[use.component], tuple(between), wraps)
            between.append(phase)

    def is_like(self, other: PhaseGraph) -> bool:
        """Whether both have the same phases, in order, with the same components."""
        return [(p, [*self.uses_in(p)]) for p in self.phases] == [
            (p, [*other.uses_in(p)]) for p in other.phases
        ]


@dataclass(frozen=True, slots=True)
class Headroom:
    """capacity - others - context - peak - margin, with its terms kept apart."""

    phase: str
    shape: Shape
    capacity_bytes: int
    others_bytes: int
    context_bytes: int
    peak_bytes: int
    """The most that tensors held in the phase, with nothing retained."""
    margin_bytes: int

    @property
    def headroom_bytes(self) -> int:
        taken = self.others_bytes + self.context_bytes + self.peak_bytes + self.margin_bytes
        return self.capacity_bytes - taken
