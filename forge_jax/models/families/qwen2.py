"""Qwen 2 and 2.5 (2024, arXiv:2407.10671): Llama with biases of queries, keys and values."""

from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_windows


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Only if the file says so, and only in the layers from `max_window_layers` on."""
    if not config.boolean("use_sliding_window", False):
        return ()
    first = config.integer("max_window_layers", 28, low=0)
    return read_windows(config, lambda layer: layer >= first)


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    windows = qwen_windows(config)
    return decoder_spec(
        config, generation, "Qwen2ForCausalLM", attention_bias=True, windows=windows
    )


ARCHITECTURE = Architecture(read_spec=_read_spec)
