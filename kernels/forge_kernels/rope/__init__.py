"""Rotary position embeddings."""

from forge_kernels.rope.api import (
    apply_rope,
    inverse_frequencies,
    linear_scaling,
    llama3_scaling,
    rope_tables,
    yarn_attention_factor,
    yarn_scaling,
)

__all__ = [
    "apply_rope",
    "inverse_frequencies",
    "linear_scaling",
    "llama3_scaling",
    "rope_tables",
    "yarn_attention_factor",
    "yarn_scaling",
]
