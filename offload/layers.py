"""What a module weighs: its layer groups, the regions of host memory behind them, and the device
buffers that they are copied to.

Who owns a value is told by what its tensor stands on. On the buffer that we bound it to: ours, and
undone by pointing it back at its host tensor. On anything else: somebody else put it there, and it
stays his.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .device import Device, Event, Stream
from .errors import HostMemoryError, OffloadError, VirtualDataError
from .host_memory import HostBudget, chunked_charge_bytes, chunks

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


class Buffers:
    """The device buffers of one placement, and what of them is still alive, whoever holds it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._alive: dict[int, int] = {}
        """Bytes by storage; an entry goes when its storage dies."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Raises torch.OutOfMemoryError."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device.torch_device)
        storage = buffer.untyped_storage()
        self._alive[storage._cdata] = nbytes
        weakref.finalize(storage, self._alive.pop, storage._cdata).atexit = False
        return buffer

    @property
    def allocated_bytes(self) -> int:
        return sum(self._alive.values())

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` stands on one of them."""
        return tensor.untyped_storage()._cdata in self._alive


def stands_on(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    """Whether both are the same elements of the same memory."""
    return (
        tensor.device == place.device
        and tensor.untyped_storage()._cdata == place.untyped_storage()._cdata
        and tensor.storage_offset() == place.storage_offset()
        and _is_alike(tensor, place)
    )


def _is_alike(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        tensor.dtype == other.dtype
        and tensor.size() == other.size()
        and tensor.stride() == other.stride()
    )


def take_home(tensor: torch.Tensor) -> None:
    """To the host, as it is."""
    tensor.data = tensor.data.to("cpu")


@dataclass(frozen=True, slots=True)
class _Binding:
    """A tensor of the module, the host tensor it stands on, and where that begins in its region."""

    name: str
    tensor: torch.Tensor
    host: torch.Tensor
    offset_bytes: int

    def on(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        """The tensor's place in the copy of the region that begins at byte `start`."""
        host = self.host
        offset = (start + self.offset_bytes) // host.element_size()
        return buffer.view(host.dtype).as_strided(host.size(), host.stride(), offset)

    def take_home(self) -> None:
        """Bring a value that isn't ours to the host.

        One that came out as it was, to the last bit, has not been changed: a VAE that was upcast to
        float32 for its decode and cast back stands on its host tensor again.
        """
        take_home(self.tensor)
        if self.came_out_as_it_was:
            self.tensor.data = self.host

    @property
    def came_out_as_it_was(self) -> bool:
        """Whether the tensor, which is on the host, has the geometry and the values found."""
        return _is_alike(self.tensor, self.host) and _is_equal(self.tensor.data, self.host)

    def __str__(self) -> str:
        return f"{self.name} ({_told(self.host)})"


def _is_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: so a NaN is itself, and -0.0 isn't 0.0."""
    try:
        return torch.equal(_bits(tensor), _bits(other))
    except VirtualDataError:
        return True  # there are no values that could differ


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _told(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of {tuple(tensor.shape)}"


class Region:
    """Bytes of one host storage that tensors overlap in: they move, and are charged, once.

    The host bytes stay where they are, and giving the region up only points the tensors back at
    them. `masters`, one behind another, are what is copied to the device: those bytes, or pinned
    copies of them in chunks. It begins where the largest element of its tensors may stand.
    """

    __slots__ = ("_pageable", "_pinned_charge", "_places", "bindings", "masters", "nbytes")

    def __init__(
        self, tensors: Sequence[torch.Tensor], start: int, stop: int, names: Mapping[int, str]
    ) -> None:
        storage = tensors[0].untyped_storage()
        start -= start % max(tensor.element_size() for tensor in tensors)
        self.nbytes = stop - start
        self._pageable = torch.empty(0, dtype=torch.uint8).set_(
            storage, start, (self.nbytes,), (1,)
        )
        self.masters: tuple[torch.Tensor, ...] = (self._pageable,)
        self._pinned_charge = 0
        self.bindings = tuple(
            _Binding(
                names.get(id(tensor), "a tensor"),
                tensor,
                tensor.data,
                extent(tensor)[0] - start,
            )
            for tensor in tensors
        )
        self._places: tuple[torch.Tensor, ...] = ()
        """Where on the device the tensors were bound to; empty where they are on the host."""

    def bind(self, buffer: torch.Tensor, start: int) -> None:
        """Point the tensors at the copy of the region that begins at byte `start` of `buffer`."""
        self._places = tuple(binding.on(buffer, start) for binding in self.bindings)
        for binding, place in zip(self.bindings, self._places, strict=True):
            binding.tensor.data = place

    def unbind(self) -> None:
        """Point the tensors that stand where they were bound to back at the host, and bring what
        somebody else put on the device in place of others to the host as well.

        What somebody put on the host stays. Raises what the copy of another's value raises, when
        all the rest is done.
        """
        places, self._places = self._places, ()
        if not places:
            return
        with ExitStack() as others:
            for binding, place in zip(self.bindings, places, strict=True):
                if stands_on(binding.tensor, place):
                    binding.tensor.data = binding.host
                elif binding.tensor.device == place.device:
                    others.callback(binding.take_home)

    def ensure_home(self) -> None:
        """Raises OffloadError where a tensor isn't what was found: to bind it would delete what
        somebody put in. One that was cast and cast back is what was found."""
        for binding in self.bindings:
            now = binding.tensor
            if not stands_on(now, binding.host):
                if now.device == binding.host.device and binding.came_out_as_it_was:
                    now.data = binding.host
                    continue
                raise OffloadError(
                    f"{binding} was exchanged since it was settled: {_told(now)} on {now.device} "
                    "stands there now",
                    hint="settle again, to plan with the weights as they are now",
                )

    def leftovers(self, buffers: Buffers) -> Iterator[str]:
        for binding in self.bindings:
            if buffers.hold(binding.tensor):
                yield f"{binding} is still on a device buffer"
        if self._pinned_charge:
            yield f"masters of {self._pinned_charge} bytes are still pinned"

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

    def onload(self, copies: CopyStream, buffers: Buffers) -> Event:
        """Copy each region into device memory of its own. All or nothing.

        Raises torch.OutOfMemoryError, and OffloadError where a tensor was given another value.
        """
        self.ensure_home()
        places = [(buffers.allocate(aligned(region.nbytes)), 0) for region in self.regions]
        return self._fill(copies, places)

    def onload_into(self, buffer: torch.Tensor, copies: CopyStream) -> Event:
        """Copy the regions one behind another into `buffer`, of at least `buffer_bytes`.

        All or nothing. Raises OffloadError where a tensor was given another value.
        """
        self.ensure_home()
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
            self.offload()
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

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        return (binding.tensor for region in self.regions for binding in region.bindings)

    def ensure_home(self) -> None:
        """Raises OffloadError where a tensor was given another value than the one found."""
        for region in self.regions:
            region.ensure_home()

    def leftovers(self, buffers: Buffers) -> Iterator[str]:
        for region in self.regions:
            yield from region.leftovers(buffers)

    def check_on(self, device: Device | None) -> None:
        """Raises OffloadError unless all tensors are on `device`, or on the host for None."""
        expected = "cpu" if device is None else device.torch_device.type
        for region in self.regions:
            for binding in region.bindings:
                tensor = binding.tensor
                if tensor.device.type != expected:
                    raise OffloadError(
                        f"{binding} should be on {expected} and is on {tensor.device}"
                    )

    def offload(self) -> None:
        """Unbind all regions, from whatever state. What fails for one is raised at the end."""
        with ExitStack() as undo:
            for region in self.regions:
                undo.callback(region.unbind)


def module_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, each object once."""
    return list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())


def tensor_names(module: nn.Module) -> dict[int, str]:
    """By identity, the first name of each parameter and buffer."""
    return {id(t): name for name, t in (*module.named_parameters(), *module.named_buffers())}


def regions(
    tensors: Iterable[torch.Tensor], names: Mapping[int, str] | None = None
) -> list[Region]:
    """The regions under `tensors`, tied and overlapping ones in one; `names` are for messages.

    Raises OffloadError for tensors that aren't plain strided host tensors.
    """
    by_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor) or tensor.layout is not torch.strided:
            raise OffloadError(
                f"a {type(tensor).__name__} of {tuple(tensor.shape)} is no plain strided tensor",
                hint="hand the component over without quantisation: nothing here can move it",
            )
        if tensor.device.type != "cpu":
            raise OffloadError(
                f"a tensor of {tuple(tensor.shape)} is on {tensor.device}, not on the host",
                hint="hand the pipeline over with its components on the CPU",
            )
        by_storage[tensor.untyped_storage()._cdata].append(tensor)
    names = names or {}
    found = []
    for sharing in by_storage.values():
        sharing.sort(key=extent)
        overlapping: list[torch.Tensor] = []
        start = stop = 0
        for tensor in sharing:
            first, last = extent(tensor)
            if overlapping and first >= stop:
                found.append(Region(overlapping, start, stop, names))
                overlapping = []
            if not overlapping:
                start = stop = first
            overlapping.append(tensor)
            stop = max(stop, last)
        found.append(Region(overlapping, start, stop, names))
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
    for region in regions(module_tensors(module), tensor_names(module)):
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


class CopyStream:
    """Fills device buffers that were allocated on the compute stream, the device's current one.

    A copy starts only after the compute issued so far, so it can't overtake the last reader of
    whatever the buffer's memory held before.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stream = device.new_stream()
        self._computed_on: list[Stream] = []

    def fill(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Issue (target, source) copies; compute has to wait for the event before it reads."""
        compute = self.device.current_stream()
        self._stream.wait_event(compute.record_event())
        try:
            with self.device.on(self._stream):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
                    self.device.count_copy(h2d_bytes=source.nbytes)
        except BaseException:
            # The targets are about to be freed, and their memory used again.
            compute.wait_event(self._stream.record_event())
            raise
        return self._stream.record_event()

    def wait(self, event: Event) -> None:
        """Compute issued from now on starts after `event`."""
        self.device.current_stream().wait_event(event)

    def join(self) -> None:
        """Put the streams that compute was ever on in order, where it was on several: each goes on
        after what all were given so far.

        So a use can read what another has left on the device, and buffers can be freed that were
        allocated on one stream and read on another.
        """
        compute = self.device.current_stream()
        if compute not in self._computed_on:
            self._computed_on.append(compute)
        others = [stream for stream in self._computed_on if stream != compute]
        for other in others:
            compute.wait_event(other.record_event())
        for other in others:
            other.wait_event(compute.record_event())
