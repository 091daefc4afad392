"""What a module weighs: its layer groups, and the regions of host memory behind them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .copies import CopyStream
from .device import Device, Event
from .errors import HostMemoryError, OffloadError
from .host import HostBudget
from .pinning import chunked_charge_bytes, chunks

ALIGNMENT = 512
"""Bytes that regions in one buffer are aligned to: the granularity of CUDA's caching allocator."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """One `ModuleList` whose entries run one after another."""

    name: str
    layers: tuple[nn.Module, ...]


def layer_groups(module: nn.Module) -> tuple[LayerGroup, ...]:
    """The outermost `ModuleList`s of `module`, in the order of its definition.

    A list of containers has no entries that run; the containers are searched instead.
    """
    return tuple(_find_groups(module, ""))


def _find_groups(module: nn.Module, prefix: str) -> Iterator[LayerGroup]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        entries = tuple(child.children()) if isinstance(child, nn.ModuleList) else ()
        if entries and not any(isinstance(e, nn.ModuleList | nn.ModuleDict) for e in entries):
            yield LayerGroup(path, entries)
        else:
            yield from _find_groups(child, f"{path}.")


@dataclass(frozen=True, slots=True)
class _Binding:
    """A tensor of the module, the host tensor it stands on, and where that begins in its region."""

    tensor: torch.Tensor
    host: torch.Tensor
    offset_bytes: int


class Region:
    """Bytes of one host storage that tensors overlap in: they move, and are charged, once.

    The host bytes stay where they are, and giving the region up only points the tensors back at
    them. `masters`, one behind another, are what is copied to the device: those bytes, or pinned
    copies of them in chunks. It begins where the largest element of its tensors may stand.
    """

    __slots__ = ("_pageable", "_pinned_charge", "bindings", "masters", "nbytes")

    def __init__(self, tensors: Sequence[torch.Tensor], start: int, stop: int) -> None:
        storage = tensors[0].untyped_storage()
        start -= start % max(tensor.element_size() for tensor in tensors)
        self.nbytes = stop - start
        self._pageable = torch.empty(0, dtype=torch.uint8).set_(
            storage, start, (self.nbytes,), (1,)
        )
        self.masters: tuple[torch.Tensor, ...] = (self._pageable,)
        self._pinned_charge = 0
        self.bindings = tuple(
            _Binding(tensor, tensor.data, extent(tensor)[0] - start) for tensor in tensors
        )

    def bind(self, buffer: torch.Tensor, start: int) -> None:
        """Point the tensors at the copy of the region that begins at byte `start` of `buffer`."""
        for binding in self.bindings:
            host = binding.host
            offset = (start + binding.offset_bytes) // host.element_size()
            typed = buffer.view(host.dtype)
            binding.tensor.data = typed.as_strided(host.size(), host.stride(), offset)

    def unbind(self) -> None:
        for binding in self.bindings:
            binding.tensor.data = binding.host

    def copies(
        self, buffer: torch.Tensor, start: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(target, source) for a copy of the region that begins at byte `start` of `buffer`."""
        for master in self.masters:
            if master.nbytes:
                yield buffer[start : start + master.nbytes], master
            start += master.nbytes

    def pin(self, device: Device, budget: HostBudget) -> None:
        """Copy from page-locked memory from now on.

        The pageable bytes stay: they are what the tensors stand on when the offload is removed.
        Raises HostMemoryError, having pinned nothing, where the budget is too small or the host
        can't lock so much, which closes the budget.
        """
        if not self.nbytes or self._pinned_charge:
            return
        charge = budget.charge(self.nbytes)
        masters: list[torch.Tensor] = []
        try:
            for chunk in self._pageable.split_with_sizes([*chunks(self.nbytes)]):
                masters.append(device.pin(chunk))
        except BaseException as error:
            masters.clear()  # the traceback would keep them
            budget.give_back(charge)
            if isinstance(error, HostMemoryError):
                budget.close(error)
            raise
        self.masters = tuple(masters)
        self._pinned_charge = charge

    def unpin(self, budget: HostBudget) -> None:
        self.masters = (self._pageable,)
        budget.give_back(self._pinned_charge)
        self._pinned_charge = 0


class Weights:
    """Regions that come and go together: one layer, or all that is in no layer."""

    def __init__(self, regions: Iterable[Region]) -> None:
        self.regions = tuple(regions)
        self.nbytes = sum(region.nbytes for region in self.regions)
        self.buffer_bytes = sum(aligned(region.nbytes) for region in self.regions)
        self.pinned_charge_bytes = sum(chunked_charge_bytes(each.nbytes) for each in self.regions)

    def onload(self, copies: CopyStream) -> Event:
        """Copy each region into device memory of its own. All or nothing.

        Raises torch.OutOfMemoryError.
        """
        device = copies.device.torch_device
        buffers = [
            torch.empty(aligned(region.nbytes), dtype=torch.uint8, device=device)
            for region in self.regions
        ]
        return self._fill(copies, [(buffer, 0) for buffer in buffers])

    def onload_into(self, buffer: torch.Tensor, copies: CopyStream) -> Event:
        """Copy the regions one behind another into `buffer`, of at least `buffer_bytes`.

        All or nothing.
        """
        places = []
        start = 0
        for region in self.regions:
            places.append((buffer, start))
            start += aligned(region.nbytes)
        return self._fill(copies, places)

    def _fill(self, copies: CopyStream, places: Sequence[tuple[torch.Tensor, int]]) -> Event:
        moves = list(zip(self.regions, places, strict=True))
        copied = copies.fill(
            copy for region, (buffer, start) in moves for copy in region.copies(buffer, start)
        )
        try:
            for region, (buffer, start) in moves:
                region.bind(buffer, start)
        except BaseException:
            copies.wait(copied)  # before the buffers, now nobody's, are used again
            raise
        return copied

    def pin(self, device: Device, budget: HostBudget) -> None:
        """Pin the masters of all regions, or none. Raises HostMemoryError."""
        try:
            for region in self.regions:
                region.pin(device, budget)
        except BaseException:
            self.unpin(budget)
            raise

    def unpin(self, budget: HostBudget) -> None:
        for region in self.regions:
            region.unpin(budget)

    def check_on(self, device: Device | None) -> None:
        """Raises OffloadError unless all tensors are on `device`, or on the host for None."""
        expected = "cpu" if device is None else device.torch_device.type
        for region in self.regions:
            for binding in region.bindings:
                tensor = binding.tensor
                if tensor.device.type != expected:
                    raise OffloadError(
                        f"a tensor of {tuple(tensor.shape)} should be on {expected} and is on "
                        f"{tensor.device}"
                    )

    def offload(self) -> None:
        """Point every tensor back at its host master, from whatever state. Copies nothing."""
        for region in self.regions:
            region.unbind()


def module_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, each object once."""
    return list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())


