"""Families of pipelines: real classes and real sizes from a config, with no files of weights, and
stand-ins for tokenizers and processors."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, Self
from zlib import crc32

from pydantic import Field, field_validator

from ...offload.errors import InputError, ShapeError, UnknownNameError
from ..schedule import Value
from ..shape import Shape

if TYPE_CHECKING:
    import torch
    from transformers import BatchEncoding


_PIPELINES = files(__package__).joinpath("pipelines")


class Part(Value):
    """A class by its import path, and the config to construct it with."""

    class_path: str = Field(alias="class")
    config: dict[str, Any] = Field(default_factory=dict)

    def load(self) -> Any:
        return _load(self.class_path)


class ComponentSpec(Part):
    """A part that has weights."""

    dtype: Literal["bfloat16", "float32"]

    def build(self, *, virtual: bool, seed: int) -> Any:
        import torch

        model = self.load()

        def construct() -> Any:
            if hasattr(model, "config_class"):  # transformers' models take their config whole
                return model(model.config_class(**self.config))
            return model(**self.config)

        dtype = getattr(torch, self.dtype)
        if virtual:
            return virtual_weights(construct, dtype)
        return seeded_weights(construct, dtype, seed)


class Limits(Value):
    """What every request must keep to; None is no limit."""

    multiple: int
    """Width and height are multiples of this many pixels; most pipelines round down to one."""
    max_tokens: int | None = None
    max_frames: int | None = 1


class Family(Value):
    """One pipeline config: what to build, and the request that its model card recommends."""

    name: str
    scale: Literal["full", "tiny"]
    pipeline: str
    """The import path of a diffusers pipeline, or of the blocks of a modular one."""
    components: dict[str, ComponentSpec]
    scheduler: Part
    tokenizers: dict[str, TokenizerSpec]
    request: Shape
    limits: Limits

    @field_validator("request", mode="before")
    @classmethod
    def _read_request(cls, value: dict[str, Any]) -> Shape:
        return Shape(**value)

    def check(self, shape: Shape) -> None:
        """Raises ShapeError where `shape` can't be run, without building anything."""
        limits = self.limits
        if min(shape.width, shape.height) < limits.multiple:
            raise ShapeError(
                f"{shape.width}x{shape.height} is too small for {self.name}",
                hint=f"width and height are multiples of {limits.multiple}",
            )
        for name, most in (("tokens", limits.max_tokens), ("frames", limits.max_frames)):
            value = getattr(shape, name)
            if most is not None and value > most:
                raise ShapeError(
                    f"{self.name} can't do {value} {name}", hint=f"it does {most} at most"
                )

    def build(self, *, virtual: bool | None = None, seed: int = 0) -> Any:
        """The pipeline on the CPU, for inference, with stubs for tokenizers and processors.

        Virtual parameters have a shape, a dtype and no values, and take no memory; they are what
        a full-scale pipeline gets by default. Others depend on `seed` alone.
        Raises InputError where diffusers or transformers isn't installed.
        """
        _require_libraries()
        if virtual is None:
            virtual = self.scale == "full"
        with quiet():
            parts = {
                name: spec.build(virtual=virtual, seed=seed + crc32(name.encode()))
                for name, spec in self.components.items()
            }
            parts |= {name: spec.stub() for name, spec in self.tokenizers.items()}
            parts["scheduler"] = self.scheduler.load()(**self.scheduler.config)
            made = _load(self.pipeline)
            if hasattr(made, "init_pipeline"):
                pipeline = made().init_pipeline()
                pipeline.update_components(**parts)
                _hide_progress(pipeline._blocks)
            else:
                pipeline = made(**parts)
                pipeline.set_progress_bar_config(disable=True)
        return pipeline


@cache
def families() -> tuple[str, ...]:
    """The names of all families, sorted."""
    return tuple(sorted(entry.name for entry in _PIPELINES.iterdir() if entry.is_dir()))


def find_family(name: str, *, tiny: bool = False) -> Family:
    """Raises UnknownNameError."""
    if name not in families():
        raise UnknownNameError("pipeline", name, families())
    config = _PIPELINES.joinpath(name, "tiny.json" if tiny else "full.json")
    return Family.model_validate_json(config.read_text(encoding="utf-8"))


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _hide_progress(blocks: Any) -> None:
    """A modular pipeline's own setter reaches the outermost blocks only."""
    if hasattr(blocks, "set_progress_bar_config"):
        blocks.set_progress_bar_config(disable=True)
    for block in blocks.sub_blocks.values():
        _hide_progress(block)


def _require_libraries() -> None:
    for library in ("diffusers", "transformers", "accelerate"):
        try:
            import_module(library)
        except ImportError as error:
            raise InputError(
                f"pipelines are built with {library}: {error}",
                hint="pip install 'residency[diffusers]'",
            ) from error


