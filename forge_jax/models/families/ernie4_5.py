"""ERNIE 4.5, dense (Baidu 2025): Llama whose rotation pairs are neighbors."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec

DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_bias": False,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    bias = config.boolean("use_bias", False)
    return decoder_spec(
        config,
        generation,
        "Ernie4_5ForCausalLM",
        interleaved=True,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "head_dim", "use_bias"}),
)
