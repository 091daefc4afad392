"""A whole pipeline's state, values included, taken without any of the planner's own code."""

from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class PipelineImage:
    """Everything a rollback has to put back, by name."""

    attributes: dict[str, object] = field(default_factory=dict)
    """Attributes and hook tables of the pipeline, its components and all their modules."""
    tensors: dict[str, tuple] = field(default_factory=dict)
    """Device, dtype, shape, stride, offset, requires_grad, and the storage's number."""
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def differences(self, other: "PipelineImage") -> list[str]:
        found = []
        for table in ("attributes", "tensors"):
            mine, theirs = getattr(self, table), getattr(other, table)
            found += [
                f"{table}: {name}"
                for name in sorted(mine.keys() | theirs.keys())
                if not _same(mine.get(name), theirs.get(name))
            ]
        found += [
            f"values: {name}"
            for name in sorted(self.values.keys() | other.values.keys())
            if name not in self.values
            or name not in other.values
            or not torch.equal(self.values[name], other.values[name])
        ]
        return found


def _same(mine, theirs) -> bool:
    if mine is theirs:
        return True
    return isinstance(mine, tuple) and isinstance(theirs, tuple) and mine == theirs


def image_of(pipeline) -> PipelineImage:
    image = PipelineImage()
    storages: dict[int, int] = {}
    _attributes(image, "pipeline", pipeline)
    for name, component in pipeline.components.items():
        if not isinstance(component, nn.Module):
            _attributes(image, name, component)
            continue
        for path, module in component.named_modules(prefix=name):
            _attributes(image, path, module)
        for path, tensor in (*component.named_parameters(), *component.named_buffers()):
            storage = tensor.untyped_storage()
            image.tensors[f"{name}.{path}"] = (
                str(tensor.device),
                tensor.dtype,
                tuple(tensor.shape),
                tensor.stride(),
                tensor.storage_offset(),
                tensor.requires_grad,
                storage.nbytes(),
                storages.setdefault(storage.data_ptr(), len(storages)),
            )
            image.values[f"{name}.{path}"] = tensor.detach().cpu().clone()
    return image


def _attributes(image: PipelineImage, name: str, each: object) -> None:
    for key, value in getattr(each, "__dict__", {}).items():
        if isinstance(each, nn.Module) and isinstance(value, dict):
            image.attributes[f"{name}.{key}"] = tuple((k, id(v)) for k, v in value.items())
        elif type(value) is list:
            image.attributes[f"{name}.{key}"] = (id(value), *map(id, value))
        else:
            image.attributes[f"{name}.{key}"] = value
