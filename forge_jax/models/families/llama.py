"""Llama (Touvron et al. 2023) and models built like it, such as TinyLlama and SmolLM2."""

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
}


def biases(config: HFConfig) -> dict[str, Any]:
    """Return the matrices that have a bias: all of attention, all of the MLP."""
    bias = config.boolean("attention_bias")
    mlp_bias = config.boolean("mlp_bias")
    return {"attention_bias": bias, "output_bias": bias, "mlp_bias": mlp_bias}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(config, generation, "LlamaForCausalLM", whole_heads=True, **biases(config))


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "head_dim"}),
)
