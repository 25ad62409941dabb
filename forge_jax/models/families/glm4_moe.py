"""GLM-4.5 (Zhipu AI 2025, arXiv:2508.06471): sigmoid routing, and shared experts."""

from dataclasses import replace
from functools import partial

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertSpec,
    ModelSpec,
    RouterSpec,
    decoder_spec,
    read_experts,
)
from forge_jax.models.weight_map import FUSED_EXPERTS, ExpertNames, decoder_weights

DEFAULTS = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "use_qk_norm": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}


def read_groups(config: HFConfig, experts: int, *, best: int) -> RouterSpec:
    """Return the groups of a router, ranked by the sum of their `best` highest scores."""
    groups = config.integer("n_group", high=MAX_EXPERTS)
    kept = config.integer("topk_group", high=MAX_EXPERTS)
    if experts % groups or (groups > 1 and experts // groups < best):
        more = ", two or more per group" if best > 1 else ""
        raise config.error("n_group", f"a divisor of the {experts} experts{more}")
    if kept > groups:
        raise config.error("topk_group", f"at most n_group ({groups})")
    allowed = kept * (experts // groups)
    if config.integer("num_experts_per_tok", high=MAX_EXPERTS) > allowed:
        raise config.error(
            "num_experts_per_tok", f"at most the {allowed} experts of topk_group groups"
        )
    return RouterSpec(groups=groups, kept_groups=kept, best_of_group=best)


def read_router(config: HFConfig, experts: int) -> RouterSpec:
    """Return the router of DeepSeek-V3 (arXiv:2412.19437), which GLM-4.5 shares."""
    return replace(
        read_groups(config, experts, best=2),
        scores="sigmoid",
        correction=True,
        scale=config.number("routed_scaling_factor"),
    )


def _read_experts(config: HFConfig) -> ExpertSpec | None:
    config = config.renamed({"num_local_experts": "n_routed_experts"})
    inner = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    first = config.integer("first_k_dense_replace", low=0, high=MAX_LAYERS)
    return read_experts(
        config,
        "num_local_experts",
        alias=False,
        intermediate_size=inner,
        normalized=config.boolean("norm_topk_prob"),
        dense_layers=frozenset(range(first)),
        router=read_router(config, config.integer("num_local_experts", high=MAX_EXPERTS)),
        shared_size=inner * config.integer("n_shared_experts", low=0, high=MAX_EXPERTS),
    )


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(
        config,
        generation,
        "Glm4MoeForCausalLM",
        partial_rotary=True,
        attention_bias=config.boolean("attention_bias"),
        qk_norm="head" if config.boolean("use_qk_norm") else None,
        experts=_read_experts(config),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"partial_rotary_factor"}),
    other_weights=partial(decoder_weights, experts=ExpertNames(fused=FUSED_EXPERTS)),
)
