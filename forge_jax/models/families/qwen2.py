"""Qwen 2 and 2.5 (2024, arXiv:2407.10671): Llama with biases on queries, keys and values."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_window, read_windows

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def qwen_window(config: HFConfig) -> int | None:
    """Return the window size if `use_sliding_window` is true."""
    return read_window(config) if config.boolean("use_sliding_window") else None


def qwen_windows(config: HFConfig) -> tuple[int | None, ...]:
    """Return windows by `layer_types`, else for the layers from `max_window_layers` on."""
    window, first = qwen_window(config), config.integer("max_window_layers", low=0)
    return read_windows(config, window, lambda layer: window is not None and layer >= first)


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    windows = qwen_windows(config)
    return decoder_spec(
        config, generation, "Qwen2ForCausalLM", attention_bias=True, windows=windows
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "sliding_window"}),
)
