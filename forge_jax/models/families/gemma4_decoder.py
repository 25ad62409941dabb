"""The decoder of Gemma 4: layers of two sizes, shared keys and values, and per-layer inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from forge_jax.models.decoder import (
    ACTIVATION_FUNCTIONS,
    MLP,
    Decoder,
    Experts,
    Ragged,
    ResidualBlock,
    attend,
    attend_to_written,
    rope_kind,
    rope_kinds,
)
from forge_jax.models.kv import KV, PagedKV
from forge_jax.models.linear import Linear, MatrixBuilder, add_up, new_bias, new_norm
from forge_jax.models.lora import LayerLora
from forge_jax.models.spec import ModelSpec
from forge_kernels.embed import embed
from forge_kernels.norm import rms_norm


@dataclass(frozen=True, kw_only=True)
class Gemma4Spec(ModelSpec):
    """A Gemma 4 model. Layers without a window have full attention, and other heads.

    Attributes:
      global_head_dim: the head dim of layers with full attention.
      global_kv_heads: their number of key/value heads.
      keys_as_values: True if these layers project no values: they normalize the keys instead.
      kv_sources: per layer of the checkpoint, the layer whose keys and values it attends to. A
        layer that is not its own source projects queries only.
      double_wide: True if the MLPs of those layers are twice as wide.
      per_layer_size: the width of each layer's own input; 0 is none.
      per_layer_count: the layers that have one. A draft model of the first layers has all of them
        in its weights.
      per_layer_vocab: the rows of the embedding of these inputs.
    """

    global_head_dim: int
    global_kv_heads: int
    keys_as_values: bool
    kv_sources: tuple[int, ...]
    double_wide: bool
    per_layer_size: int
    per_layer_count: int
    per_layer_vocab: int

    def of_layer(self, layer: int) -> Gemma4Spec:
        sizes = {}
        if self.window(layer) is None:
            sizes = {"head_dim": self.global_head_dim, "num_key_value_heads": self.global_kv_heads}
        if self.double_wide and self.kv_sources[layer] != layer:
            sizes["intermediate_size"] = 2 * self.intermediate_size
        return dataclasses.replace(self, double_wide=False, **sizes)

    def own_sizes_of_shard(self, shards: int) -> dict[str, Any]:
        return {"global_kv_heads": max(1, self.global_kv_heads // shards)}

    def projections(self, layer: int) -> str:
        if self.kv_sources[layer] != layer:
            return "q"
        return "qk" if self.keys_as_values and self.window(layer) is None else "qkv"


class Gemma4Attention(ResidualBlock):
    """Attention with normalized values. Keys and values may be those of another layer."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        super().__init__(spec, dtype)
        spec = spec.of_layer(layer)
        self.projections = spec.projections(layer)
        self.heads, self.kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.head_dim, self.eps = spec.head_dim, spec.norm_eps
        self.sm_scale, self.window = spec.sm_scale, spec.window(layer)
        self.rope = rope_kinds(spec).index(rope_kind(spec, layer))
        d, inner = spec.hidden_size, self.heads * self.head_dim
        rows = inner + (len(self.projections) - 1) * self.kv_heads * self.head_dim
        self.qkv = Linear(
            matrix(f"layers.{layer}.attention.qkv.weight", rows, d),
            new_bias(rows, dtype, exists=spec.attention_bias),
        )
        self.out = Linear(
            matrix(f"layers.{layer}.attention.out.weight", d, inner),
            new_bias(d, dtype, exists=spec.output_bias),
        )
        has_keys = "k" in self.projections
        self.q_norm = new_norm(self.head_dim, spec, dtype)
        self.k_norm = new_norm(self.head_dim, spec, dtype) if has_keys else None

    def __call__(self, x: jax.Array, kv: PagedKV, ragged: Ragged) -> tuple[PagedKV, jax.Array]:
        """Return (kv, x plus the attention). x: dtype[T, d]; kv: the source layer's cache."""
        H, K, rows = self.heads, self.kv_heads, ragged.num_rows
        scoring = {"rope": self.rope, "sm_scale": self.sm_scale, "window": self.window}
        with jax.named_scope("qkv"):
            qkv = self.qkv(x, norm=self.norm, num_rows=rows)
            qkv = qkv.reshape(len(x), -1, self.head_dim)
        with jax.named_scope("norm"):
            q = self.q_norm(qkv[:, :H])
        if self.k_norm is None:
            out = attend_to_written(q, kv, ragged, **scoring)
        else:
            with jax.named_scope("norm"):
                k = self.k_norm(qkv[:, H : H + K])
                v = unit_norm(qkv[:, -K:], self.eps)  # the keys before their norm, without values
            kv, out = attend(jnp.concatenate([q, k, v], axis=1), kv, ragged, **scoring)
        with jax.named_scope("attention_out"):
            return kv, self.add(x, self.out, out, ragged, "o")


