"""SmolLM3 (Hugging Face 2025): Llama, where some layers do not rotate queries and keys (NoPE)."""

from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.qwen2 import qwen_windows
from forge_jax.models.spec import MAX_LAYERS, ModelSpec, decoder_spec


def _no_rope(config: Config) -> frozenset[int]:
    """By `no_rope_layers`, which has a 0 for each of these; else every fourth layer."""
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if config.has("no_rope_layers"):
        rotated = config.values["no_rope_layers"]
        known = isinstance(rotated, list) and len(rotated) == layers
        if not known or any(type(value) is not int or value not in (0, 1) for value in rotated):
            raise config.error("no_rope_layers", f"a list of {layers} times 0 or 1")
        return frozenset(layer for layer, value in enumerate(rotated) if not value)
    every = config.integer("no_rope_layer_interval", 4)
    return frozenset(layer for layer in range(layers) if (layer + 1) % every == 0)


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return decoder_spec(
        config,
        generation,
        "SmolLM3ForCausalLM",
        tied=True,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias", False),
        no_rope=_no_rope(config),
        windows=qwen_windows(config),
    )


ARCHITECTURE = Architecture(read_spec=_read_spec)
