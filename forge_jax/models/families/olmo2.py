"""OLMo 2 (2025, arXiv:2501.00656): norms after attention and MLP, and at queries and keys."""

from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return decoder_spec(
        config,
        generation,
        "Olmo2ForCausalLM",
        eps=1e-5,
        norm_placement="after",
        norm_in_float32=True,
        qk_norm="all",
        attention_bias=bias,
        output_bias=bias,
    )


ARCHITECTURE = Architecture(read_spec=_read_spec)
