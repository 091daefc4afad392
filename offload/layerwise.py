"""Layerwise offload: a module's layers come from host memory as they run.

The device memory of one module is three parts, and each byte is in one of them:

    non-layer weights   from the start of a use to its end, or across the gap with the resident set
    resident set        the declared layers, where holding them saves a copy: in a use of several
                        passes, or retained; each in a buffer of its own
    streamed window     1 + prefetch buffers of the largest streamed layer, from the first streamed
                        layer to the end of the use

Buffers are allocated and freed on the compute stream and filled by a `CopyStream`; compute waits
for the copy of a layer before the layer runs. So no buffer needs `record_stream`, and the window
never grows beyond its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .compiled import retrace, untraced
from .device import Device, Event
from .errors import OffloadError
from .host_memory import HostBudget
from .layers import Layer, LayerGroup, Weights, layer_groups, partition, weigh
from .placement import Placement


@dataclass(slots=True)
class _Loaded:
    """A layer on the device: its buffer, and the event of its copy until compute waited for it."""

    buffer: torch.Tensor
    copied: Event | None
    streamed: bool


class LayerwiseOffload(Placement):
    """Streams the layers of `module` to `device`; `resident_layers` of each group, the leading
    ones, are its resident set. With `pin`, copies come from pinned host masters charged to it.

    Raises OffloadError if the module has no layer groups, or counts that don't fit them.
    """

    def __init__(
        self,
        module: nn.Module,
        device: Device,
        *,
        resident_layers: Sequence[int] = (),
        prefetch: int = 1,
        pin: HostBudget | None = None,
    ) -> None:
        super().__init__(module, device)
        self.prefetch = prefetch
        self.pin = pin
        self.groups = layer_groups(module)
        if not self.groups:
            raise OffloadError(
                f"{type(module).__name__} has no ModuleList, so it has no layers to stream",
                hint="make it resident or component-offload",
            )
        counts = tuple(resident_layers) or (0,) * len(self.groups)
        _check_counts(self.groups, counts, prefetch)
        by_group, self._rest = partition(module, self.groups)
        self._by_group = by_group
        self._layers = [weights for group in by_group for weights in group]
        self._modules = [layer for group in self.groups for layer in group.layers]
        self._resident = frozenset(_leading(by_group, counts))
        self.total_layers = len(self._layers)
        self.resident_layers = len(self._resident)

        self._hooks: list[Callable[..., None]] = []
        self._handles: list[RemovableHandle] = []
        self._loaded: dict[int, _Loaded] = {}
        self._rest_loaded = False
        self._window: list[torch.Tensor] = []
        self._slots = 0
        self._held: frozenset[int] = frozenset()
        self._in_use = False
        self._ahead: dict[int, tuple[int, ...]] = {}
        self._forget_order()

    def _forget_order(self) -> None:
        self._order = LayerOrder([len(group) for group in self._by_group])
        self._ahead.clear()
        self.layers_run: set[int] = set()
        self.layers_run_in_use = set()

    @property
    def layers(self) -> tuple[Layer, ...]:
        return weigh(self.groups, self._by_group)

    @property
    def resident_set(self) -> frozenset[int]:
        return self._resident

    @property
    def weight_bytes(self) -> int:
        return self.non_layer_bytes + sum(weights.buffer_bytes for weights in self._layers)

    @property
    def non_layer_copy_bytes(self) -> int:
        return self._rest.nbytes

    @property
    def non_layer_bytes(self) -> int:
        return self._rest.buffer_bytes

    @property
    def on_device(self) -> frozenset[int]:
        """Layers on the device now."""
        return frozenset(self._loaded)

    def install(self) -> None:
        """Pin the host masters, if a budget for it was given, and hook the layers.

        Raises HostMemoryError where the budget is too small, OffloadError if installed already.
        """
        if self._handles:
            raise OffloadError("the layers are hooked already", hint="call remove() first")
        for weights in self._all_weights():
            weights.ensure_home()
        self._forget_order()
        if self.pin is not None:
            self.pin_masters(self.pin)
        for i, layer in enumerate(self._modules):
            enter, leave = untraced(_Enter(self, i)), untraced(_Leave(self, i))
            self._hooks += [enter, leave]
            self._handles.append(layer.register_forward_pre_hook(enter))
            self._handles.append(layer.register_forward_hook(leave))
        retrace()

    def remove(self) -> None:
        """`release_all`, the hooks gone without trace, and nothing pinned."""
        with ExitStack() as undo:
            undo.callback(self._leave_on_host)
            undo.callback(self.unpin_masters)
            undo.callback(self._unhook)
            undo.callback(self.release_all)

    def _unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hooked(self) -> Iterator[tuple[str, nn.Module]]:
        modules = dict(self.module.named_modules())
        there = {*modules.values()}
        yield from modules.items()
        for i, layer in enumerate(self._modules):
            if layer not in there:
                yield f"layer {i}, which was taken out,", layer

    def _all_weights(self) -> tuple[Weights, ...]:
        return (*self._layers, self._rest)

    def begin_use(
        self,
        *,
        holds_resident_set: bool,
        passes: int = 1,
        resident: frozenset[int] | None = None,
    ) -> None:
        for weights in self._away():
            weights.ensure_home()
        self._in_use = True
        self._copies.join()
        self._held = frozenset()
        if holds_resident_set:
            self._held = self._resident if resident is None else resident
        self.layers_run_in_use = set()
        self._order.begin(passes)
        self._ahead.clear()
        timer = self.timer
        if timer is not None:
            timer.begin()
            timer.reach()
        for i in [i for i, loaded in self._loaded.items() if loaded.streamed]:
            self._give_up(i)  # fetched ahead by a use that was begun and not ended
        copied_bytes = 0
        if not self._rest_loaded:
            self._copies.wait(self._rest.onload(self._copies, self._buffers))
            self._rest_loaded = True
            copied_bytes = self._rest.nbytes
        for i in sorted(self._held - self._loaded.keys()):
            self._load(i, self._buffers.allocate(self._layers[i].buffer_bytes), streamed=False)
        if self._order.known:
            self._prefetch_pass()
        if timer is not None:
            timer.start(None, copied_bytes)

    def _away(self) -> Iterator[Weights]:
        """The weights that aren't on the device."""
        if not self._rest_loaded:
            yield self._rest
        yield from (each for i, each in enumerate(self._layers) if i not in self._loaded)

    def release_after_use(
        self, keep_resident: bool = False, retained: frozenset[int] | None = None
    ) -> None:
        self._in_use = False
        self._order.end_pass()
        kept = frozenset[int]()
        if keep_resident:
            kept = self._held if retained is None else self._held & retained
        leaving = self._loaded.keys() - kept
        for i in leaving:
            self._await(self._loaded[i])
        self._copies.join()
        for i in leaving:
            self._give_up(i)
        if not keep_resident and self._rest_loaded:
            self._rest_loaded = False
            self._rest.offload()
        self._close_window()

    def release_all(self) -> None:
        self._in_use = False
        self._held = frozenset()
        self._order.interrupt()
        with ExitStack() as undo:
            undo.callback(self._forget_loaded)
            undo.callback(self.device.synchronize)
            for weights in self._all_weights():
                undo.callback(weights.offload)

    def _forget_loaded(self) -> None:
        self._loaded.clear()
        self._rest_loaded = False
        self._close_window()

    def _close_window(self) -> None:
        self._window.clear()
        self._slots = 0

    def check_integrity(self) -> None:
        for i, weights in enumerate(self._layers):
            weights.check_on(self.device if i in self._loaded else None)
        self._rest.check_on(self.device if self._rest_loaded else None)
        used = sum(loaded.streamed for loaded in self._loaded.values())
        if used + len(self._window) != self._slots or self._slots > 1 + self.prefetch:
            raise OffloadError(
                f"the window has {self._slots} buffers of at most {1 + self.prefetch}: "
                f"{used} in use, {len(self._window)} free"
            )

    def _enter(self, i: int) -> None:
        if not self._in_use:
            raise OffloadError(
                f"layer {i} of {type(self.module).__name__} runs outside a use",
                hint="call begin_use first, or remove() the offload to run on the host",
            )
        if self._order.enter(i):
            self._ahead.clear()
        self.layers_run.add(i)
        self.layers_run_in_use.add(i)
        timer = self.timer
        if timer is not None:
            timer.reach()
        loaded = self._loaded.get(i) or self._load_streamed(i)
        is_new = loaded.copied is not None
        self._await(loaded)
        self._prefetch(self._ahead_of(i))
        if timer is not None:
            timer.start(i, self._layers[i].nbytes if is_new else 0)

    def _leave(self, i: int) -> None:
        timer = self.timer
        if timer is not None:
            timer.end(i)
        if i in self._loaded and self._is_streamed(i):
            self._give_up(i)
        order = self._order
        if order.known and order.passes_left > 1 and order.is_last(i):
            if timer is not None:
                timer.reach()
            self._prefetch_pass()
            if timer is not None:
                timer.start(None, 0)

    def _prefetch_pass(self) -> None:
        """Fetch the first streamed layers of the pass to come."""
        first = self._order.first
        if first is not None:
            coming = (first, *self._ahead_of(first))
            self._prefetch([i for i in coming if self._is_streamed(i)][: self.prefetch])

    def _ahead_of(self, i: int) -> tuple[int, ...]:
        """The next `prefetch` layers behind `i` in its pass that are streamed."""
        ahead = self._ahead.get(i)
        if ahead is None:
            streamed = (at for at in self._order.after(i) if self._is_streamed(at))
            ahead = self._ahead[i] = tuple(islice(streamed, self.prefetch))
        return ahead

    def _is_streamed(self, i: int) -> bool:
        return i not in self._held

    def _prefetch(self, wanted: Sequence[int]) -> None:
        for i in wanted:
            if self.prefetch and i not in self._loaded and self._is_streamed(i):
                if self._slots == 1 + self.prefetch and not self._window:
                    return
                self._load_streamed(i)

    def _load_streamed(self, i: int) -> _Loaded:
        if not self._window and self._slots == 1 + self.prefetch:
            # A layer that was fetched ahead and isn't next after all.
            unused = next(j for j, other in self._loaded.items() if other.streamed)
            self._give_up(unused)
        if self._window:
            buffer = self._window.pop()
            if buffer.numel() < self._layers[i].buffer_bytes:
                self._slots -= 1
                del buffer
                buffer = self._new_slot(i)
        else:
            buffer = self._new_slot(i)
        try:
            return self._load(i, buffer, streamed=True)
        except BaseException:
            self._window.append(buffer)
            raise

    def _new_slot(self, i: int) -> torch.Tensor:
        candidates = self.layers_run | {i}
        size = max(self._layers[j].buffer_bytes for j in candidates if self._is_streamed(j))
        buffer = self._buffers.allocate(size)
        self._slots += 1
        return buffer

    def _load(self, i: int, buffer: torch.Tensor, *, streamed: bool) -> _Loaded:
        loaded = _Loaded(buffer, self._layers[i].onload_into(buffer, self._copies), streamed)
        self._loaded[i] = loaded
        return loaded

    def _await(self, loaded: _Loaded) -> None:
        if loaded.copied is not None:
            self._copies.wait(loaded.copied)
            loaded.copied = None

    def _give_up(self, i: int) -> None:
        loaded = self._loaded.pop(i)
        self._await(loaded)  # freed memory must not be written by a late copy
        self._layers[i].offload()
        if loaded.streamed:
            self._window.append(loaded.buffer)


