"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama, in some versions with a window."""

from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_windows


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    windows = read_windows(config, lambda layer: True)
    return decoder_spec(config, generation, "MistralForCausalLM", windows=windows)


ARCHITECTURE = Architecture(read_spec=_read_spec)
