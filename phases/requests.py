"""One request to a pipeline, which is afterwards what it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from ..offload.errors import ShapeError
from .arguments import arguments, guiders
from .quiet import quiet
from .shape import Shape
from .tokenizer import StubTokenizer

if TYPE_CHECKING:
    import torch


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