_FIRST_ID = 3  # below stand padding, end and unknown in every vocabulary here


class TokenizerSpec(Value):
    """What a pipeline config says of one tokenizer or processor."""

    kind: Literal["tokenizer", "processor"] = "tokenizer"
    vocabulary: int
    """Ids handed out are below this one; special ids lie at or above it."""
    model_max_length: int
    template_tokens: int = 0
    """Tokens that the pipeline's prompt template adds in front of every prompt."""
    end_token: int | None = None
    image_token: int | None = None

    def stub(self) -> StubTokenizer:
        return StubProcessor(self) if self.kind == "processor" else StubTokenizer(self)


class StubTokenizer:
    """Takes every text to be `tokens` tokens long, whatever it says.

    The ids depend on the text alone, so that a negative prompt reads differently from a prompt.
    The length, with the template's tokens, is cut to `max_length`, or without one to
    `model_max_length`.
    """

    padding_side = "right"

    def __init__(self, spec: TokenizerSpec, *, tokens: int = 512) -> None:
        self.spec = spec
        self.tokens = tokens

    @property
    def model_max_length(self) -> int:
        return self.spec.model_max_length

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        return {}

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        **_: object,
    ) -> BatchEncoding:
        import torch
        from transformers import BatchEncoding

        longest = max_length or self.model_max_length
        length = min(self.tokens + self.spec.template_tokens, longest)
        padded = longest if padding == "max_length" else length
        texts = [text] if isinstance(text, str) else text
        ids = torch.zeros(len(texts), padded, dtype=torch.long)
        for row, each in zip(ids, texts, strict=True):
            row[:length] = torch.tensor(self._ids(each, length))
        mask = torch.zeros_like(ids)
        mask[:, :length] = 1
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})

    def tokenize(self, text: str) -> list[str]:
        return text.split()

    def batch_decode(self, rows: Sequence[object], **_: object) -> list[str]:
        return ["" for _ in rows]

    def _ids(self, text: str, length: int) -> list[int]:
        usable = self.spec.vocabulary - _FIRST_ID
        start = crc32(text.encode())
        ids = [_FIRST_ID + (start + 31 * position) % usable for position in range(length)]
        if self.spec.end_token is not None:
            ids[-1] = self.spec.end_token
        return ids


class StubProcessor(StubTokenizer):
    """A vision-language processor that reads text only."""

    @property
    def tokenizer(self) -> Self:
        return self

    def __call__(self, text: str | Sequence[str], **options: Any) -> BatchEncoding:
        import torch

        if options.pop("images", None) is not None:
            raise InputError(
                "a stub processor reads no images", hint="build the pipeline from its real files"
            )
        encoding = super().__call__(text, **options)
        encoding["mm_token_type_ids"] = torch.zeros_like(encoding["input_ids"])
        return encoding

    def encode(self, text: str) -> list[int]:
        """The ids of a special token's text: the only use that pipelines make of it."""
        token = self.spec.image_token
        return self._ids(text, 1) if token is None else [token]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, object]], **_: object
    ) -> list[list[int]]:
        """One row of as many ids as the template takes."""
        return [self._ids(str(messages), self.spec.template_tokens)]


def virtual_weights(
    construct: Callable[[], torch.nn.Module], dtype: torch.dtype
) -> torch.nn.Module:
    """The module with parameters of the right shapes, whose memory is reserved and not touched.

    Parameters are marked virtual; buffers, and what else the constructor computes, are real.
    """
    import torch
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    from ...offload.simulated.storage import mark_virtual

    with _constructing(dtype), init_empty_weights(include_buffers=False):
        module = construct()
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(owner, name, torch.nn.Parameter(empty, requires_grad=False))
    # on the way through the meta device each owner of a tied weight got its own
    tie_weights = getattr(module, "tie_weights", None)
    if tie_weights is not None:
        tie_weights()
    for parameter in module.parameters():
        mark_virtual(parameter)
    return module.eval().requires_grad_(False)


def seeded_weights(
    construct: Callable[[], torch.nn.Module], dtype: torch.dtype, seed: int
) -> torch.nn.Module:
    """The module with weights that depend on the seed alone, none of them zero for good.

    Matrices and kernels keep the variance of what they multiply (1/fan-in); vectors, which are
    scales and biases, stay near what the constructor made them.
    """
    import torch

    with _constructing(dtype):
        module = construct()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, math.prod(parameter.shape[1:]) ** -0.5, generator=generator)
            else:
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise, alpha=0.05)
    return module.eval().requires_grad_(False)


@contextmanager
def _constructing(dtype: torch.dtype) -> Iterator[None]:
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps diffusers and transformers from logging; what goes wrong, they raise as well."""
    from diffusers.utils import logging as diffusers_logs
    from transformers.utils import logging as transformers_logs

    libraries = (diffusers_logs, transformers_logs)
    before = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
