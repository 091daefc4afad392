"""What to call a pipeline with so that it runs a shape, read from the pipeline itself; and one such
request, after which the pipeline is what it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle, islice
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from ...offload.errors import InputError, ShapeError
from ..shape import Shape
from .families import StubTokenizer, quiet

if TYPE_CHECKING:
    import torch


# a token each in the vocabularies in use, so that as many words are about as many tokens
_WORDS = ("red", "house", "with", "small", "blue", "door", "by", "the", "long", "river", "and")
_REQUIRED = inspect.Parameter.empty


def arguments(pipeline: Any, shape: Shape, *, seed: int = 0) -> dict[str, object]:
    """Call keywords for a diffusers pipeline, classic or modular, with a fresh generator.

    A dimension that `shape` leaves open stays with the pipeline, and so does the rounding of a
    size or a number of frames that it can't make exactly. `max_sequence_length` grows with the
    tokens and never shrinks below the pipeline's default, to which many pipelines pad a shorter
    prompt. A modular pipeline's guider is no argument: `request` sets it.

    Raises ShapeError where the pipeline has no way to do what the shape asks, and InputError
    where it needs more than a shape gives.
    """
    import torch

    inputs = _inputs(pipeline)
    _check_size(pipeline, shape)
    keywords: dict[str, object] = {
        "prompt": _words(shape.tokens),
        "generator": torch.Generator("cpu").manual_seed(seed),
        "output_type": "pt",
    }
    keywords = {name: value for name, value in keywords.items() if name in inputs}
    keywords |= _size(pipeline, shape, inputs)
    keywords |= _guidance(pipeline, shape, inputs)
    if shape.steps is not None and "num_inference_steps" in inputs:
        keywords["num_inference_steps"] = shape.steps
    default = inputs.get("max_sequence_length")
    if isinstance(default, int):
        keywords["max_sequence_length"] = max(default, shape.tokens)
    keywords |= _batch(shape, inputs, keywords)
    if _is_modular(pipeline):
        # without it the call returns its whole state, and with that every intermediate tensor
        keywords["output"] = pipeline.blocks.outputs[0].name
    missing = [n for n, value in inputs.items() if value is _REQUIRED and n not in keywords]
    if missing:
        raise InputError(
            f"{type(pipeline).__name__} needs {', '.join(missing)}, which no shape gives",
            hint="pipelines that start from a prompt can be run",
        )
    return keywords


def default_steps(pipeline: Any) -> int | None:
    """Denoise steps of a request that doesn't say."""
    steps = _inputs(pipeline).get("num_inference_steps")
    return steps if isinstance(steps, int) else None


def guiders(pipeline: Any) -> dict[str, Any]:
    """The guider components of a modular pipeline, by name; a classic one has none."""
    if not _is_modular(pipeline):
        return {}
    from diffusers.guiders.guider_utils import BaseGuidance

    components = pipeline.components.items()
    return {name: each for name, each in components if isinstance(each, BaseGuidance)}


def _is_modular(pipeline: Any) -> bool:
    from diffusers import ModularPipeline

    return isinstance(pipeline, ModularPipeline)


def _inputs(pipeline: Any) -> Mapping[str, object]:
    """The names that a call accepts, each with its default."""
    if _is_modular(pipeline):
        # `required` there counts what blocks hand to one another, so it says nothing of a call
        return {each.name: each.default for each in pipeline.blocks.inputs if each.name}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(pipeline.__call__).parameters.values()
    return {each.name: each.default for each in parameters if each.kind in named}


def _check_size(pipeline: Any, shape: Shape) -> None:
    # pipelines that pack latents into patches tell their image processor the side of a patch
    processor = getattr(getattr(pipeline, "image_processor", None), "config", None)
    sides = (
        getattr(processor, "vae_scale_factor", None),
        getattr(pipeline, "vae_scale_factor", None),
        getattr(pipeline, "vae_scale_factor_spatial", None),
    )
    smallest = max((side for side in sides if isinstance(side, int)), default=1)
    if min(shape.width, shape.height) < smallest:
        raise ShapeError(
            f"{shape.width}x{shape.height} is smaller than one latent of {type(pipeline).__name__}",
            hint=f"width and height start at {smallest}",
        )


