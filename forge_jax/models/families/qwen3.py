"""Qwen 3 (2025, arXiv:2505.09388): Llama with norms on each head of queries and keys."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.qwen2 import qwen_windows
from forge_jax.models.spec import ModelSpec, decoder_spec

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config,
        generation,
        "Qwen3ForCausalLM",
        attention_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=qwen_windows(config),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "sliding_window"}),
)