def regions(tensors: Iterable[torch.Tensor]) -> list[Region]:
    """The regions under `tensors`, tied and overlapping ones in one.

    Raises OffloadError for tensors that aren't plain strided host tensors.
    """
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            raise OffloadError(
                f"a {type(tensor).__name__} of {tuple(tensor.shape)} is no plain strided tensor",
                hint="keep the component that holds it resident",
            )
        if tensor.device.type != "cpu":
            raise OffloadError(
                f"a tensor of {tuple(tensor.shape)} is on {tensor.device}, not on the host",
                hint="hand the pipeline over with its components on the CPU",
            )
        by_storage[tensor.untyped_storage()._cdata].append(tensor)
    found = []
    for sharing in by_storage.values():
        sharing.sort(key=extent)
        overlapping: list[torch.Tensor] = []
        start = stop = 0
        for tensor in sharing:
            first, last = extent(tensor)
            if overlapping and first >= stop:
                found.append(Region(overlapping, start, stop))
                overlapping = []
            if not overlapping:
                start = stop = first
            overlapping.append(tensor)
            stop = max(stop, last)
        found.append(Region(overlapping, start, stop))
    return found


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one behind the last, that `tensor` reaches in its storage."""
    first = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return first, first
    reach = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return first, first + (reach + 1) * tensor.element_size()


def partition(
    module: nn.Module, groups: Sequence[LayerGroup]
) -> tuple[list[list[Weights]], Weights]:
    """The weights of each layer of each group, and those of no layer.

    A region that a layer shares with another layer, or with what is in no layer, belongs to the
    latter: it has to be there for both.
    """
    owners: dict[int, set[tuple[int, int] | None]] = defaultdict(set)
    for g, group in enumerate(groups):
        for i, layer in enumerate(group.layers):
            for tensor in module_tensors(layer):
                owners[id(tensor)].add((g, i))
    in_layers = {id(layer) for group in groups for layer in group.layers}
    for tensor in _tensors_outside(module, in_layers):
        owners[id(tensor)].add(None)
    layers: list[list[list[Region]]] = [[[] for _ in group.layers] for group in groups]
    rest: list[Region] = []
    for region in regions(module_tensors(module)):
        homes = set().union(*(owners[id(binding.tensor)] for binding in region.bindings))
        home = homes.pop() if len(homes) == 1 else None
        if home is None:
            rest.append(region)
        else:
            layers[home[0]][home[1]].append(region)
    return [[Weights(layer) for layer in group] for group in layers], Weights(rest)


def _tensors_outside(module: nn.Module, in_layers: set[int]) -> Iterator[torch.Tensor]:
    """What `module` reaches without going through a layer, a layer's own tensors among it."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    for child in module.children():
        if id(child) not in in_layers:
            yield from _tensors_outside(child, in_layers)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's group, its device bytes, and the bytes that loading it copies."""

    group: str
    buffer_bytes: int
    copy_bytes: int


def weigh(groups: Sequence[LayerGroup], by_group: Sequence[Sequence[Weights]]) -> tuple[Layer, ...]:
    """What each layer weighs, groups one behind another."""
    return tuple(
        Layer(group.name, weights.buffer_bytes, weights.nbytes)
        for group, layers in zip(groups, by_group, strict=True)
        for weights in layers
    )