def _size(pipeline: Any, shape: Shape, inputs: Mapping[str, object]) -> dict[str, object]:
    for name in ("width", "height"):
        if name not in inputs:
            raise ShapeError(
                f"{type(pipeline).__name__} takes no {name}",
                hint="pipelines that are told the size of their output can be run",
            )
    size: dict[str, object] = {"width": shape.width, "height": shape.height}
    if "num_frames" in inputs:
        size["num_frames"] = shape.frames
    elif shape.frames > 1:
        raise ShapeError(
            f"{type(pipeline).__name__} makes images, and the shape has {shape.frames} frames",
            hint=f"write {shape.width}x{shape.height}",
        )
    return size


def _guidance(pipeline: Any, shape: Shape, inputs: Mapping[str, object]) -> dict[str, object]:
    negative: dict[str, object] = {}
    if shape.guided and "negative_prompt" in inputs:
        negative["negative_prompt"] = _words(shape.tokens, first=1)
    if guiders(pipeline):
        return negative
    embedded = any(
        getattr(getattr(component, "config", None), "guidance_embeds", False)
        for component in pipeline.components.values()
    )
    if "true_cfg_scale" in inputs:
        scales: dict[str, object] = {"true_cfg_scale": shape.cfg_scale}
    elif "guidance_scale" in inputs and not embedded:
        scales = {"guidance_scale": shape.cfg_scale}
    elif shape.guided:
        raise ShapeError(
            f"{type(pipeline).__name__} has no classifier-free guidance, and the shape asks for "
            f"{shape.cfg_scale:g}",
            hint="leave guidance out, or give 1",
        )
    else:
        scales = {}
    if embedded and inputs.get("guidance_scale", 0) is None:
        scales["guidance_scale"] = 1.0  # a number that the denoiser reads; no size depends on it
    return scales | negative


def _batch(
    shape: Shape, inputs: Mapping[str, object], keywords: Mapping[str, object]
) -> dict[str, object]:
    for name in ("num_images_per_prompt", "num_videos_per_prompt"):
        if name in inputs:
            return {name: shape.batch}
    if shape.batch == 1:
        return {}
    prompts = ("prompt", "negative_prompt")
    return {name: [keywords[name]] * shape.batch for name in prompts if name in keywords}


def _words(count: int, *, first: int = 0) -> str:
    return " ".join(islice(cycle(_WORDS), first, first + count))


@contextmanager
def request(pipeline: Any, shape: Shape, *, seed: int = 0) -> Iterator[dict[str, object]]:
    """Yields the keywords of one call, and holds the pipeline ready for it inside the block.

    Stub tokenizers take the shape's tokens, a guider the shape's guidance; both are put back.
    Inside the block the libraries log nothing, and what the pipeline's `check_inputs` refuses
    is raised as ShapeError.
    """
    keywords = arguments(pipeline, shape, seed=seed)
    guides = guiders(pipeline)
    tokenizers = [each for each in pipeline.components.values() if isinstance(each, StubTokenizer)]
    tokens = [each.tokens for each in tokenizers]
    with quiet():
        try:
            for each in tokenizers:
                each.tokens = shape.tokens
            for name, guider in guides.items():
                setattr(pipeline, name, _guider_for(guider, shape))
            yield keywords
        except ValueError as error:
            if not _is_refusal(error):
                raise
            raise ShapeError(
                f"{type(pipeline).__name__} refuses {shape}: {error}",
                hint="change the shape as the pipeline asks",
            ) from error
        finally:
            for each, before in zip(tokenizers, tokens, strict=True):
                each.tokens = before
            for name, guider in guides.items():
                setattr(pipeline, name, guider)


def run(pipeline: Any, shape: Shape, *, seed: int = 0) -> torch.Tensor:
    """The images or frames of one request. Raises as `request` does."""
    with request(pipeline, shape, seed=seed) as keywords:
        result = pipeline(**keywords)
    # a modular pipeline returns what `output` names, a classic one a record that starts with it
    return result if hasattr(result, "shape") else result[0]  # type: ignore[no-any-return]


def _guider_for(guider: Any, shape: Shape) -> Any:
    if not shape.guided:
        return guider.new(enabled=False)
    if "guidance_scale" in guider.config:
        return guider.new(enabled=True, guidance_scale=shape.cfg_scale)
    return guider.new(enabled=True)


def _is_refusal(error: ValueError) -> bool:
    frames = walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == "check_inputs" for frame, _ in frames)
