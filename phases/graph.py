"""The phase graph: what a request does, in order, and which components each phase uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import networkx as nx

from ..offload.errors import PhaseError
from .use import ComponentUse, Gap


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

    def retain(self, use: ComponentUse, retain: bool) -> None:
        """Set `retain_resident_layers` on a use."""
        uses = self.uses_in(use.phase)
        uses[use.component] = replace(uses[use.component], retain_resident_layers=retain)

    def assign(self, use: ComponentUse) -> bool:
        """Set `retain_resident_layers` and the two sets as `use` has them; passes stay.

        Whether that changed anything.
        """
        uses = self.uses_in(use.phase)
        before = uses[use.component]
        uses[use.component] = replace(use, passes=before.passes)
        return uses[use.component] != before

    def is_retained(self, use: ComponentUse) -> bool:
        return self.uses_in(use.phase)[use.component].retain_resident_layers

    @property
    def passes(self) -> dict[tuple[str, str], int]:
        """Passes of each use, by phase and component."""
        return {(use.phase, use.component): use.passes for use in self.uses}

    def expect(self, passes: Mapping[tuple[str, str], int]) -> None:
        """Set how many passes the uses of the request to come have."""
        for (phase, component), count in passes.items():
            uses = self.uses_in(phase)
            uses[component] = replace(uses[component], passes=count)

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
