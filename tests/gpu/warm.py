"""Imports that a forked part finds done."""

import gc

import diffusers.modular_pipelines.qwenimage21  # noqa: F401
import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401

gc.collect()
gc.freeze()  # a rollback collects garbage: 0.3 s each where that walks all of diffusers
