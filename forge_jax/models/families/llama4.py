"""Llama 4 (Meta 2025), text only: chunked attention, and experts that scale their input.

Most layers rotate queries and keys, divide them by their RMS, and attend within chunks of
positions. The others attend to all keys without rotation (NoPE), with queries that grow with the
position (Nakanishi 2025, arXiv:2501.19399). In all or some layers, experts and a shared expert
replace the MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import UnsupportedModelError
from forge_jax.models.decoder import (
    MLP,
    Attention,
    Decoder,
    DecoderLayer,
    Experts,
    Ragged,
)
from forge_jax.models.families.architecture import Architecture
from forge_jax.models.families.smollm3 import read_no_rope
from forge_jax.models.linear import MatrixBuilder
from forge_jax.models.spec import (
    FULL,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_WIDTH,
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
    renamed,
)
from forge_kernels.norm import rms_norm

CHUNKED = "chunked_attention"
DEFAULTS = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "layer_types": None,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


@dataclass(frozen=True, kw_only=True)
class Llama4Spec(ModelSpec):
    """A Llama 4 text model.

    Attributes:
      unit_heads: True if layers with rotation divide each query and key by its RMS.
      growth: the factor of the logarithm by which queries of layers without rotation grow.
      growth_period: the tokens after which it grows.
    """

    unit_heads: bool
    growth: float
    growth_period: int


class Llama4Attention(Attention):
    """Attention with norms without weights, or with queries that grow in layers without RoPE."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        assert isinstance(spec, Llama4Spec)
        super().__init__(spec, dtype, matrix, layer)
        self.rotated, self.eps = layer not in spec.no_rope, spec.norm_eps
        self.unit_heads = self.rotated and spec.unit_heads
        self.growth, self.period = spec.growth, spec.growth_period

    def prepared(self, qkv: jax.Array, ragged: Ragged) -> jax.Array:
        if self.unit_heads:  # before the rotation, which does not change the RMS
            split = self.heads + self.kv_heads
            heads, values = jnp.split(qkv, [split], axis=1)
            heads = rms_norm(heads, jnp.ones((), qkv.dtype), self.eps)
            return jnp.concatenate([heads, values], axis=1)
        if self.rotated or not self.growth:
            return qkv
        return self.grown(qkv, (ragged.positions + 1) // self.period, self.growth)


class Llama4Experts(Experts):
    """Experts whose inputs are multiplied by the router's weights, instead of their outputs."""

    def mixed(
        self, x: jax.Array, chosen: jax.Array, weights: jax.Array, ragged: Ragged
    ) -> jax.Array:
        rows, per_token = chosen.shape
        scaled = x[:, None] * weights.astype(x.dtype)[:, :, None]  # [T, k, d]
        if ragged.num_rows is not None:
            ragged = ragged._replace(num_rows=ragged.num_rows * per_token)
        one = jnp.ones((rows * per_token, 1), jnp.float32)
        pairs = scaled.reshape(-1, x.shape[1])
        out = super().mixed(pairs, chosen.reshape(-1, 1), one, ragged)
        return out.reshape(scaled.shape).sum(axis=1)


class Llama4Layer(DecoderLayer):
    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        self.parallel = False
        self.attention = Llama4Attention(spec, dtype, matrix, layer)
        experts = spec.experts_of(layer)
        self.mlp = (
            MLP(spec, dtype, matrix, layer)
            if experts is None
            else Llama4Experts(spec, dtype, matrix, layer, experts)
        )


class Llama4Decoder(Decoder):
    layer = Llama4Layer


def _read_spec(config: HFConfig, generation: HFConfig) -> ModelSpec:
    layers = config.integer("num_hidden_layers", high=MAX_LAYERS)
    if config.value("no_rope_layers") == []:  # counts as missing, as in transformers
        config = config.replaced(no_rope_layers=None)
    no_rope = read_no_rope(config)
    bias, inner = config.boolean("attention_bias"), config.integer("intermediate_size_mlp")
    experts = read_experts(
        config,
        "num_local_experts",
        alias=False,
        intermediate_size=config.integer("intermediate_size", high=MAX_WIDTH),
        normalized=False,
        dense_layers=_dense_layers(config, layers),
        router=RouterSpec(scores="sigmoid"),
        shared_size=config.integer("intermediate_size", high=MAX_WIDTH),
    )
    return decoder_spec(
        config.replaced(intermediate_size=inner, layer_types=None),
        generation,
        "Llama4ForCausalLM",
        kind=Llama4Spec,
        interleaved=True,
        attention_bias=bias,
        output_bias=bias,
        no_rope=no_rope,
        chunks=_chunks(config, layers, no_rope),
        experts=experts,
        unit_heads=config.boolean("use_qk_norm"),
        growth=config.number("attn_scale") if config.boolean("attn_temperature_tuning") else 0.0,
        growth_period=config.integer("floor_scale"),
    )


def _dense_layers(config: HFConfig, layers: int) -> frozenset[int]:
    """Return the layers without experts: all but `moe_layers`, or all but every nth."""
    if config.has("moe_layers"):
        sparse = config.values["moe_layers"]
        if not isinstance(sparse, list) or any(type(layer) is not int for layer in sparse):
            raise config.error("moe_layers", "a list of layers")
    else:
        step = config.integer("interleave_moe_layer_step")
        sparse = range(step - 1, layers, step)
    return frozenset(range(layers)) - frozenset(sparse)


def _chunks(config: HFConfig, layers: int, no_rope: frozenset[int]) -> tuple[int | None, ...]:
    """Return the size of each layer's chunks, by default in the layers with rotation.

    Raises:
      UnsupportedModelError: a chunk cannot consist of KV blocks.
    """
    types = config.values["layer_types"]
    if types is None:
        types = [FULL if layer in no_rope else CHUNKED for layer in range(layers)]
    known = isinstance(types, list) and len(types) == layers
    if not known or any(kind not in (FULL, CHUNKED) for kind in types):
        raise config.error("layer_types", f"a list of {layers}, each {CHUNKED} or {FULL}")
    chunk = config.integer("attention_chunk_size", high=MAX_POSITIONS)
    if chunk % 8:
        raise UnsupportedModelError(
            f"{config.where}: attention_chunk_size {chunk} is not supported: it must be a "
            "multiple of 8, the smallest KV block"
        )
    return tuple(chunk if kind == CHUNKED else None for kind in types)


def _weights(spec: ModelSpec, *, fused: tuple[str, str] | None = None) -> WeightMap:
    names = ExpertNames(router="router", shared="shared_expert", fused=fused)
    return renamed(decoder_weights(spec, experts=names), {"mlp": "feed_forward"})


def _fused_weights(spec: ModelSpec) -> WeightMap:
    """Return the tensors of the published layout: experts [E, K_in, N_out] in one tensor."""

    def tensor_of(part: Tensor) -> Tensor:
        if len(part.shape) < 3:
            return part
        experts, outputs, inputs = part.shape
        return replace(part, shape=(experts, inputs, outputs), transpose=True)

    weights = _weights(spec, fused=FUSED_EXPERTS)
    return {leaf: tuple(map(tensor_of, parts)) for leaf, parts in weights.items()}


ARCHITECTURE = Architecture(
    read_spec=_read_spec,
    defaults=DEFAULTS,
    nullable=frozenset({"moe_layers", "no_rope_layers", "layer_types", "attention_chunk_size"}),
    weights=_weights,
    other_weights=_fused_weights,
    decoder=Llama4Decoder,
)
