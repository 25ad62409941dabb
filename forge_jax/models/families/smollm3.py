"""SmolLM3 (Hugging Face 2025): Llama without rotation (NoPE) in some layers."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import MAX_LAYERS, ModelSpec, decoder_spec, read_window, read_windows

DEFAULTS = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "attention_bias": False,
    "mlp_bias": False,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "use_sliding_window": False,
    "sliding_window": None,
}


def read_no_rope(config: HFConfig) -> frozenset[int]:
    """Return the layers with a 0 in `no_rope_layers`, or else every fourth layer by default."""
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    rotated = config.value("no_rope_layers")
    if rotated is not None:
        known = isinstance(rotated, list) and len(rotated) == layers
        if not known or any(type(value) is not int or value not in (0, 1) for value in rotated):
            raise config.error("no_rope_layers", f"a list of {layers} zeros and ones")
        return frozenset(layer for layer, value in enumerate(rotated) if not value)
    every = config.integer("no_rope_layer_interval")
    return frozenset(layer for layer in range(layers) if (layer + 1) % every == 0)


def _windows(config: HFConfig, no_rope: frozenset[int]) -> tuple[int | None, ...]:
    """Return windows by `layer_types`, even if unused; else for layers without rotation."""
    window, used = read_window(config), config.boolean("use_sliding_window")
    return read_windows(
        config, window, lambda layer: used and window is not None and layer in no_rope
    )


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    no_rope = read_no_rope(config)
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config,
        generation,
        "SmolLM3ForCausalLM",
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=config.boolean("mlp_bias"),
        no_rope=no_rope,
        windows=_windows(config, no_rope),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "sliding_window", "no_rope_layers"}),
)
