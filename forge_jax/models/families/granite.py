"""Granite 3 (IBM 2024): Llama with factors on embeddings, layers, scores and logits."""

from typing import Any

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def factors(config: HFConfig) -> dict[str, Any]:
    """Return the fields that all Granite models share: biases of attention, and factors."""
    bias = config.boolean("attention_bias")
    return {
        "attention_bias": bias,
        "output_bias": bias,
        "attention_scale": config.number("attention_multiplier"),
        "embedding_scale": config.number("embedding_multiplier"),
        "residual_scale": config.number("residual_multiplier"),
        "logit_scale": 1 / config.number("logits_scaling"),
    }


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    mlp_bias = config.boolean("mlp_bias")
    return decoder_spec(
        config, generation, "GraniteForCausalLM", mlp_bias=mlp_bias, **factors(config)
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec, defaults=DEFAULTS, nullable=frozenset({"num_key_value_heads"})
)
