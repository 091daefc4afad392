"""The state of a pipeline before a change: to put back, and to compare with afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..phases.diffusers import DiffusersPipeline

_Geometry = tuple[object, ...]


class PreState:
    """What every object of a pipeline holds, and where every tensor of its modules is.

    Objects are the pipeline, its components, and all submodules; of each the attributes, for
    modules with the tables of parameters, buffers, submodules and hooks. Attributes are kept by
    reference: values inside them aren't copied.
    """

    def __init__(self, pipeline: DiffusersPipeline) -> None:
        self._objects = {name: (each, _attributes(each)) for name, each in _objects(pipeline)}
        self._tensors = dict(_tensors(self._objects))
        self._geometry = {name: _geometry(tensor) for name, tensor in self._tensors.items()}
        self._sharing = _sharing(self._tensors)

    def restore(self) -> None:
        """Put attributes and tables back that were changed since.

        What a run left in them, such as a scheduler's timesteps, may be on the device. Caches of
        methods, which may hold the like, are cleared: they fill again.
        """
        for each, before in self._objects.values():
            now = _attributes(each)
            for table, entries in before.items():
                target = vars(each) if table == "" else vars(each)[table]
                _put_back(target, entries, now[table])
        for owner in {type(each) for each, _ in self._objects.values()}:
            _clear_caches(owner)

    def differences(self) -> list[str]:
        """What isn't as it was, in words; empty if all is."""
        found: list[str] = []
        for name, (each, before) in self._objects.items():
            now = _attributes(each)
            for table in before.keys() | now.keys():
                old, new = before.get(table, {}), now.get(table, {})
                found += [
                    f"{name}: {f'{table}.' if table else ''}{key} changed"
                    for key in old.keys() | new.keys()
                    if old.get(key, _Absent) is not new.get(key, _Absent)
                ]
        for name, tensor in self._tensors.items():
            now_at = _geometry(tensor)
            if now_at != self._geometry[name]:
                found.append(f"{name}: {self._geometry[name]} became {now_at}")
        if _sharing(self._tensors) != self._sharing:
            found.append("tensors share storages in another way")
        return sorted(found)


class _Absent:
    pass


_TABLES = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))


def _objects(pipeline: DiffusersPipeline) -> Iterator[tuple[str, Any]]:
    yield "pipeline", pipeline.pipeline
    for name, component in pipeline.pipeline.components.items():
        if isinstance(component, nn.Module):
            yield from component.named_modules(prefix=name)
        elif hasattr(component, "__dict__"):
            yield name, component


def _attributes(each: Any) -> dict[str, dict[Any, Any]]:
    """Attributes under the empty name, and a module's tables under theirs."""
    own = vars(each)
    if not isinstance(each, nn.Module):
        return {"": dict(own)}
    tables = {name: own[name] for name in _TABLES if name in own}
    copied: dict[str, dict[Any, Any]] = {
        name: dict(table) if isinstance(table, dict) else dict.fromkeys(table)
        for name, table in tables.items()
    }
    return {"": {k: v for k, v in own.items() if k not in tables}, **copied}


def _put_back(target: dict[Any, Any], before: dict[Any, Any], now: dict[Any, Any]) -> None:
    for key in now.keys() - before.keys():
        del target[key]
    for key, value in before.items():
        if now.get(key, _Absent) is not value:
            target[key] = value


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
    for name, (each, _) in objects.items():
        if isinstance(each, nn.Module):
            for path, tensor in _named(each):
                yield f"{name}.{path}", tensor


def _named(module: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _geometry(tensor: torch.Tensor) -> _Geometry:
    return (
        tensor.device,
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
