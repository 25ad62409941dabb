"""EXAONE 4 (2025, arXiv:2507.11407): norms after sublayers and per head, and full layers without
rotation between layers with a window."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import MAX_LAYERS, ModelSpec, decoder_spec, read_window, read_windows

DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
}


def _windows(config: HFConfig) -> tuple[int | None, ...]:
    """Return windows by `layer_types`, else in all but each `sliding_window_pattern`-th layer."""
    window = read_window(config)
    if config.has("layer_types"):
        return read_windows(config, window, lambda layer: False)
    if window is None:
        raise config.error("layer_types", "a list, because sliding_window is null")
    every = config.integer("sliding_window_pattern", high=MAX_LAYERS)
    return read_windows(config, window, lambda layer: (layer + 1) % every != 0)


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    windows = _windows(config)
    return decoder_spec(
        config,
        generation,
        "Exaone4ForCausalLM",
        norm_placement="after",
        qk_norm="head",
        windows=windows,
        no_rope=frozenset(layer for layer, window in enumerate(windows) if window is None),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"sliding_window", "sliding_window_pattern"}),
)
