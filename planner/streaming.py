"""How components come to the device with a candidate, and the steps that apply it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..offload.host import HostBudget
from ..offload.layerwise import LayerwiseOffload
from ..offload.placement import Placement
from .candidate import Candidate
from .installation import Installation
from .transaction import Assign, Operation, Pin, Prefetch


@dataclass(frozen=True, slots=True)
class Streaming:
    """How one component is copied."""

    placement: Placement
    prefetch: int
    pinned: bool


def operations(
    installation: Installation,
    candidate: Candidate,
    streaming: Mapping[str, Streaming],
    host_budget_bytes: int | None,
) -> Iterator[Operation]:
    """All that `candidate` changes; `streaming` is by component. Without a host budget nothing is
    pinned."""
    if host_budget_bytes is not None:
        host = HostBudget(host_budget_bytes)
        for each in streaming.values():
            if each.pinned:
                yield Pin(each.placement, host)
    for each in streaming.values():
        if isinstance(each.placement, LayerwiseOffload):
            yield Prefetch(each.placement, each.prefetch)
    for use in candidate.uses:
        yield Assign(installation.graph, use, installation.placements[use.component])
