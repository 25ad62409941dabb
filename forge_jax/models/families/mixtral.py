"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral, with experts in place of every MLP."""

from forge_jax.checkpoint.weight_map import ExpertNames, decoder_weights
from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import MAX_WIDTH, ModelSpec, decoder_spec, read_experts, read_windows


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    config = config.with_defaults(rope_theta=1e6, num_key_value_heads=8)
    inner = config.integer("intermediate_size", 14336, high=MAX_WIDTH)
    return decoder_spec(
        config,
        generation,
        "MixtralForCausalLM",
        eps=1e-5,
        windows=read_windows(config, lambda layer: True),
        experts=read_experts(config, count=8, per_token=2, intermediate_size=inner),
    )


_NAMES = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    weights=lambda spec: decoder_weights(spec, experts=_NAMES),
    other_weights=lambda spec: decoder_weights(spec, experts=ExpertNames(fused=True)),
)
