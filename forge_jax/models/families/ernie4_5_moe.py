"""ERNIE 4.5 with experts (Baidu 2025): experts chosen with corrected scores, and shared experts."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
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
from forge_jax.models.weight_map import (
    FUSED_EXPERTS,
    ExpertNames,
    Tensor,
    WeightMap,
    decoder_weights,
)

DEFAULTS = {
    "vocab_size": 103424,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_bias": False,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}


def _dense_layers(config: HFConfig) -> frozenset[int]:
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    first = config.integer("moe_layer_start_index", low=0)
    last = config.integer("moe_layer_end_index", low=-1)
    last = layers - 1 if last == -1 else last
    every = config.integer("moe_layer_interval")
    return frozenset(
        layer for layer in range(layers) if not first <= layer <= last or (layer + 1) % every
    )


def _read_experts(config: HFConfig) -> ExpertSpec | None:
    names = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    inner = config.integer("moe_intermediate_size", high=MAX_WIDTH)
    return read_experts(
        config.renamed(names),
        "num_experts",
        alias=False,
        intermediate_size=inner,
        dense_layers=_dense_layers(config),
        router=RouterSpec(correction=True),
        shared_size=inner * config.integer("moe_num_shared_experts", low=0, high=MAX_EXPERTS),
    )


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    if config.boolean("use_bias", False):
        raise UnsupportedModelError(f"{config.where}: use_bias is not supported with experts")
    return decoder_spec(
        config,
        generation,
        "Ernie4_5_MoeForCausalLM",
        interleaved=True,
        experts=_read_experts(config),
    )


def _weights(spec: ModelSpec, *, fused: tuple[str, str] | None = None) -> WeightMap:
    """Return the usual tensors; a layer's correction is a matrix with one row."""
    names = ExpertNames(correction="moe_statics.e_score_correction_bias", fused=fused)
    return {
        leaf: tuple(Tensor(part.name, (1, *part.shape)) for part in parts)
        if leaf.endswith(".correction")
        else parts
        for leaf, parts in decoder_weights(spec, experts=names).items()
    }


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"use_bias"}),
    weights=_weights,
    other_weights=lambda spec: _weights(spec, fused=FUSED_EXPERTS),
)
