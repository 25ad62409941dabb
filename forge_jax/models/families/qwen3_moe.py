"""Qwen 3 with experts (2025, arXiv:2505.09388) in all layers, or in all but some dense ones."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.qwen2 import qwen_window
from forge_jax.models.spec import (
    MAX_LAYERS,
    MAX_WIDTH,
    ModelSpec,
    decoder_spec,
    read_experts,
    window_everywhere,
)
from forge_jax.models.weight_map import FUSED_EXPERTS, ExpertNames, decoder_weights

DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}


def dense_layers(config: HFConfig) -> frozenset[int]:
    """Return `mlp_only_layers`, and all but each `decoder_sparse_step`-th of the other layers."""
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    step = config.integer("decoder_sparse_step")
    named = config.values.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list) or any(
        type(layer) is not int or not 0 <= layer < layers for layer in named
    ):
        raise config.error("mlp_only_layers", f"a list of integers from 0 to {layers - 1}")
    return frozenset(named) | {layer for layer in range(layers) if (layer + 1) % step}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    bias = config.boolean("attention_bias")
    return decoder_spec(
        config,
        generation,
        "Qwen3MoeForCausalLM",
        attention_bias=bias,
        output_bias=bias,
        qk_norm="head",
        windows=window_everywhere(config, qwen_window(config)),
        experts=read_experts(
            config,
            "num_experts",
            least=0,
            intermediate_size=config.integer("moe_intermediate_size", high=MAX_WIDTH),
            normalized=config.boolean("norm_topk_prob"),
            dense_layers=dense_layers(config),
        ),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"sliding_window", "mlp_only_layers"}),
    weights=decoder_weights,
    other_weights=lambda spec: decoder_weights(spec, experts=ExpertNames(fused=FUSED_EXPERTS)),
)
