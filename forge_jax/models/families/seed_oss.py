"""Seed-OSS (ByteDance 2025): Llama with biases of attention that are set for each matrix."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec

DEFAULTS = {
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(
        config,
        generation,
        "SeedOssForCausalLM",
        attention_bias=config.boolean("attention_bias"),
        output_bias=config.boolean("attention_out_bias"),
        mlp_bias=config.boolean("mlp_bias"),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "head_dim"}),
)
