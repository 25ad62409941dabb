"""Phi-1, 1.5 and 2 (Li et al. 2023, arXiv:2309.05463): attention and MLP in parallel after one
norm, biases everywhere, and partial RoPE."""

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.spec import MAX_HEADS, MAX_WIDTH, ModelSpec, decoder_spec
from forge_jax.models.weight_map import WeightMap, decoder_weights, renamed

DEFAULTS = {
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "head_dim": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "qk_layernorm": False,
}
# Attention and MLP share one norm. Each of both leaves is a copy of its tensor.
ONE_NORM = {"post_attention_layernorm": "input_layernorm"}


def check_no_qk_norm(config: HFConfig) -> None:
    """Raise UnsupportedModelError if queries and keys are normalized (`qk_layernorm`)."""
    if config.boolean("qk_layernorm"):
        raise UnsupportedModelError(
            f"{config.where}: qk_layernorm true is not supported in this architecture"
        )


def check_head_dim(config: HFConfig) -> None:
    """Raise ModelError if `head_dim` is not `hidden_size` over the number of heads."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    usual = config.integer("hidden_size", high=MAX_WIDTH) // heads
    if config.has("head_dim") and config.integer("head_dim") != usual:
        raise config.error("head_dim", f"hidden_size / num_attention_heads ({usual})")


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    check_no_qk_norm(config)
    return decoder_spec(
        config,
        generation,
        "PhiForCausalLM",
        norm_eps_name="layer_norm_eps",
        partial_rotary=True,
        parallel_block=True,
        norm_type="layer",
        norm_bias=True,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        mlp_gated=False,
        head_bias=True,
    )


def _weights(spec: ModelSpec) -> WeightMap:
    return renamed(
        decoder_weights(spec),
        {
            **ONE_NORM,
            "model.norm": "model.final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "up_proj": "fc1",
            "down_proj": "fc2",
        },
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"num_key_value_heads"}),
    weights=_weights,
)
