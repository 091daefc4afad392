"""One measured component: the layers behind each class of the choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ..offload.placement import Placement, Resident
from ..phases.use import ComponentUse
from .choosing.part import LayerClass, PartChoice, Pins


class MeasuredPart:
    """One component, with the layers behind each class.

    `sized`: its sets are the planner's to choose; else they are the declared ones, and only
    whether they are retained is open. `stays`: not even that, it never leaves the device.
    """

    def __init__(
        self,
        component: str,
        placement: Placement,
        uses: Sequence[ComponentUse],
        layers_run: Mapping[tuple[str, str], frozenset[int]],
        *,
        sized: bool,
    ) -> None:
        self.component = component
        self.placement = placement
        self.uses = tuple(uses)
        self.sized = sized
        self.stays = isinstance(placement, Resident)
        self.classes: list[LayerClass] = []
        self.layers: list[tuple[int, ...]] = []
        """For each class, the layers in it, in order."""
        self._classify(layers_run)

    def _classify(self, layers_run: Mapping[tuple[str, str], frozenset[int]]) -> None:
        alike: dict[tuple[str, int, int, tuple[bool, ...]], list[int]] = defaultdict(list)
        for i, layer in enumerate(self.placement.layers):
            # Which layers run is seen where they are streamed; of others all are taken to.
            runs = tuple(
                self.stays or i in layers_run[use.phase, use.component] for use in self.uses
            )
            alike[layer.group, layer.buffer_bytes, layer.copy_bytes, runs].append(i)
        for (group, buffer_bytes, copy_bytes, runs), layers in alike.items():
            self.classes.append(LayerClass(group, len(layers), buffer_bytes, copy_bytes, runs))
            self.layers.append(tuple(layers))

    @property
    def fixed_bytes(self) -> int:
        """Device bytes that come and go with the component: those of no layer, or of all of it
        where it isn't streamed."""
        if self.classes:
            return self.placement.non_layer_bytes
        return self.placement.weight_bytes

    @property
    def fixed_copy_bytes(self) -> int:
        if self.classes:
            return self.placement.non_layer_copy_bytes
        return self.placement.saved_bytes(passes=1)

    @property
    def pins(self) -> Pins:
        if self.sized:
            return Pins()
        counts = self.counts(self.placement.resident_set)
        return Pins(resident=counts, retained=counts, retains=True if self.stays else None)

    @property
    def left_out(self) -> bool:
        """Whether layers that run aren't among those declared."""
        return any(
            any(each.runs) and count < each.count
            for each, count in zip(
                self.classes, self.counts(self.placement.resident_set), strict=True
            )
        )

    def counts(self, layers: frozenset[int]) -> tuple[int, ...]:
        """How many of each class are among `layers`."""
        return tuple(len(layers.intersection(members)) for members in self.layers)

    def resident(self, chosen: PartChoice, use: int) -> frozenset[int]:
        """The layers to hold in a use."""
        if not self.sized:
            return self.placement.resident_set
        return self._pick(chosen.resident[use])

    def retained(self, chosen: PartChoice, use: int) -> frozenset[int]:
        """The layers to hold across the gap behind a use."""
        resident = self.resident(chosen, use)
        return resident if not self.sized else self._pick(chosen.retained[use], of=resident)

    def _pick(self, counts: Sequence[int], of: frozenset[int] | None = None) -> frozenset[int]:
        """As many layers of each class as `counts` says, spread evenly over those in `of`: so
        between two streamed layers there is compute for a copy to hide behind."""
        picked: set[int] = set()
        for members, count in zip(self.layers, counts, strict=True):
            pool = [i for i in members if of is None or i in of]
            picked.update(pool[(2 * j + 1) * len(pool) // (2 * count)] for j in range(count))
        return frozenset(picked)