class Gemma4Experts(Experts):
    """Experts in addition to an MLP, which is `shared`. Each has its own norms."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        assert spec.experts is not None
        super().__init__(spec, dtype, matrix, layer, spec.experts)
        d = spec.hidden_size
        self.shared_post_norm = new_norm(d, spec, dtype)
        self.routed_norm = new_norm(d, spec, dtype)
        self.routed_post_norm = new_norm(d, spec, dtype)
        self.router_scale = nnx.Param(jnp.zeros(d, dtype))
        self.expert_scale = nnx.Param(jnp.zeros(spec.experts.count, dtype))
        self.eps = spec.norm_eps

    def __call__(self, x: jax.Array, ragged: Ragged) -> jax.Array:
        """Return x plus the MLP and the weighted outputs of the experts. x: dtype[T, d]."""
        assert self.shared is not None and self.norm is not None
        with jax.named_scope("shared_experts"):
            dense = self.shared(self.norm(x), ragged)
        with jax.named_scope("router"):
            to_router = unit_norm(x, self.eps) * self.router_scale[...][None] * x.shape[1] ** -0.5
        with jax.named_scope("norm"):
            normed = self.routed_norm(x)
        routed = self.routed(normed, to_router, ragged)
        if ragged.axis is not None:
            with jax.named_scope("experts"):
                dense, routed = jnp.split(
                    add_up(jnp.concatenate([dense, routed], axis=1), ragged.axis), 2, axis=1
                )
        with jax.named_scope("post_norm"):
            both = self.shared_post_norm(dense) + self.routed_post_norm(routed)
        return self.add_result(x, both, ragged)

    def scaled(self, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        return weights * self.expert_scale[...].astype(jnp.float32)[chosen]


class LayerInput(nnx.Module):
    """Adds a layer's own input to the residual stream: gated by the stream, and projected."""

    def __init__(self, spec: Gemma4Spec, dtype: Any, matrix: MatrixBuilder, layer: int):
        name, d, size = f"layers.{layer}.input", spec.hidden_size, spec.per_layer_size
        self.gate = Linear(matrix(f"{name}.gate.weight", size, d))
        self.projection = Linear(matrix(f"{name}.projection.weight", d, size))
        self.post_norm = new_norm(d, spec, dtype)
        self.activation = spec.activation

    def __call__(self, x: jax.Array, own: jax.Array, ragged: Ragged) -> jax.Array:
        """Return the new stream. x: dtype[T, d]; own: dtype[T, p], this layer's input."""
        rows = ragged.num_rows
        gate = ACTIVATION_FUNCTIONS[self.activation](self.gate(x, num_rows=rows))
        return x + self.post_norm(self.projection(gate * own, num_rows=rows))


