"""Qwen 3 (2025, arXiv:2505.09388): Llama with norms of each head of queries and keys."""

from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.qwen2 import qwen_windows
from forge_jax.models.spec import ModelSpec, decoder_spec


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return decoder_spec(
        config,
        generation,
        "Qwen3ForCausalLM",
        attention_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=qwen_windows(config),
    )


ARCHITECTURE = Architecture(read_spec=_read_spec)
