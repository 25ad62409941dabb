"""Granite 3 with experts (IBM 2024): Granite's factors, and experts in every layer."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families import granite
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import MAX_WIDTH, ModelSpec, decoder_spec, read_experts
from forge_jax.models.weight_map import FUSED_EXPERTS, ExpertNames, decoder_weights

DEFAULTS = {
    **{field: value for field, value in granite.DEFAULTS.items() if field != "mlp_bias"},
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

RELEASED = ExpertNames(
    part="block_sparse_moe",
    router="router.layer",
    fused=("input_linear.weight", "output_linear.weight"),
)
SAVED = ExpertNames(part="block_sparse_moe", router="router", fused=FUSED_EXPERTS)


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    return decoder_spec(
        config,
        generation,
        "GraniteMoeForCausalLM",
        **granite.factors(config),
        experts=read_experts(
            config,
            "num_local_experts",
            alias=False,
            intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        ),
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads"}),
    weights=lambda spec: decoder_weights(spec, experts=RELEASED),
    other_weights=lambda spec: decoder_weights(spec, experts=SAVED),
    gguf_weights=decoder_weights,
)
