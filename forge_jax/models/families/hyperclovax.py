"""HyperCLOVA X (NAVER 2025): Granite with a norm after each sublayer, and a factor on logits."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.models.families import granite
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import ModelSpec, decoder_spec, read_head_dim
from forge_jax.models.weight_map import WeightMap, decoder_weights, renamed

DEFAULTS = {**granite.DEFAULTS, "attention_multiplier": None, "use_post_norm": True}

_NORMS = {  # names in a model with norms before and after sublayers
    "post_attention_layernorm": "post_norm1",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_norm2",
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    if not config.has("attention_multiplier"):
        config = config.replace(attention_multiplier=read_head_dim(config) ** -0.5)
    return decoder_spec(
        config,
        generation,
        "HyperCLOVAXForCausalLM",
        whole_heads=True,
        mlp_bias=config.boolean("mlp_bias"),
        norm_placement="both" if config.boolean("use_post_norm") else "before",
        **{**granite.factors(config), "logit_scale": config.number("logits_scaling")},
    )


def _weights(spec: ModelSpec) -> WeightMap:
    weights = decoder_weights(spec)
    return renamed(weights, _NORMS) if spec.norm_placement == "both" else weights


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads", "head_dim", "attention_multiplier"}),
    weights=_weights,
)
