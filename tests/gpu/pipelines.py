"""Pipelines with random weights, from tiny to the full Qwen-Image-2.1."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import nn

from residency.phases.component import Declaration, declare
from residency.phases.diffusers.families import Family, find_family
from residency.phases.diffusers.pipeline import DiffusersPipeline
from residency.phases.shape import Shape

GIB = 1 << 30
NAME = "qwen-image-2.1"

ENCODER = "text_encoder"
RESIDENCY: Mapping[str, str] = {
    "dit": "resident",
    ENCODER: "layerwise-offload",
    "vae": "resident",
}
RESIDENT_LAYERS: Mapping[str, str] = {ENCODER: "0.65"}

FULL_HOST_BYTES = 56 * GIB
"""Weights of 30.2 GiB, 16.3 of them pinned once more, and what a process takes besides."""
FULL_S = 200.0
"""What the full pipeline may take on both cards: reckoned, not measured."""

_BLOCK_VALUES = 1 << 24
_OFFSETS = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A pipeline that can be built, and the request that is made of it."""

    name: str
    family: Callable[[], Family]
    shape: Shape
    cards_bytes: tuple[int, int] | None
    """Of the two cards of the motivating case. None: their like at its size is worked out."""

    def build(self) -> DiffusersPipeline:
        """With random weights, on the host."""
        family = self.family()
        return DiffusersPipeline(filled(family), name=self.name, request=family.request)

    def build_virtual(self) -> DiffusersPipeline:
        """For a prediction: without values where it is large."""
        family = self.family()
        return DiffusersPipeline(family.build(), name=self.name, request=family.request)

    def declarations(self, pipeline: DiffusersPipeline) -> dict[str, Declaration]:
        return declare(pipeline.components, RESIDENCY, RESIDENT_LAYERS)


def mid_family() -> Family:
    """Layers as wide as the full pipeline's and few of them, a small vocabulary, all of the VAE:
    4.5 GiB in bf16."""
    config = _shortened(find_family(NAME), encoder_layers=4, denoiser_layers=4)
    encoder = config["components"][ENCODER]["config"]
    encoder["text_config"]["vocab_size"] = 8192
    encoder["vision_config"] |= {"depth": 4, "deepstack_visual_indexes": [0, 1, 2]}
    special = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    encoder |= {name: 8180 + i for i, name in enumerate(special)}
    config["tokenizers"]["processor"] |= {"vocabulary": 8180, "image_token": 8180}
    return Family.model_validate(config)


def tiny_family() -> Family:
    """Shorter than the tiny one, so that a simulated card is through with it sooner."""
    family = find_family(NAME, tiny=True)
    return Family.model_validate(_shortened(family, encoder_layers=3, denoiser_layers=2))


def _shortened(family: Family, *, encoder_layers: int, denoiser_layers: int) -> dict[str, Any]:
    config = family.model_dump(mode="json", by_alias=True)
    config["components"][ENCODER]["config"]["text_config"]["num_hidden_layers"] = encoder_layers
    config["components"]["transformer"]["config"]["num_layers"] = denoiser_layers
    return config


def filled(family: Family, *, seed: int = 0) -> Any:
    """The pipeline with weights that were drawn once and are repeated, since drawing all of a full
    pipeline's takes minutes."""
    pipeline = family.build(virtual=True)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(_BLOCK_VALUES + _OFFSETS, generator=generator)
    for name, module in pipeline.components.items():
        if isinstance(module, nn.Module):
            _fill(name, module, drawn)
    return pipeline


def _fill(name: str, module: nn.Module, drawn: torch.Tensor) -> None:
    """Matrices and kernels keep the variance of what they multiply; vectors, which are scales and
    biases, stay near one and near zero."""
    blocks = {dtype: drawn.to(dtype) for dtype in {each.dtype for each in module.parameters()}}
    for path, parameter in module.named_parameters():
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        flat, block = values.view(-1), blocks[parameter.dtype]
        start = crc32(f"{name}.{path}".encode()) % _OFFSETS
        is_vector = parameter.dim() < 2
        spread = 0.05 if is_vector else math.prod(parameter.shape[1:]) ** -0.5
        for part in flat.split(_BLOCK_VALUES):
            torch.mul(block[start : start + part.numel()], spread, out=part)
        if is_vector and not path.endswith("bias"):
            values += 1
        parameter.data = values


TINY = Source(
    "tiny",
    tiny_family,
    Shape(64, 64, tokens=16, steps=2, guidance=1.0),
    None,
)
MID = Source("mid-size", mid_family, Shape(512, 512, steps=4, guidance=1.0), None)
FULL = Source(
    "full",
    lambda: find_family(NAME),
    Shape(720, 720),
    (round(23.52 * GIB), round(31.4 * GIB)),
)
