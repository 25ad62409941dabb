"""Llama (Touvron et al. 2023), and what is built like it: TinyLlama, SmolLM2 and others."""

from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return decoder_spec(
        config,
        generation,
        "LlamaForCausalLM",
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
    )


ARCHITECTURE = Architecture(read_spec=_read_spec)
