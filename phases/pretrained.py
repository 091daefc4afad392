"""A pipeline from a folder of weights, as diffusers saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..offload.errors import InputError
from .diffusers import DiffusersPipeline
from .quiet import quiet

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
