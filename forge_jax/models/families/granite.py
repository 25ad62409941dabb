"""Granite 3 (IBM 2024): Llama, with factors on embeddings, layers, scores and logits."""

from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return decoder_spec(
        config,
        generation,
        "GraniteForCausalLM",
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        attention_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0),
    )


ARCHITECTURE = Architecture(read_spec=_read_spec)