@dataclass(frozen=True, slots=True)
class _Enter:
    offload: LayerwiseOffload
    layer: int

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.offload._enter(self.layer)


@dataclass(frozen=True, slots=True)
class _Leave:
    offload: LayerwiseOffload
    layer: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.offload._leave(self.layer)


def _starts(by_group: Sequence[Sequence[Weights]]) -> Iterator[int]:
    start = 0
    for group in by_group:
        yield start
        start += len(group)


def _leading(by_group: Sequence[Sequence[Weights]], counts: Sequence[int]) -> Iterator[int]:
    for start, count in zip(_starts(by_group), counts, strict=True):
        yield from range(start, start + count)


def _check_counts(groups: Sequence[LayerGroup], counts: Sequence[int], prefetch: int) -> None:
    if len(counts) != len(groups):
        raise OffloadError(
            f"{len(counts)} resident counts for {len(groups)} layer groups",
            hint=f"give one count for each of {', '.join(group.name for group in groups)}",
        )
    for group, count in zip(groups, counts, strict=True):
        if not 0 <= count <= len(group.layers):
            raise OffloadError(
                f"{count} resident layers of {group.name}, which has {len(group.layers)}",
                hint=f"give 0 to {len(group.layers)}",
            )
    if prefetch < 0:
        raise OffloadError(f"prefetch is {prefetch}", hint="0 fetches no layer ahead")


