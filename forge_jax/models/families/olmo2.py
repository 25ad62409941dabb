"""OLMo 2 (2025, arXiv:2501.00656): norms after attention and MLP, and on queries and keys."""

from typing import Any

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec

DEFAULTS = {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
    "attention_bias": False,
}


def parts(config: HFConfig) -> dict[str, Any]:
    """Return the fields that OLMo 2 and 3 share."""
    bias = config.boolean("attention_bias")
    return {
        "norm_placement": "after",
        "norm_in_float32": True,
        "qk_norm": "all",
        "attention_bias": bias,
        "output_bias": bias,
    }


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(config, generation, "Olmo2ForCausalLM", **parts(config))


ARCHITECTURE = Architecture(
    read_spec=_read_spec, defaults=DEFAULTS, nullable=frozenset({"num_key_value_heads"})
)
