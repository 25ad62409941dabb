"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama, with a sliding window in some versions."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import (
    ModelSpec,
    decoder_spec,
    read_window,
    read_windows,
    window_everywhere,
)

DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4096,
}


def _windows(config: HFConfig) -> tuple[int | None, ...]:
    """Return the window of each layer: the same in all, unless the file has `layer_types`.

    transformers loads a file with `layer_types` as a Ministral, and then requires a window and a
    `head_dim`, even if they have no effect.
    """
    window = read_window(config)
    if (
        config.values.get("model_type", "mistral") != "mistral"
        or "layer_types" not in config.values
    ):
        return window_everywhere(config, window)
    for name in ("sliding_window", "head_dim"):
        if not config.has(name):
            raise config.error(name, "set if the file has layer_types")
    return read_windows(config, window, lambda layer: True)


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(config, generation, "MistralForCausalLM", windows=_windows(config))


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"head_dim", "sliding_window"}),
)
