"""All that an undo has to bring back, in a form that can be compared."""

from typing import Any

import torch
from torch import nn

_CONTENTS = ("_parameters", "_buffers", "_modules")


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Every tensor, hook and attribute of `module` and of what is in it, by name."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for name, value in vars(part).items():
            at = f"{path}.{name}"
            if name in _CONTENTS:
                found[at] = {key: id(item) for key, item in value.items()}
            elif "hooks" in name:
                found[at] = [(key, id(hook)) for key, hook in value.items()]
            else:
                found[at] = (id(value), repr(value))
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        found[f"tensor {name}"] = _tensor(tensor)
    return found


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.device,
        tensor.dtype,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().data_ptr(),
        tensor.untyped_storage().nbytes(),
        tensor.requires_grad,
        tensor.detach().flatten().tolist(),
    )