class LayerInputs(nnx.Module):
    """The inputs of all layers: an embedding of the tokens, and a projection of the stream."""

    def __init__(self, spec: Gemma4Spec, dtype: Any, matrix: MatrixBuilder):
        self.layers, self.size = spec.per_layer_count, spec.per_layer_size
        self.dtype, self.scale = dtype, spec.hidden_size**-0.5
        rows = self.layers * self.size
        self.embedding = nnx.Param(jnp.zeros((spec.per_layer_vocab, rows), dtype))
        self.projection = Linear(matrix("inputs.projection.weight", rows, spec.hidden_size))
        self.norm = new_norm(self.size, spec, dtype)

    def __call__(self, tokens: jax.Array, x: jax.Array, ragged: Ragged) -> jax.Array:
        """Return dtype[T, L, p] for tokens: i32[T] and their embedding x: dtype[T, d]."""
        shape = (len(tokens), self.layers, self.size)
        of_stream = self.projection(x, num_rows=ragged.num_rows) * self.scale
        of_tokens = embed(self.embedding[...], tokens, self.dtype)
        of_tokens = of_tokens * jnp.asarray(self.size**0.5, of_tokens.dtype)
        return (self.norm(of_stream.reshape(shape)) + of_tokens.reshape(shape)) * 2**-0.5


class Gemma4Layer(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        assert isinstance(spec, Gemma4Spec)
        self.attention = Gemma4Attention(spec, dtype, matrix, layer)
        self.mlp = (MLP if spec.experts is None else Gemma4Experts)(spec, dtype, matrix, layer)
        self.input = LayerInput(spec, dtype, matrix, layer) if spec.per_layer_size else None
        self.scalar = nnx.Param(jnp.zeros(1, dtype))

    def __call__(
        self, x: jax.Array, kv: PagedKV, ragged: Ragged, own: jax.Array | None
    ) -> tuple[PagedKV, jax.Array]:
        """Return (kv, the new stream). own: dtype[T, p], the layer's input, if it has one."""
        kv, x = self.attention(x, kv, ragged)
        x = self.mlp(x, ragged)
        if self.input is not None:
            assert own is not None
            with jax.named_scope("layer_input"):
                x = self.input(x, own, ragged)
        return kv, x * self.scalar[...][None]


class Gemma4Decoder(Decoder):
    layer = Gemma4Layer

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, shards: int = 1):
        assert isinstance(spec, Gemma4Spec)
        super().__init__(spec, dtype, matrix, shards)
        self.kv_sources = spec.kv_sources[: spec.num_hidden_layers]
        self.inputs = LayerInputs(spec, dtype, matrix) if spec.per_layer_size else None

    def hidden(
        self,
        tokens: jax.Array,
        kv: KV,
        ragged: Ragged,
        lora: Callable[[int], LayerLora] | None = None,
    ) -> tuple[KV, jax.Array, tuple[jax.Array, ...]]:
        del lora  # not supported
        ragged = ragged._replace(axis=self.axis)
        if self.inputs is not None and ragged.embeddings() is not None:
            raise ValueError(
                "inputs_embeds is not supported by Gemma 4 models with per-layer inputs, which "
                "depend on token ids: pass token ids, and change embeddings with edit"
            )
        with jax.named_scope("embed"):
            x = ragged.tap("embed", self.embed(tokens, ragged))
            inputs = None if self.inputs is None else self.inputs(tokens, x, ragged)
        stream, new_kv = [x], list(kv)
        for i, (layer, source) in enumerate(zip(self.layers, self.kv_sources, strict=True)):
            with jax.named_scope(f"layer_{i}"):
                ragged, own = ragged.in_layer(i), None if inputs is None else inputs[:, i]
                # A layer that is not its own source returns the source's cache unchanged.
                new_kv[source], x = layer(x, new_kv[source], ragged, own)
            x = ragged.tap("resid", x)
            stream.append(x)
        with jax.named_scope("final_norm"):
            return tuple(new_kv), ragged.tap("final_norm", self.norm(x)), tuple(stream)


def unit_norm(x: jax.Array, eps: float) -> jax.Array:
    """Return x: dtype[..., n], divided by its root mean square, without a weight."""
    return rms_norm(x, jnp.ones(x.shape[-1], x.dtype), eps, in_float32=True)
