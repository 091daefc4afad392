"""What we put on a pipeline, step by step, and how each is taken off again; and what runs leave on
it.

Each step takes off what it has put there and looks at nothing else: an adapter that was loaded
meanwhile, a scheduler or a component that was exchanged, a tensor of the program's own on the card
stay as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...offload.compiled import is_ours
from ...offload.device import Device
from ...offload.host_memory import HostBudget
from ...offload.layerwise import LayerwiseOffload
from ...offload.placement import Placement
from ..schedule import Schedule
from .conductor import Conductor
from .pipeline import DiffusersPipeline


@dataclass(frozen=True, slots=True)
class Bind:
    """The pipeline executes on the device, wherever its weights are."""

    pipeline: DiffusersPipeline
    device: Device

    def apply(self) -> None:
        self.pipeline.bind(self.device)

    def revert(self) -> None:
        self.pipeline.unbind()


@dataclass(frozen=True, slots=True)
class Place:
    """A component's weights are ours to move."""

    placement: Placement

    def apply(self) -> None:
        self.placement.install()

    def revert(self) -> None:
        self.placement.remove()


@dataclass(frozen=True, slots=True)
class Conduct:
    """Uses begin and end as the components are called."""

    conductor: Conductor

    def apply(self) -> None:
        self.conductor.install()

    def revert(self) -> None:
        self.conductor.remove()


@dataclass(frozen=True, slots=True)
class Pin:
    """A component's masters are page-locked, or not any more where `budget` is None."""

    placement: Placement
    budget: HostBudget | None
    before: HostBudget | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self.placement.pinned_under)

    def apply(self) -> None:
        self._pin(self.budget)

    def revert(self) -> None:
        self._pin(self.before)

    def _pin(self, budget: HostBudget | None) -> None:
        if self.placement.pinned_under is not budget:
            self.placement.release_all()
            self.placement.unpin_masters()
            if budget is not None:
                self.placement.pin_masters(budget)


@dataclass(frozen=True, slots=True)
class Prefetch:
    """How many layers are fetched ahead."""

    placement: LayerwiseOffload
    depth: int
    before: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self.placement.prefetch)

    def apply(self) -> None:
        self._set(self.depth)

    def revert(self) -> None:
        self._set(self.before)

    def _set(self, depth: int) -> None:
        if self.placement.prefetch != depth:
            self.placement.release_all()
            self.placement.prefetch = depth


@dataclass(frozen=True, slots=True)
class Follow:
    """A schedule is in effect."""

    conductor: Conductor
    schedule: Schedule
    before: Schedule = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "before", self.conductor.schedule)

    def apply(self) -> None:
        self.conductor.follow(self.schedule)

    def revert(self) -> None:
        self.conductor.follow(self.before)


class Residue:
    """What the objects of a pipeline hold before a run, to put back what the run leaves there: a
    scheduler's history and its timesteps on the device, a table that a module made for itself.

    Objects are the pipeline, its components, and all submodules. Of each the attributes are kept,
    and what is in those that are lists, dicts and sets. Values are kept by reference. Hooks, which
    a model may put on itself in its first run, and attributes that are ours stay as they are: they
    come and go meanwhile. Caches of methods, which may hold tensors on the device and fill again,
    are cleared, here and when the state is put back.
    """

    def __init__(self, pipeline: DiffusersPipeline) -> None:
        objects = [*_objects(pipeline)]
        self._types = {type(each) for each in objects}
        self._clear_caches()
        self._containers = [_Container(target) for each in objects for target in _containers(each)]
        self._hooks = [
            (module, {name: {*table} for name, table in _hook_tables(module)})
            for module in objects
            if isinstance(module, nn.Module)
        ]

    def restore(self) -> None:
        for container in self._containers:
            container.restore()
        for module, before in self._hooks:
            _unhook(module, before)
        self._clear_caches()

    def _clear_caches(self) -> None:
        for owner in self._types:
            _clear_caches(owner)


class _Container:
    """A dict, list or set, and what was in it."""

    __slots__ = ("_before", "_target")

    def __init__(self, target: Any) -> None:
        self._target = target
        self._before = target.copy()

    def restore(self) -> None:
        if not self._is_changed():
            return
        before, now = self._before, self._target
        if isinstance(now, dict):
            ours = {key: value for key, value in now.items() if is_ours(value)}
            before = {key: value for key, value in before.items() if not is_ours(value)} | ours
        now.clear()
        if isinstance(now, list):
            now.extend(before)
        else:
            now.update(before)

    def _is_changed(self) -> bool:
        before, now = self._before, self._target
        if len(before) != len(now):
            return True
        if isinstance(now, set):
            return bool(now ^ before)
        if isinstance(now, list):
            return any(a is not b for a, b in zip(before, now, strict=True))
        return any(now.get(key, _ABSENT) is not value for key, value in before.items())


_ABSENT = object()


def _objects(pipeline: DiffusersPipeline) -> Iterator[Any]:
    yield pipeline.pipeline
    for component in pipeline.pipeline.components.values():
        if isinstance(component, nn.Module):
            yield from component.modules()
        elif hasattr(component, "__dict__"):
            yield component


def _containers(each: Any) -> Iterator[Any]:
    yield vars(each)
    for key, value in vars(each).items():
        if type(value) in _KINDS and not key.endswith(_HOOKS):
            yield value


_KINDS = (dict, OrderedDict, list, set)
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""How the names of a module's tables of hooks end; the last two say more of hooks in the first."""


def _hook_tables(module: nn.Module) -> Iterator[tuple[str, dict[int, Any]]]:
    for name, table in vars(module).items():
        if name.endswith(_HOOKS) and isinstance(table, dict):
            yield name, table


def _unhook(module: nn.Module, before: dict[str, set[int]]) -> None:
    """Take off what was put on since, unless it is ours."""
    tables = dict(_hook_tables(module))
    new = {
        key
        for name, table in tables.items()
        for key, hook in table.items()
        if name.endswith("_hooks") and key not in before.get(name, ()) and not is_ours(hook)
    }
    for table in tables.values():
        for key in new & table.keys():
            del table[key]


def _clear_caches(owner: type) -> None:
    """Clear `functools` caches of the methods, also those that a decorator closes over."""
    for function in [value for base in owner.__mro__ for value in vars(base).values()]:
        cells = getattr(function, "__closure__", None) or ()
        for candidate in (function, *(_contents(cell) for cell in cells)):
            if callable(clear := getattr(candidate, "cache_clear", None)):
                clear()


def _contents(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: its variable isn't assigned yet
        return None
