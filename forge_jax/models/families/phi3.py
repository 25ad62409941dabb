"""Phi-3 (2024, arXiv:2404.14219): Llama, with matrices stored together, and LongRoPE."""

from functools import partial

from forge_jax.checkpoint.weight_map import decoder_weights
from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_windows


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    windows = read_windows(config, lambda layer: True)
    return decoder_spec(config, generation, "Phi3ForCausalLM", eps=1e-5, windows=windows)


ARCHITECTURE = Architecture(read_spec=_read_spec, weights=partial(decoder_weights, fused=True))
