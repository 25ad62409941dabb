"""Gemma 2 (2024, arXiv:2408.00118): norms on both sides, soft caps, a window in every 2nd layer."""

import math
from typing import Any

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_window, read_windows

DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": None,
}
NULLABLE = frozenset(
    {"attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"}
)


def soft_cap(config: HFConfig, name: str) -> float | None:
    """Return the soft cap of scores or logits, or None if they are not capped."""
    return config.number(name) if config.has(name) else None


def gemma_parts(config: HFConfig) -> dict[str, Any]:
    """Return the fields that Gemma 2 and 3 share."""
    bias = config.boolean("attention_bias")
    return {
        "activation_name": "hidden_activation",
        "whole_heads": True,
        "norm_placement": "both",
        "norm_offset": 1.0,
        "attention_bias": bias,
        "output_bias": bias,
        "attention_scale": config.number("query_pre_attn_scalar") ** -0.5,
        "embedding_scale": math.sqrt(config.integer("hidden_size")),
        "logit_soft_cap": soft_cap(config, "final_logit_softcapping"),
    }


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(
        config,
        generation,
        "Gemma2ForCausalLM",
        attention_soft_cap=soft_cap(config, "attn_logit_softcapping"),
        windows=read_windows(config, read_window(config), lambda layer: layer % 2 == 0),
        **gemma_parts(config),
    )


ARCHITECTURE = Architecture(read_spec=_read_spec, defaults=DEFAULTS, nullable=NULLABLE)
