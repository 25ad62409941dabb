"""Qwen3.5 (2026), dense and with experts: Qwen3-Next with its projections in other matrices.

These are text models saved alone. Published checkpoints also have a vision tower, see
`forge_jax.models.families.multimodal`.
"""

from functools import partial

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.qwen3_next import (
    COMMON_DEFAULTS,
    FUSED_NAMES,
    NAMES,
    NULLABLE,
    HybridDecoder,
    hybrid_spec,
    hybrid_weights,
)
from forge_jax.models.recurrent import recurrent_cache
from forge_jax.models.spec import MAX_WIDTH, ModelSpec, read_experts

DENSE_DEFAULTS = {
    **COMMON_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
MOE_DEFAULTS = {
    **COMMON_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
}


def _read_dense(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return hybrid_spec(config, generation, "Qwen3_5ForCausalLM", grouped=False)


def _read_moe(config: HFConfig, generation: HFConfig) -> ModelSpec:
    inner = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    return hybrid_spec(
        config.replaced(intermediate_size=inner),  # required, but no layer uses it
        generation,
        "Qwen3_5MoeForCausalLM",
        grouped=False,
        experts=read_experts(
            config,
            "num_experts",
            alias=False,
            intermediate_size=inner,
            shared_size=config.integer("shared_expert_intermediate_size", high=MAX_WIDTH),
            shared_gate=True,
        ),
    )


DENSE = Architecture(
    read_spec=_read_dense,
    defaults=DENSE_DEFAULTS,
    nullable=NULLABLE,
    weights=hybrid_weights,
    decoder=HybridDecoder,
    cache=recurrent_cache,
)
MOE = Architecture(
    read_spec=_read_moe,
    defaults=MOE_DEFAULTS,
    nullable=NULLABLE,
    weights=partial(hybrid_weights, experts=NAMES),
    other_weights=partial(hybrid_weights, experts=FUSED_NAMES),
    decoder=HybridDecoder,
    cache=recurrent_cache,
)
