"""Gemma 3's text models (2025, arXiv:2503.19786): five layers with a window and a rotation of their
own to each that sees all, norms at the heads of queries and keys.
"""

from forge_jax.config_file import Config
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.gemma2 import gemma_parts
from forge_jax.models.spec import (
    MAX_WIDTH,
    ModelSpec,
    RopeSpec,
    decoder_spec,
    read_rope,
    read_windows,
    rope_of,
)


def _ropes(config: Config) -> tuple[RopeSpec, RopeSpec]:
    """Of the layers that see all, and of those with a window."""
    positions, head_dim = config.integer("max_position_embeddings"), config.integer("head_dim", 256)
    section = config.section("rope_parameters")
    full = section and section.section("full_attention")
    local = section and section.section("sliding_attention")
    if full and local:
        return rope_of(full, full, positions, head_dim), rope_of(local, local, positions, head_dim)
    local_theta = config.number("rope_local_base_freq", 10000.0)
    if not config.has("rope_theta"):
        config = Config({**config.values, "rope_theta": 1e6}, config.where)
    return read_rope(config, positions, head_dim), RopeSpec(theta=local_theta)


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    if config.boolean("use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{config.where}: use_bidirectional_attention is not supported")
    every = config.integer("sliding_window_pattern", 6, high=MAX_WIDTH)
    rope, local_rope = _ropes(config)
    return decoder_spec(
        config,
        generation,
        "Gemma3ForCausalLM",
        rope=rope,
        local_rope=local_rope,
        qk_norm="head",
        windows=read_windows(config, lambda layer: (layer + 1) % every != 0, 4096),
        **gemma_parts(config),
    )


ARCHITECTURE = Architecture(read_spec=_read_spec)
