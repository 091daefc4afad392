"""Where a component's weights are, use by use: the interface, and the two placements in one piece.

Resident            on the device from `install` to `remove`
ComponentOffload    on the device during a use, and across a gap where it is kept
LayerwiseOffload    layer by layer, in layerwise.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

from .clocks import LayerTimer
from .device import Device
from .errors import OffloadError
from .host_memory import HostBudget
from .layers import (
    Buffers,
    CopyStream,
    Layer,
    Weights,
    layer_groups,
    module_tensors,
    partition,
    take_home,
    weigh,
)

if TYPE_CHECKING:
    from torch import nn


class Placement(ABC):
    """A component's way onto the device.

    Between `begin_use` and `release_after_use` the module runs as if it were on the device. After
    an exception anywhere, `release_all` leaves the module on its host masters, and `remove` the
    module as it was before `install`, to the last hook and storage: all but what somebody else
    changed meanwhile. His value stays, on the host. A weight that was given another value isn't
    loaded any more: OffloadError says which, and to settle again.

    A buffer that the module writes during a use is written on the device and lost when it is
    released: its home is the host master.
    """

    total_layers: int = 0
    resident_layers: int = 0
    _budget: HostBudget | None = None
    _hooks: Sequence[object] = ()
    """All that were ever put on modules of ours."""
    timer: LayerTimer | None = None
    """Given one, a placement that streams layers times each use."""
    layers_run_in_use: set[int]
    """Layers that ran in the use under way, or in the last; empty where they aren't streamed."""

    def __init__(self, module: nn.Module, device: Device) -> None:
        self.module = module
        self.device = device
        self.layers_run_in_use = set()
        self._buffers = Buffers(device)
        self._copies = CopyStream(device)

    @abstractmethod
    def install(self) -> None:
        """May be called again after `remove`. Raises OffloadError, having moved nothing, where a
        weight was given another value since the placement was made."""

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
        Raises torch.OutOfMemoryError, and OffloadError, having moved nothing, where a weight that
        isn't on the device was given another value.
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

    @property
    def pinned_under(self) -> HostBudget | None:
        """The budget that the masters are pinned under; None where they are pageable."""
        return self._budget

    def unpin_masters(self) -> None:
        if self._budget is not None:
            for weights in self._all_weights():
                weights.unpin(self._budget)
            self._budget = None

    def _leave_on_host(self) -> None:
        """Bring to the host what of the module is still on the device: it came to a module that was
        handed over on the host, such as a LoRA that was loaded beside a weight there."""
        bound = {id(tensor) for weights in self._all_weights() for tensor in weights.tensors}
        with ExitStack() as others:
            for tensor in module_tensors(self.module):
                ours = id(tensor) in bound and self._buffers.hold(tensor)
                if tensor.device.type == self.device.torch_device.type and not ours:
                    others.callback(take_home, tensor)

    @property
    def allocated_bytes(self) -> int:
        """Device bytes of the buffers made here that are still alive, whoever holds them."""
        return self._buffers.allocated_bytes

    def leftovers(self) -> list[str]:
        """What of ours `remove` has left, in words; empty if nothing."""
        found = [
            left for weights in self._all_weights() for left in weights.leftovers(self._buffers)
        ]
        found += [
            f"{name} is still hooked: {table}"
            for name, layer in self._hooked()
            for table in ("_forward_pre_hooks", "_forward_hooks")
            if any(hook is ours for hook in getattr(layer, table).values() for ours in self._hooks)
        ]
        if self.allocated_bytes:
            found.append(f"{self.allocated_bytes} bytes of device buffers are still held")
        return found

    def _hooked(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules that hooks of ours may be on, by name."""
        yield from self.module.named_modules()

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Device bytes of all weights."""

    @property
    @abstractmethod
    def non_layer_bytes(self) -> int:
        """Of which in no layer."""

    @property
    def copy_bytes(self) -> int:
        """What loading all weights copies."""
        return sum(weights.nbytes for weights in self._all_weights())

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

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises OffloadError unless every tensor is where this placement's state says."""


class _Whole(Placement):
    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__(module, device)
        groups = layer_groups(module)
        by_group, rest = partition(module, groups)
        self._layers = weigh(groups, by_group)
        parts = [*(layer for group in by_group for layer in group), rest]
        self.total_layers = self.resident_layers = len(parts) - 1
        self._non_layer_bytes = rest.buffer_bytes
        self._non_layer_copy_bytes = rest.nbytes
        self._weights = Weights(region for part in parts for region in part.regions)
        self._loaded = False

    def _all_weights(self) -> tuple[Weights, ...]:
        return (self._weights,)

    def _onload(self) -> None:
        self._copies.join()
        if not self._loaded:
            self._copies.wait(self._weights.onload(self._copies, self._buffers))
            self._loaded = True

    def _offload(self) -> None:
        self._copies.join()
        self._loaded = False
        self._weights.offload()

    def remove(self) -> None:
        with ExitStack() as undo:
            undo.callback(self._leave_on_host)
            undo.callback(self.unpin_masters)
            undo.callback(self._offload)

    @property
    def weight_bytes(self) -> int:
        return self._weights.buffer_bytes

    @property
    def non_layer_bytes(self) -> int:
        return self._non_layer_bytes

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


class ComponentOffload(_Whole):
    """Whole, for each use."""

    def install(self) -> None:
        if not self._loaded:
            self._weights.ensure_home()

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


class Use(Protocol):
    """What a strategy knows of a use. The planner sets it; nothing here does."""

    @property
    def retain_resident_layers(self) -> bool: ...

    @property
    def passes(self) -> int:
        """How often the component's layers run before the use ends."""

    @property
    def resident_layers(self) -> frozenset[int] | None:
        """Layers to hold where the resident set is held; None: those declared."""

    @property
    def retained_layers(self) -> frozenset[int] | None:
        """Of those, the ones to retain where the use retains; None: all."""


class Strategy:
    """Prepares and finishes the uses of one component."""

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def prepare(self, use: Use) -> None:
        """The resident set is held only where its layers run again before they would be given
        up: later in this use, or after the gap that it is retained across.

        Raises torch.OutOfMemoryError.
        """
        holds = use.passes > 1 or use.retain_resident_layers
        self.placement.begin_use(
            holds_resident_set=holds, passes=use.passes, resident=use.resident_layers
        )

    def finish(self, use: Use) -> None:
        self.placement.release_after_use(
            keep_resident=use.retain_resident_layers, retained=use.retained_layers
        )
