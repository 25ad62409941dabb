"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm and an MLP without a gate."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.decoder import Decoder, Ragged
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.linear import MatrixBuilder
from forge_jax.models.spec import MAX_LAYERS, MAX_WIDTH, ModelSpec, RopeSpec, decoder_spec
from forge_jax.models.weight_map import Tensor, WeightMap, decoder_weights, renamed
from forge_kernels.embed import embed

DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
    "tie_word_embeddings": True,
}
# GPT-2's names for the fields that all families have (`attribute_map` in transformers).
NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    for name in ("add_cross_attention", "scale_attn_by_inverse_layer_idx"):
        if config.boolean(name):
            raise UnsupportedModelError(f"{config.where}: {name} is not supported")
    config = config.renamed(NAMES)
    hidden_size = config.integer("hidden_size", high=MAX_WIDTH)
    inner = config.integer("n_inner", 4 * hidden_size, high=MAX_WIDTH)
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    return decoder_spec(
        config.replaced(intermediate_size=inner, num_key_value_heads=None, head_dim=None),
        generation,
        "GPT2LMHeadModel",
        activation_name="activation_function",
        norm_eps_name="layer_norm_epsilon",
        rope=RopeSpec(),
        no_rope=frozenset(range(layers)),
        norm_type="layer",
        norm_bias=True,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        mlp_gated=False,
        attention_scale=None if config.boolean("scale_attn_weights") else 1.0,
    )


class GPT2(Decoder):
    """The common decoder with learned position embeddings added to the token embeddings."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, shards: int = 1):
        super().__init__(spec, dtype, matrix, shards)
        shape = spec.max_position_embeddings, spec.hidden_size
        self.positions = nnx.Param(jnp.zeros(shape, dtype))

    def embed(self, tokens: jax.Array, ragged: Ragged) -> jax.Array:
        return super().embed(tokens, ragged) + embed(self.positions[...], ragged.positions)


def _usual_weights(spec: ModelSpec) -> WeightMap:
    positions = Tensor("model.wpe.weight", (spec.max_position_embeddings, spec.hidden_size))
    return decoder_weights(spec, fused={"qkv"}) | {"positions": (positions,)}


def _weights(spec: ModelSpec, prefix: str = "transformer.") -> WeightMap:
    return renamed(
        _usual_weights(spec),
        {
            "model.layers": f"{prefix}h",
            "model.embed_tokens": f"{prefix}wte",
            "model.wpe": f"{prefix}wpe",
            "model.norm": f"{prefix}ln_f",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
            "self_attn.qkv_proj": "attn.c_attn",
            "self_attn.o_proj": "attn.c_proj",
            "up_proj": "c_fc",
            "down_proj": "c_proj",
        },
        transposed={"c_attn", "c_fc", "c_proj"},  # Conv1D in transformers
    )


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"n_inner"}),
    decoder=GPT2,
    weights=_weights,
    other_weights=lambda spec: _weights(spec, prefix=""),  # saved without the LM head
    gguf_weights=_usual_weights,
)
