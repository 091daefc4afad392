"""What a module is made of, told without its values: its weights, and its adapters."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...offload.layers import extent

_BASES = ("base_layer", "original_module")
"""Where PEFT keeps the module that it has put an adapter around."""


def class_path(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def pipeline_path(pipeline: object) -> str:
    """A modular pipeline is what its blocks make it."""
    blocks = getattr(pipeline, "_blocks", None)
    path = class_path(pipeline)
    return path if blocks is None else f"{path} of {class_path(blocks)}"


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    ranks: tuple[int, ...]
    layers: int
    weight_bytes: int
    active: bool
    merged: bool


@dataclass(slots=True)
class _Found:
    """An adapter as it is put together from its layers."""

    ranks: set[int] = field(default_factory=set)
    layers: int = 0
    tensors: list[torch.Tensor] = field(default_factory=list)
    active: bool = False
    merged: bool = False


@dataclass(frozen=True, slots=True)
class Structure:
    weight_bytes: int
    digest: str
    adapters: tuple[Adapter, ...]
    """Sorted by name."""

    @classmethod
    def of(cls, module: nn.Module) -> Structure:
        """Of parameters and persistent buffers: others are made anew by some models with every
        request."""
        adapters: dict[str, _Found] = defaultdict(_Found)
        weights = sorted(_weights(module, "", adapters), key=lambda weight: weight[0])
        first: dict[int, str] = {}
        lines = [_quantisation(module)]
        for name, tensor in weights:
            lines.append(f"{name} {_describe(tensor)} {first.setdefault(id(tensor), name)}")
        return cls(
            weight_bytes=distinct_bytes(tensor for _, tensor in weights),
            digest=sha256("\n".join(lines).encode()).hexdigest()[:16],
            adapters=tuple(
                Adapter(
                    name,
                    tuple(sorted(each.ranks)),
                    each.layers,
                    distinct_bytes(each.tensors),
                    each.active,
                    each.merged,
                )
                for name, each in sorted(adapters.items())
            ),
        )


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors take, those that they share counted once."""
    by_storage: dict[int, set[tuple[int, int]]] = defaultdict(set)
    total = 0
    for tensor in _plain(tensors):
        if tensor.layout is torch.strided:
            by_storage[tensor.untyped_storage()._cdata].add(extent(tensor))
        else:
            total += tensor.numel() * tensor.element_size()
    for extents in by_storage.values():
        reached = 0
        for start, stop in sorted(extents):
            total += max(stop - max(start, reached), 0)
            reached = max(reached, stop)
    return total


def _plain(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What quantised and other wrapping tensors are made of, and plain ones as they are."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _plain(getattr(tensor, name) for name in names)
        else:
            yield tensor


def _weights(
    module: nn.Module, prefix: str, adapters: Mapping[str, _Found]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under the names that they have without adapters, whose own
    tensors go into `adapters`.

    A module with adapters is known by PEFT's attributes, so that PEFT needn't be installed:
    `adapter_layer_names` are the children that hold something for each adapter.
    """
    holders = dict(_holders(module))
    for adapter in dict.fromkeys(key for held in holders.values() for key in held):
        _add(adapters[adapter], module, holders, adapter)
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        if name not in holders:
            yield f"{prefix}{name}", parameter
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield f"{prefix}{name}", buffer
    for name, child in module._modules.items():
        if child is not None and name not in holders:
            is_base = bool(holders) and name in _BASES
            yield from _weights(child, prefix if is_base else f"{prefix}{name}.", adapters)


def _holders(module: nn.Module) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in _names(module, "adapter_layer_names"):
        holder: Any = getattr(module, name, None)
        if hasattr(holder, "items"):
            yield name, dict(holder.items())


def _add(
    found: _Found, module: nn.Module, holders: Mapping[str, Mapping[str, Any]], adapter: str
) -> None:
    found.layers += 1
    rank = getattr(module, "r", None)
    if isinstance(rank, Mapping) and adapter in rank:
        found.ranks.add(int(rank[adapter]))
    off = bool(getattr(module, "disable_adapters", False))
    found.active |= adapter in _names(module, "active_adapters") and not off
    found.merged |= adapter in _names(module, "merged_adapters")
    for holder in holders.values():
        held = holder.get(adapter)
        if isinstance(held, nn.Module):
            found.tensors += [*held.parameters(), *held.buffers()]
        elif isinstance(held, torch.Tensor):
            found.tensors.append(held)


def _names(module: nn.Module, attribute: str) -> Sequence[str]:
    found = getattr(module, attribute, ())
    return (found,) if isinstance(found, str) else tuple(found)


def _describe(tensor: torch.Tensor) -> str:
    """Shape, dtype, and how it is quantised if it is in a tensor class of its own."""
    text = f"{tuple(tensor.shape)} {tensor.dtype}"
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        text += f" {class_path(tensor)}"
    quantised = getattr(tensor, "quant_type", None)
    return text if quantised is None else f"{text} {quantised}"


def _quantisation(module: nn.Module) -> str:
    """The config that the model was quantised with, as diffusers and transformers keep it."""
    config = getattr(module, "config", None)
    found: Any = getattr(config, "quantization_config", None)
    told = found.to_dict() if hasattr(found, "to_dict") else found
    return json.dumps(told, sort_keys=True, default=_told)


def _told(value: Any) -> str:
    """In words that hold no memory address."""
    return str(value) if isinstance(value, torch.dtype) else class_path(value)
