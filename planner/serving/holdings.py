"""What this process holds on the device: its components' weights, and whatever else there is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...offload.device import Reading
from ...offload.layers import module_tensors
from ...phases.component import Component


@dataclass(frozen=True, slots=True)
class Held:
    components: Mapping[str, int]
    """Bytes of each."""
    rest_bytes: int
    """What is allocated besides: for a request under way, an adapter, another model, a leak."""


class Holdings:
    """A component's tensors are those that it has when this is made. What it gets later, such as
    an adapter's parameters, isn't its own."""

    def __init__(self, components: Iterable[Component]) -> None:
        self._tensors = {each.name: module_tensors(each.module) for each in components}

    def at(self, reading: Reading) -> Held:
        """What is held now, of what is allocated in `reading`."""
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
        return Held(held, reading.allocated_bytes - sum(held.values()))
