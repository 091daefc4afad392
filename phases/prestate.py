"""The state of a pipeline before a change: to put back, and to compare with afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .diffusers import DiffusersPipeline


class PreState:
    """What every object of a pipeline holds, and where every tensor of its modules is.

    Objects are the pipeline, its components, and all submodules. Of each the attributes are kept,
    and what is in those that are lists, dicts and sets: a module's tables of parameters, buffers,
    submodules and hooks, a scheduler's history. Values are kept by reference. Caches of methods,
    which may hold tensors on the device and fill again, are cleared, here and when the state is
    put back.
    """

    def __init__(self, pipeline: DiffusersPipeline) -> None:
        objects = dict(_objects(pipeline))
        self._types = {type(each) for each in objects.values()}
        self._clear_caches()
        self._containers = [
            _Container(name, values)
            for name, each in objects.items()
            for name, values in _containers(name, each)
        ]
        self._tensors = dict(_tensors(objects))
        self._geometry = {name: _geometry(tensor) for name, tensor in self._tensors.items()}
        self._sharing = _sharing(self._tensors)

    def restore(self) -> None:
        """Put back what was changed since in attributes, tables and lists.

        What a run left there, such as a scheduler's timesteps, may be on the device.
        """
        for container in self._containers:
            container.restore()
        self._clear_caches()

    def differences(self) -> list[str]:
        """What isn't as it was, in words; empty if all is."""
        found = [change for container in self._containers for change in container.differences()]
        for name, tensor in self._tensors.items():
            before, now = self._geometry[name], _geometry(tensor)
            if now != before:
                found.append(f"{name}: {before} became {now}")
        if _sharing(self._tensors) != self._sharing:
            found.append("tensors share storages in another way")
        return sorted(found)

    def forget(self) -> None:
        """Let go of what is kept: attributes may hold tensors on the device."""
        self._containers.clear()
        self._tensors.clear()

    def _clear_caches(self) -> None:
        for owner in self._types:
            _clear_caches(owner)


class _Container:
    """A dict, list or set, and what was in it."""

    __slots__ = ("_before", "_name", "_target")

    def __init__(self, name: str, target: Any) -> None:
        self._name = name
        self._target = target
        self._before = target.copy()

    def restore(self) -> None:
        if self.differences():
            self._target.clear()
            if isinstance(self._target, list):
                self._target.extend(self._before)
            else:
                self._target.update(self._before)

    def differences(self) -> list[str]:
        if isinstance(self._target, set):
            changed: Iterable[object] = self._target ^ self._before
        else:
            before, now = _entries(self._before), _entries(self._target)
            changed = [
                key
                for key in before.keys() | now.keys()
                if before.get(key, _ABSENT) is not now.get(key, _ABSENT)
            ]
        return [f"{self._name}.{key} changed" for key in changed]


_ABSENT = object()


def _entries(container: Any) -> dict[Any, Any]:
    return dict(enumerate(container)) if isinstance(container, list) else container


def _objects(pipeline: DiffusersPipeline) -> Iterator[tuple[str, Any]]:
    yield "pipeline", pipeline.pipeline
    for name, component in pipeline.pipeline.components.items():
        if isinstance(component, nn.Module):
            yield from component.named_modules(prefix=name)
        elif hasattr(component, "__dict__"):
            yield name, component


def _containers(name: str, each: Any) -> Iterator[tuple[str, Any]]:
    yield name, vars(each)
    for key, value in vars(each).items():
        if type(value) in _KINDS:
            yield f"{name}.{key}", value


_KINDS = (dict, OrderedDict, list, set)


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


def _tensors(objects: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, each in objects.items():
        if isinstance(each, nn.Module):
            named = (*each.named_parameters(recurse=False), *each.named_buffers(recurse=False))
            for path, tensor in named:
                yield f"{name}.{path}", tensor


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        str(tensor.device),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        tensor.untyped_storage().data_ptr(),
    )


def _sharing(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """For each tensor the number of the storage it stands on, counted in order."""
    numbers: dict[int, int] = {}
    return {
        name: numbers.setdefault(tensor.untyped_storage()._cdata, len(numbers))
        for name, tensor in tensors.items()
    }
