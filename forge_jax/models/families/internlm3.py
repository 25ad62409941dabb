"""InternLM 3 (Shanghai AI Laboratory 2025): Llama with two names for its biases."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec

DEFAULTS = {
    "vocab_size": 128512,
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "mlp_bias": False,
}


def _bias(config: HFConfig, name: str, other_name: str) -> bool:
    """Return the field; `other_name` is the spelling of the first releases."""
    return config.boolean(other_name if other_name in config.values else name)


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    bias, mlp_bias = _bias(config, "attention_bias", "qkv_bias"), _bias(config, "mlp_bias", "bias")
    if bias != mlp_bias:
        raise UnsupportedModelError(
            f"{config.where}: qkv_bias must be equal to bias, as in transformers"
        )
    return decoder_spec(
        config,
        generation,
        "InternLM3ForCausalLM",
        whole_heads=True,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=mlp_bias,
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "head_dim"}),
)
