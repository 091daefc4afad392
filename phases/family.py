"""Families of pipelines: real classes and real sizes from a config, with no files of weights."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal
from zlib import crc32

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ..offload.errors import InputError, ShapeError, UnknownNameError
from .quiet import quiet
from .shape import Shape
from .tokenizer import TokenizerSpec

_PIPELINES = files(__package__).joinpath("pipelines")


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Part(_Config):
    """A class by its import path, and the config to construct it with."""

    class_path: str = Field(alias="class")
    config: dict[str, Any] = {}

    def load(self) -> Any:
        return _load(self.class_path)


class ComponentSpec(Part):
    """A part that has weights."""

    dtype: Literal["bfloat16", "float32"]

    def build(self, *, virtual: bool, seed: int) -> Any:
        import torch

        from .weights import seeded_weights, virtual_weights

        model = self.load()

        def construct() -> Any:
            if hasattr(model, "config_class"):  # transformers' models take their config whole
                return model(model.config_class(**self.config))
            return model(**self.config)

        dtype = getattr(torch, self.dtype)
        if virtual:
            return virtual_weights(construct, dtype)
        return seeded_weights(construct, dtype, seed)


class Limits(_Config):
    """What every request must keep to; None is no limit."""

    multiple: int
    """Width and height are multiples of this many pixels; most pipelines round down to one."""
    max_tokens: int | None = None
    max_frames: int | None = 1


class Family(_Config):
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