class LayerOrder:
    """Who follows whom in a pass, and who comes first.

    Layers are counted over all groups. Until a pass was seen, the layers of a group are taken to
    follow one another, and none to follow the last of a group.
    """

    def __init__(self, group_sizes: Sequence[int]) -> None:
        self.first: int | None = None
        self.known = False
        """Whether a whole pass was seen."""
        self.passes_left = 0
        self._next: dict[int, int] = {}
        start = 0
        for size in group_sizes:
            self._next |= {i: i + 1 for i in range(start, start + size - 1)}
            start += size
        self._entered: set[int] = set()
        self._running: int | None = None

    def begin(self, passes: int) -> None:
        """A use of so many passes begins."""
        self.passes_left = passes
        self._entered.clear()
        self._running = None

    def enter(self, i: int) -> bool:
        """Layer `i` runs. Whether what was known of the order changed."""
        changed = False
        if i in self._entered:  # a layer runs once a pass: this is the next pass
            self.passes_left -= 1
            changed = self.end_pass()
            self._entered.clear()
        elif self._running is not None and self._next.get(self._running) != i:
            self._next[self._running] = i
            changed = True
        if not self._entered:
            self.first = i
        self._entered.add(i)
        self._running = i
        return changed

    def end_pass(self) -> bool:
        """No layer follows the one that ran last. Whether that was known."""
        if self._running is None:
            return False
        self.known = True
        return self._next.pop(self._running, None) is not None

    def interrupt(self) -> None:
        """The pass under way was broken off: where it ended says nothing of the order."""
        self._running = None

    def is_last(self, i: int) -> bool:
        return i not in self._next

    def after(self, i: int) -> Iterator[int]:
        """The layers behind `i` in its pass, each once: what two passes in different orders have
        taught may go round."""
        seen = {i}
        at = self._next.get(i)
        while at is not None and at not in seen:
            yield at
            seen.add(at)
            at = self._next.get(at)
