"""Gemma 2 (2024, arXiv:2408.00118): norms on both sides, soft caps, every other layer a window."""

import math
from typing import Any

from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_windows


def gemma_parts(config: Config) -> dict[str, Any]:
    """What Gemma 2 and 3 have in common."""
    soft_caps = {
        part: config.number(name) if config.has(name) else None
        for part, name in (
            ("attention_soft_cap", "attn_logit_softcapping"),
            ("logit_soft_cap", "final_logit_softcapping"),
        )
    }
    return {
        "activation": "gelu_pytorch_tanh",
        "activation_name": "hidden_activation",
        "tied": True,
        "norm_placement": "both",
        "norm_offset": 1.0,
        "attention_bias": config.boolean("attention_bias", False),
        "output_bias": config.boolean("attention_bias", False),
        "attention_scale": config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        "embedding_scale": math.sqrt(config.integer("hidden_size")),
        **soft_caps,
    }


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    windows = read_windows(config, lambda layer: layer % 2 == 0, 4096)
    parts = gemma_parts(config)
    return decoder_spec(config, generation, "Gemma2ForCausalLM", windows=windows, **parts)


ARCHITECTURE = Architecture(read_spec=_read_spec)
