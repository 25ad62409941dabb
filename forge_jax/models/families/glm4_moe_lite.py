"""GLM-4.7-Flash (Zhipu AI 2026): DeepSeek-V3's attention and experts, in layers that it lists."""

from __future__ import annotations

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.deepseek import (
    latent_architecture,
    latent_spec,
    sigmoid_experts,
)
from forge_jax.models.spec import MAX_LAYERS, ModelSpec

DEFAULTS = {
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "hidden_act": "silu",
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
    "rope_interleave": True,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "mlp_layer_types": None,
}


def _dense_layers(config: HFConfig) -> frozenset[int]:
    """Return the layers with an ordinary MLP, by default the first."""
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    types = config.values["mlp_layer_types"]
    if types is None:
        return frozenset({0})
    if (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in ("dense", "sparse") for kind in types)
    ):
        raise config.error("mlp_layer_types", f"a list of {layers}, each dense or sparse")
    return frozenset(layer for layer, kind in enumerate(types) if kind == "dense")


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    if config.values.get("head_dim", 0) is None:  # another name of qk_rope_head_dim
        raise config.error("head_dim", "an integer")
    return latent_spec(
        config,
        generation,
        "Glm4MoeLiteForCausalLM",
        interleaved=config.boolean("rope_interleave"),
        experts=sigmoid_experts(config, _dense_layers(config)),
    )


ARCHITECTURE = latent_architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"q_lora_rank", "mlp_layer_types"}),
)
