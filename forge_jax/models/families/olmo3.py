"""OLMo 3 (Ai2 2025): OLMo 2 with windows in three of four layers, and two rotations."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families import olmo2
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.gemma3 import read_ropes
from forge_jax.models.spec import ModelSpec, decoder_spec, read_window, read_windows

DEFAULTS = {**olmo2.DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    # As in transformers, `rope_theta` next to the sections applies to full layers only.
    both = config.replace(rope_local_base_freq=DEFAULTS["rope_theta"])
    rope, local_rope = read_ropes(both)
    return decoder_spec(
        config,
        generation,
        "Olmo3ForCausalLM",
        rope=rope,
        local_rope=local_rope,
        windows=read_windows(config, read_window(config), lambda layer: (layer + 1) % 4 != 0),
        **olmo2.parts(config),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec, defaults=DEFAULTS, nullable=frozenset({"num_key_value_heads"})
)
