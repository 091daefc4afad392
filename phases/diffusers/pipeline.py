"""Any diffusers pipeline, classic or modular, behind one adapter; built, or from a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...offload.device import Device
from ...offload.errors import InputError
from ..component import Component
from ..shape import Shape, largest_shapes
from .families import quiet
from .request import default_steps, run

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class Result:
    """What a request made, and at which shape: pipelines round to multiples of their own."""

    value: torch.Tensor
    shape: Shape


@dataclass(frozen=True, slots=True)
class _ExecutesOn:
    """What diffusers reads of an accelerate hook: where the inputs have to be."""

    is_ours: ClassVar[bool] = True
    execution_device: torch.device

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Called where all hooks of accelerate's are to go, as before another offload is enabled:
        without it the inputs would be on the host and the weights not."""
        raise InputError(
            f"{type(module).__name__} is offloaded by residency",
            hint="close the settlement before another offload is enabled or hooks are removed",
        )


class DiffusersPipeline:
    """Takes the components from the pipeline, and knows nothing of the model.

    `request` is what the model card recommends: it completes shapes that leave something open.
    Raises InputError if the pipeline has no component that is a torch module.
    """

    def __init__(
        self, pipeline: Any, *, name: str | None = None, request: Shape | None = None
    ) -> None:
        from torch import nn

        self.pipeline = pipeline
        self.request = request
        self.name = name or type(pipeline).__name__
        self._bound: _ExecutesOn | None = None
        self._modules = {
            key: module
            for key, module in pipeline.components.items()
            if isinstance(module, nn.Module)
        }
        self.components = tuple(
            Component(key, module)
            for key, module in self._modules.items()
            if next(module.parameters(), None) is not None
        )
        if not self.components:
            raise InputError(
                f"{self.name} has no component with weights",
                hint="load the pipeline's components before it is planned",
            )

    def bind(self, device: Device) -> None:
        """Make the pipeline put its inputs on `device`, wherever its components' weights are.

        Diffusers asks a component's `_hf_hook` where it executes, and where it has none, takes the
        device of its weights, which between uses is the host.
        Raises InputError where another offload has put its own hook there.
        """
        for name, module in self._modules.items():
            hook = vars(module).get("_hf_hook") or _group_offloading(module)
            if hook is not None:
                raise InputError(
                    f"{name} of {self.name} is offloaded by a {type(hook).__name__} already",
                    hint="hand the pipeline over without its own offloading enabled",
                )
        self._bound = _ExecutesOn(device.torch_device)
        for module in self._modules.values():
            module._hf_hook = self._bound  # type: ignore[assignment]

    def unbind(self) -> None:
        for _, module in self._bound_modules():
            del module._hf_hook

    def bound(self) -> Iterator[str]:
        """The modules that we still bind, in words."""
        for name, _ in self._bound_modules():
            yield f"{name} is told where it executes"

    def _bound_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """By this adapter: another one over the same pipeline takes off its own."""
        for name, module in self._modules.items():
            if self._bound is not None and vars(module).get("_hf_hook") is self._bound:
                yield name, module

    def run(self, shape: Shape, *, seed: int = 0) -> Result:
        """One request. Raises ShapeError where the pipeline refuses the shape."""
        value = run(self.pipeline, self.completed(shape), seed=seed)
        height, width = value.shape[-2:]
        frames = value.shape[1] if value.dim() == 5 else shape.frames
        return Result(value, replace(shape, width=width, height=height, frames=frames))

    def steps(self, shape: Shape) -> int | None:
        """Denoise steps of a request at `shape`; None where the pipeline has none."""
        return self.completed(shape).steps or default_steps(self.pipeline)

    def completed(self, shape: Shape) -> Shape:
        return shape if self.request is None else shape.completed(self.request)

    def largest(self, shapes: Iterable[Shape]) -> tuple[Shape, ...]:
        """Those of `shapes` that no other one covers, as they are asked for."""
        asked: dict[Shape, Shape] = {}
        for shape in shapes:
            asked.setdefault(self.completed(shape), shape)
        return tuple(asked[shape] for shape in largest_shapes(asked))


def _group_offloading(module: nn.Module) -> object | None:
    """The hook of diffusers' group offloading, if one is on `module` or in it."""
    for each in module.modules():
        registry = getattr(each, "_diffusers_hook", None)
        if registry is not None and (hook := registry.get_hook("group_offloading")) is not None:
            found: object = hook
            return found
    return None


INDEX = "model_index.json"


def is_pretrained(name: str) -> bool:
    """Whether `name` is a folder with a diffusers pipeline in it."""
    return (Path(name) / INDEX).is_file()


def load_pretrained(folder: str, *, dtype: str = "bfloat16") -> DiffusersPipeline:
    """The pipeline on the host, for inference. Nothing is fetched from outside the folder.

    Raises InputError where it can't be loaded.
    """
    import torch
    from diffusers import DiffusionPipeline

    loaded: Any
    try:
        with quiet():
            loaded = DiffusionPipeline.from_pretrained(  # type: ignore[no-untyped-call]
                folder, torch_dtype=getattr(torch, dtype), local_files_only=True
            )
    except (OSError, ValueError, ImportError, AttributeError) as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise InputError(
            f"{folder} can't be loaded as a pipeline: {first}",
            hint=f"name a folder with {INDEX} and every component that it lists",
        ) from error
    loaded.set_progress_bar_config(disable=True)
    for component in loaded.components.values():
        if isinstance(component, torch.nn.Module):
            component.requires_grad_(False).eval()
    return DiffusersPipeline(loaded, name=Path(folder).resolve().name)
