"""DeepSeek-V2 (arXiv:2405.04434), V3 (arXiv:2412.19437) and R1, and Kimi K2, which shares V3's.

Attention caches one latent per token. Experts are chosen from some groups, by their best expert in
V2 and by the sum of their two best in V3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.host.files import short_repr
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.glm4_moe import read_groups, read_router
from forge_jax.models.latent import LatentDecoder, LatentSpec, latent_cache, latent_weights
from forge_jax.models.spec import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    ExpertSpec,
    ModelSpec,
    RouterSpec,
    decoder_spec,
    read_experts,
    rope_section,
)
from forge_jax.models.weight_map import FUSED_EXPERTS, ExpertNames
from forge_kernels.rope import yarn_attention_factor

_SHARED = {
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEFAULTS_V2 = {
    **_SHARED,
    "head_dim": None,
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": False,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
}
DEFAULTS_V3 = {
    **_SHARED,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 4096,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "rope_interleave": True,
}


def latent_spec(
    config: HFConfig,
    generation: HFConfig,
    architecture: str,
    *,
    interleaved: bool,
    experts: ExpertSpec | None,
    **parts: Any,
) -> LatentSpec:
    """Return the spec of a model with multi-head latent attention.

    Raises:
      UnsupportedModelError: as in `decoder_spec`.
      ModelError: as in `decoder_spec`.
    """
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    if config.integer("num_key_value_heads", heads, high=MAX_HEADS) != heads:
        raise config.error("num_key_value_heads", f"num_attention_heads ({heads})")
    rotated = config.integer("qk_rope_head_dim", high=MAX_WIDTH)
    if config.integer("head_dim", rotated) != rotated:
        raise config.error("head_dim", f"qk_rope_head_dim ({rotated})")
    if rotated % 2:
        raise config.error("qk_rope_head_dim", "even, for rotary embeddings")
    plain = config.integer("qk_nope_head_dim", high=MAX_WIDTH)
    bias = config.boolean("attention_bias")
    q_rank = "q_lora_rank"
    spec = decoder_spec(
        config.replaced(head_dim=rotated),
        generation,
        architecture,
        kind=LatentSpec,
        interleaved=interleaved,
        attention_bias=bias,
        output_bias=bias,
        experts=experts,
        q_lora_rank=config.integer(q_rank, high=MAX_WIDTH) if config.has(q_rank) else None,
        kv_lora_rank=config.integer("kv_lora_rank", high=MAX_WIDTH),
        qk_nope_head_dim=plain,
        v_head_dim=config.integer("v_head_dim", high=MAX_WIDTH),
        attention_scale=(plain + rotated) ** -0.5 * _extended_scale(config),
        **parts,
    )
    assert isinstance(spec, LatentSpec)
    return spec


def _extended_scale(config: HFConfig) -> float:
    """Return the factor on scores of an extended context: the square of YaRN's for all numbers."""
    section = rope_section(config)
    if not section.values.get("mscale_all_dim"):
        return 1.0
    kind = section.values.get("rope_type", section.values.get("type", "default"))
    if kind == "default":
        return 1.0
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{section.where}: mscale_all_dim is supported only with rope type yarn"
        )
    factor, mscale = section.number("factor"), section.number("mscale_all_dim")
    return yarn_attention_factor(factor, mscale) ** 2


def _check_fixed(config: HFConfig, **fixed: Any) -> None:
    """Reject fields of the published code, unknown to transformers, that have another value."""
    for name, value in fixed.items():
        found = config.values.get(name)
        if found is not None and found != value:
            raise UnsupportedModelError(
                f"{config.where}: {name} {short_repr(found)} is not supported in this "
                f"architecture; supported: {short_repr(value)}"
            )


def dense_layers(config: HFConfig) -> frozenset[int]:
    """Return the layers with an ordinary MLP: the first `first_k_dense_replace`."""
    return frozenset(range(config.integer("first_k_dense_replace", low=0, high=MAX_LAYERS)))


def read_shared_experts(
    config: HFConfig,
    field: str,
    read_router: Callable[[HFConfig, int], RouterSpec],
    *,
    normalized: bool,
    dense: frozenset[int],
) -> ExpertSpec | None:
    """Return the experts, of which some compute every token.

    Args:
      config: the fields of `config.json`.
      field: the other name of `n_routed_experts` in transformers.
      read_router: returns the router of so many experts.
      normalized: see `ExpertSpec`.
      dense: the layers with an ordinary MLP.
    """
    config = config.renamed({field: "n_routed_experts"})
    inner = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    return read_experts(
        config,
        field,
        alias=False,
        intermediate_size=inner,
        normalized=normalized,
        dense_layers=dense,
        router=read_router(config, config.integer(field, high=MAX_EXPERTS)),
        shared_size=inner * config.integer("n_shared_experts", high=MAX_EXPERTS),
    )


def sigmoid_experts(config: HFConfig, dense: frozenset[int]) -> ExpertSpec | None:
    """Return the experts of V3; `dense` are the layers with an ordinary MLP."""
    normalized = config.boolean("norm_topk_prob", False)
    return read_shared_experts(
        config, "num_local_experts", read_router, normalized=normalized, dense=dense
    )


def _softmax_router(config: HFConfig, experts: int) -> RouterSpec:
    """Return the router of V2, whose groups have the score of their best expert."""
    scale, method = config.number("routed_scaling_factor"), config.string("topk_method")
    if method == "greedy":
        return RouterSpec(scale=scale)
    if method != "group_limited_greedy":
        raise UnsupportedModelError(
            f"{config.where}: topk_method {short_repr(method)} is not supported; "
            "supported: greedy, group_limited_greedy"
        )
    return replace(read_groups(config, experts, best=1), scale=scale)


def _read_v2(config: HFConfig, generation: HFConfig) -> ModelSpec:
    # transformers ignores `norm_topk_prob`, and DeepSeek's own code does not.
    for name in ("mlp_bias", "norm_topk_prob"):
        if config.boolean(name, False):
            raise UnsupportedModelError(f"{config.where}: {name} is not supported")
    _check_fixed(config, scoring_func="softmax", moe_layer_freq=1)
    return latent_spec(
        config,
        generation,
        "DeepseekV2ForCausalLM",
        interleaved=True,
        experts=read_shared_experts(
            config, "num_experts", _softmax_router, normalized=False, dense=dense_layers(config)
        ),
        whole_heads=True,
    )


def _read_v3(config: HFConfig, generation: HFConfig) -> ModelSpec:
    _check_fixed(config, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return latent_spec(
        config,
        generation,
        "DeepseekV3ForCausalLM",
        interleaved=config.boolean("rope_interleave", False),
        experts=sigmoid_experts(config, dense_layers(config)),
    )


latent_architecture = partial(
    Architecture,
    decoder=LatentDecoder,
    cache=latent_cache,
    weights=latent_weights,
    other_weights=partial(latent_weights, experts=ExpertNames(fused=FUSED_EXPERTS)),
    lora=False,
)
_NULLABLE = frozenset({"num_key_value_heads", "q_lora_rank", "norm_topk_prob"})
V2 = latent_architecture(
    read_spec=_read_v2,
    defaults=DEFAULTS_V2,
    nullable=_NULLABLE | {"head_dim", "n_group", "topk_group", "num_experts_per_tok"},
)
V3 = latent_architecture(
    read_spec=_read_v3, defaults=DEFAULTS_V3, nullable=_NULLABLE | {"rope_interleave"}
)
