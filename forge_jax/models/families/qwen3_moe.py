"""Qwen 3 with experts (2025, arXiv:2505.09388): in all layers, or with some dense ones."""

from forge_jax.checkpoint.weight_map import ExpertNames, decoder_weights
from forge_jax.config_file import Config
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.qwen2 import qwen_windows
from forge_jax.models.spec import MAX_LAYERS, MAX_WIDTH, ModelSpec, decoder_spec, read_experts


def _dense_layers(config: Config) -> frozenset[int]:
    """By `mlp_only_layers`; of the others each `decoder_sparse_step`-th has experts."""
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    step = config.integer("decoder_sparse_step", 1)
    named = config.values.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list) or any(
        type(layer) is not int or not 0 <= layer < layers for layer in named
    ):
        raise config.error("mlp_only_layers", f"a list of integers from 0 to {layers - 1}")
    return frozenset(named) | {layer for layer in range(layers) if (layer + 1) % step}


def _read_spec(config: Config, generation: Config) -> ModelSpec:
    bias = config.boolean("attention_bias", False)
    return decoder_spec(
        config,
        generation,
        "Qwen3MoeForCausalLM",
        attention_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=qwen_windows(config),
        experts=read_experts(
            config,
            count=128,
            per_token=8,
            intermediate_size=config.integer("moe_intermediate_size", 768, high=MAX_WIDTH),
            normalised=config.boolean("norm_topk_prob", False),
            dense_layers=_dense_layers(config),
        ),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    weights=decoder_weights,
    other_weights=lambda spec: decoder_weights(spec, experts=ExpertNames(fused=True)),
)
