"""Falcon (Almazrouei et al. 2023, arXiv:2311.16867): attention and MLP in parallel.

Falcon 7B has one key/value head and one norm per layer. Falcon 40B, 180B and Falcon 2 have several
key/value heads, which the checkpoint stores next to their queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.phi import ONE_NORM, check_head_dim
from forge_jax.models.spec import MAX_HEADS, MAX_WIDTH, ModelSpec, decoder_spec
from forge_jax.models.weight_map import WeightMap, decoder_weights, renamed

DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_kv_heads": None,
    "ffn_hidden_size": None,
    "activation": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "alibi": False,
    "bias": False,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "num_ln_in_parallel_attn": None,
}
_TWO_NORMS = {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}
_NAMES = {
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.word_embeddings",
    "model.norm": "transformer.ln_f",
    "self_attn.qkv_proj": "self_attention.query_key_value",
    "self_attn.o_proj": "self_attention.dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
}


@dataclass(frozen=True, kw_only=True)
class FalconSpec(ModelSpec):
    """A Falcon model. `norms`: the norms of a parallel layer, one of both inputs or one of each."""

    norms: int


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    if config.boolean("alibi", False):
        raise UnsupportedModelError(
            f"{config.where}: alibi true is not supported: attention has no linear biases"
        )
    check_head_dim(config)
    grouped = config.boolean("new_decoder_architecture", False)
    parallel = config.boolean("parallel_attn", False)
    if grouped and not parallel:
        raise config.error("parallel_attn", "true with new_decoder_architecture")
    bias = config.boolean("bias", False)
    inner = 4 * config.integer("hidden_size", high=MAX_WIDTH // 4)
    return decoder_spec(
        config.replaced(
            num_key_value_heads=_kv_heads(config, grouped),
            intermediate_size=config.integer("ffn_hidden_size", inner, high=MAX_WIDTH),
            head_dim=None,
        ),
        generation,
        "FalconForCausalLM",
        kind=FalconSpec,
        activation_name="activation",
        norm_eps_name="layer_norm_epsilon",
        parallel_block=parallel,
        norm_type="layer",
        norm_bias=True,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        mlp_gated=False,
        norms=_norms(config, grouped),
    )


def _kv_heads(config: HFConfig, grouped: bool) -> int:
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    if not grouped and config.boolean("multi_query", False):
        return 1
    kv_heads = config.integer("num_kv_heads", heads, high=MAX_HEADS)
    if heads % kv_heads or (not grouped and kv_heads != heads):
        want = "a divisor of" if grouped else "the same as"
        raise config.error("num_kv_heads", f"{want} num_attention_heads ({heads})")
    return kv_heads


def _norms(config: HFConfig, grouped: bool) -> int:
    """Return the norms of a parallel layer. Without groups, transformers ignores most values."""
    norms = config.integer("num_ln_in_parallel_attn", 2 if grouped else 1)
    if grouped and norms > 2:
        raise config.error("num_ln_in_parallel_attn", "1 or 2")
    if not grouped and norms == 2 and config.boolean("parallel_attn", False):
        raise config.error("num_ln_in_parallel_attn", "1 without new_decoder_architecture")
    return norms if grouped else 1


def _weights(spec: ModelSpec) -> WeightMap:
    assert isinstance(spec, FalconSpec)
    weights = decoder_weights(spec, fused={"qkv"})
    if spec.parallel_block:
        weights = renamed(weights, ONE_NORM if spec.norms == 1 else _TWO_NORMS)
    weights = renamed(weights, _NAMES)
    groups = spec.num_key_value_heads
    if groups == 1:
        return weights
    by_group = {
        leaf: tuple(
            replace(part, heads=groups, queries=spec.num_attention_heads // groups)
            for part in parts
        )
        for leaf, parts in weights.items()
        if ".attention.qkv." in leaf
    }
    return weights | by_group


def _gguf_weights(spec: ModelSpec) -> WeightMap:
    """Return the tensors of a GGUF file: queries before keys and values, without groups."""
    weights = renamed(_weights(spec), {"ln_mlp": "input_layernorm"})
    return {
        leaf: tuple(replace(part, heads=0, queries=1) for part in parts)
        for leaf, parts in weights.items()
    }


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset(
        {
            *("num_kv_heads", "ffn_hidden_size", "num_ln_in_parallel_attn", "alibi", "bias"),
            *("multi_query", "parallel_attn", "new_decoder_architecture"),
        }
    ),
    weights=_weights,
    gguf_weights=_gguf_weights,
)
