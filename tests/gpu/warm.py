"""Imports that a forked part finds done."""

import diffusers.modular_pipelines.qwenimage21  # noqa: F401
import transformers.models.qwen3_vl.modeling_qwen3_vl  # noqa: F401
