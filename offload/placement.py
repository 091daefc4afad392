"""Where a component's weights are, use by use: the interface, and the two placements in one piece.

Resident            on the device from `install` to `remove`
ComponentOffload    on the device during a use, and across a gap where it is kept
LayerwiseOffload    layer by layer, in layerwise.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .copies import CopyStream
from .device import Device
from .errors import OffloadError
from .host import HostBudget
from .layers import Layer, Weights, layer_groups, partition, weigh
from .timing import LayerTimer

if TYPE_CHECKING:
    from torch import nn


class Placement(ABC):
    """A component's way onto the device.

    Between `begin_use` and `release_after_use` the module runs as if it were on the device. After
    an exception anywhere, `release_all` leaves the module on its host masters, and `remove` the
    module as it was before `install`, to the last hook and storage.

    A buffer that the module writes during a use is written on the device and lost when it is
    released: its home is the host master.
    """

    device: Device
    total_layers: int = 0
    resident_layers: int = 0
    _budget: HostBudget | None = None
    timer: LayerTimer | None = None
    """Given one, a placement that streams layers times each use."""
    layers_run_in_use: set[int]
    """Layers that ran in the use under way, or in the last; empty where they aren't streamed."""

    @abstractmethod
    def install(self) -> None: ...

    @abstractmethod
    def remove(self) -> None: ...

    @abstractmethod
    def begin_use(
        self,
        *,
        holds_resident_set: bool,
        passes: int = 1,
        resident: frozenset[int] | None = None,
    ) -> None:
        """Make the module ready to run `passes` times.

        `resident`: layers to hold in this use instead of the declared resident set.
        Raises torch.OutOfMemoryError.
        """

    @abstractmethod
    def release_after_use(
        self, keep_resident: bool = False, retained: frozenset[int] | None = None
    ) -> None:
        """The use has ended: all goes but the resident set and the non-layer weights, and those
        too unless they are kept. `retained`: of the resident set, keep only these layers."""

    @abstractmethod
    def release_all(self) -> None:
        """Full reset, what is kept included, from whatever state."""

    @abstractmethod
    def _all_weights(self) -> tuple[Weights, ...]: ...

    def pin_masters(self, budget: HostBudget) -> None:
        """Copy from pinned host masters from now on, all of them.

        Raises HostMemoryError, having pinned nothing, where the budget is too small, or the host
        can't lock so much, which closes the budget. Raises OffloadError where they are pinned
        under another budget.
        """
        if self._budget not in (None, budget):
            raise OffloadError(
                "the masters are pinned under another budget", hint="call unpin_masters() first"
            )
        self._budget = budget
        try:
            for weights in self._all_weights():
                weights.pin(self.device, budget)
        except BaseException:
            self.unpin_masters()
            raise

    def unpin_masters(self) -> None:
        if self._budget is not None:
            for weights in self._all_weights():
                weights.unpin(self._budget)
            self._budget = None

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Device bytes of all weights."""

    @property
    @abstractmethod
    def non_layer_bytes(self) -> int:
        """Of which in no layer."""

    @property
    @abstractmethod
    def retained_bytes(self) -> int:
        """What `release_after_use(keep_resident=True)` leaves on the device."""

    @abstractmethod
    def use_bytes(self, *, holds_resident_set: bool) -> int:
        """The most that the weights take during a use."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """What each layer weighs, groups one behind another; empty where the component is moved
        in one piece."""
        return ()

    @property
    def resident_set(self) -> frozenset[int]:
        """The layers declared resident, counted over all groups; empty where none is streamed."""
        return frozenset()

    @property
    def non_layer_copy_bytes(self) -> int:
        """What loading the weights of no layer copies."""
        return 0

    @property
    def pinned_charge_bytes(self) -> int:
        """What pinning the masters takes of host memory."""
        return sum(weights.pinned_charge_bytes for weights in self._all_weights())

    def pass_bytes(self, held: frozenset[int]) -> int:
        """Bytes that one pass copies, of the layers that were seen to run and aren't held."""
        return 0

    @abstractmethod
    def saved_bytes(self, *, passes: int) -> int:
        """Bytes that a request doesn't copy when the set is retained into a use of `passes`."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises OffloadError unless every tensor is where this placement's state says."""


class _Whole(Placement):
    def __init__(self, module: nn.Module, device: Device) -> None:
        self.module = module
        self.device = device
        groups = layer_groups(module)
        by_group, rest = partition(module, groups)
        self._layers = weigh(groups, by_group)
        parts = [*(layer for group in by_group for layer in group), rest]
        self.total_layers = self.resident_layers = len(parts) - 1
        self._non_layer_bytes = rest.buffer_bytes
        self._non_layer_copy_bytes = rest.nbytes
        self.layers_run_in_use = set()
        self._weights = Weights(region for part in parts for region in part.regions)
        self._copies = CopyStream(device)
        self._loaded = False

    def _all_weights(self) -> tuple[Weights, ...]:
        return (self._weights,)

    def _onload(self) -> None:
        self._copies.join()
        if not self._loaded:
            self._copies.wait(self._weights.onload(self._copies))
            self._loaded = True

    def _offload(self) -> None:
        self._copies.join()
        self._weights.offload()
        self._loaded = False

    @property
    def weight_bytes(self) -> int:
        return self._weights.buffer_bytes

    @property
    def non_layer_bytes(self) -> int:
        return self._non_layer_bytes

    def use_bytes(self, *, holds_resident_set: bool) -> int:
        return self._weights.buffer_bytes

    def check_integrity(self) -> None:
        self._weights.check_on(self.device if self._loaded else None)


class Resident(_Whole):
    """On the device for good."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self._layers

    @property
    def resident_set(self) -> frozenset[int]:
        return frozenset(range(len(self._layers)))

    @property
    def non_layer_copy_bytes(self) -> int:
        return self._non_layer_copy_bytes

    def install(self) -> None:
        self._onload()

    def remove(self) -> None:
        self._offload()

    def begin_use(
        self,
        *,
        holds_resident_set: bool,
        passes: int = 1,
        resident: frozenset[int] | None = None,
    ) -> None:
        self._copies.join()

    def release_after_use(
        self, keep_resident: bool = False, retained: frozenset[int] | None = None
    ) -> None:
        pass

    def release_all(self) -> None:
        pass

    @property
    def retained_bytes(self) -> int:
        return 0

    def saved_bytes(self, *, passes: int) -> int:
        return 0


class ComponentOffload(_Whole):
    """Whole, for each use."""

    def install(self) -> None:
        pass

    def remove(self) -> None:
        self.release_all()

    def begin_use(
        self,
        *,
        holds_resident_set: bool,
        passes: int = 1,
        resident: frozenset[int] | None = None,
    ) -> None:
        self._onload()

    def release_after_use(
        self, keep_resident: bool = False, retained: frozenset[int] | None = None
    ) -> None:
        if not keep_resident:
            self._offload()

    def release_all(self) -> None:
        self._offload()

    @property
    def retained_bytes(self) -> int:
        return self._weights.buffer_bytes

    def saved_bytes(self, *, passes: int) -> int:
        return self._weights.nbytes
