"""The decoder as Flax NNX modules, and `Model`: its pure functions on a flat tuple of weights.

Modules define the weights and the arithmetic; they hold no state and know nothing of files,
requests or scheduling. Layers are unrolled: XLA copies every layer's matrices out of a stacked
array at each step.

Letters: T tokens in the step, S sequences, B rows of logits, N blocks, bs tokens of a block, L
layers, H query heads, K key/value heads, D head dim, d hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from forge_jax.cache.kv import KV, LayerKV, bits_of
from forge_jax.models.spec import ModelSpec, RopeSpec
from forge_kernels.attention import Implementation, ragged_paged_attention, rotate_and_write
from forge_kernels.embed import embed
from forge_kernels.linear import Format, PackedWeight, Packing, Weight, linear
from forge_kernels.norm import rms_norm
from forge_kernels.rope import (
    inverse_frequencies,
    linear_scaling,
    llama3_scaling,
    rope_tables,
)

Leaves = tuple[jax.Array, ...]


class Ragged(NamedTuple):
    """What every layer needs to know about the step: its rows, and how attention is computed."""

    cos: jax.Array  # f32[T, D / 2]
    sin: jax.Array  # f32[T, D / 2]
    slot_mapping: jax.Array  # i32[T]
    block_tables: jax.Array  # i32[S, max_blocks]
    kv_lens: jax.Array  # i32[S]
    cu_q_lens: jax.Array  # i32[S + 1]
    num_seqs: jax.Array  # i32[]
    num_tokens: jax.Array  # i32[], rows that exist
    kv_dtype: np.dtype | None  # whose bits the cache holds, where it holds bits
    implementation: Implementation
    max_q_len: int | None
    uniform: bool


@dataclass(frozen=True, kw_only=True)
class WeightForms:
    """The form of the matrices: plain (None), or packed for the CPU kernels."""

    layers: Format | None = None
    head: Format | None = None
    embedding: Format | None = None  # where it is not the head


class Linear(nnx.Module):
    """A matrix in one of its forms; `forge_kernels.linear` says what a call can do besides."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: Any,
        form: Format | None = None,
        *,
        paired: bool = False,
    ):
        self.packing = None if form is None else Packing(form, outputs, inputs, paired)
        if self.packing is None:
            self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))
            return
        weight, scale = self.packing.weight, self.packing.scale
        self.weight = nnx.Param(jnp.zeros(weight.shape, weight.dtype))
        if scale is not None:
            self.scale = nnx.Param(jnp.zeros(scale.shape, scale.dtype))

    @property
    def matrix(self) -> Weight:
        if self.packing is None:
            return self.weight[...]
        scale = None if self.packing.scale is None else self.scale[...]
        return PackedWeight(self.weight[...], scale, self.packing)

    def __call__(self, x: jax.Array, *, norm: RMSNorm | None = None, **options: Any) -> jax.Array:
        scaling = None if norm is None else (norm.weight[...], norm.eps)
        return linear(x, self.matrix, norm=scaling, **options)


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float, dtype: Any):
        self.weight = nnx.Param(jnp.zeros(size, dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache; queries, keys and values in one matrix."""

    def __init__(self, spec: ModelSpec, dtype: Any, form: Format | None):
        self.heads, self.kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.head_dim, self.sm_scale = spec.head_dim, spec.sm_scale
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        self.qkv = Linear(spec.hidden_size, rows, dtype, form)
        self.out = Linear(self.heads * self.head_dim, spec.hidden_size, dtype, form)

    def __call__(self, x: jax.Array, kv: LayerKV, ragged: Ragged) -> tuple[LayerKV, jax.Array]:
        """x: dtype[T, d]; kv: one layer's -> (kv, x with the attention added)."""
        H, K, D = self.heads, self.kv_heads, self.head_dim
        with jax.named_scope("qkv"):
            qkv = self.qkv(x, norm=self.norm, num_rows=ragged.num_tokens)
        with jax.named_scope("rope_write"):
            q, kv = rotate_and_write(
                qkv.reshape(-1, H + 2 * K, D),
                kv,
                ragged.cos,
                ragged.sin,
                ragged.slot_mapping,
                num_tokens=ragged.num_tokens,
                kv_dtype=ragged.kv_dtype,
                implementation=ragged.implementation,
            )
        with jax.named_scope("attention"):
            out = ragged_paged_attention(
                q,
                kv,
                ragged.block_tables,
                ragged.kv_lens,
                ragged.cu_q_lens,
                ragged.num_seqs,
                sm_scale=self.sm_scale,
                kv_dtype=ragged.kv_dtype,
                max_q_len=ragged.max_q_len,
                implementation=ragged.implementation,
                uniform=ragged.uniform,
            )
        out = out.reshape(-1, H * D)
        with jax.named_scope("attention_out"):
            return kv, self.out(out, residual=x, num_rows=ragged.num_tokens)


class MLP(nnx.Module):
    """SwiGLU (Shazeer 2020); gate and up in one matrix."""

    def __init__(self, spec: ModelSpec, dtype: Any, form: Format | None):
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        self.gate_up = Linear(
            spec.hidden_size, 2 * spec.intermediate_size, dtype, form, paired=True
        )
        self.down = Linear(spec.intermediate_size, spec.hidden_size, dtype, form)

    def __call__(self, x: jax.Array, ragged: Ragged) -> jax.Array:
        """dtype[T, d] -> x with the MLP added."""
        with jax.named_scope("gate_up"):
            inner = self.gate_up(x, norm=self.norm, swiglu=True, num_rows=ragged.num_tokens)
        with jax.named_scope("down"):
            return self.down(inner, residual=x, num_rows=ragged.num_tokens)


class DecoderLayer(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: Any, form: Format | None):
        self.attention = Attention(spec, dtype, form)
        self.mlp = MLP(spec, dtype, form)

    def __call__(self, x: jax.Array, kv: LayerKV, ragged: Ragged) -> tuple[LayerKV, jax.Array]:
        kv, x = self.attention(x, kv, ragged)
        return kv, self.mlp(x, ragged)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head of a Llama."""

    def __init__(self, spec: ModelSpec, dtype: Any, forms: WeightForms):
        self.layers = nnx.List(
            [DecoderLayer(spec, dtype, forms.layers) for _ in range(spec.num_hidden_layers)]
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype)
        # The head is the embedding too where the model shares them.
        self.head = Linear(spec.hidden_size, spec.vocab_size, dtype, forms.head)
        self.embedding = (
            None
            if spec.tie_word_embeddings
            else Linear(spec.hidden_size, spec.vocab_size, dtype, forms.embedding)
        )

    def hidden(
        self,
        tokens: jax.Array,  # i32[T]
        kv: KV,
        ragged: Ragged,
    ) -> tuple[KV, jax.Array, tuple[jax.Array, ...]]:
        """(kv, dtype[T, d] after the final norm, the stream before each layer and after all)."""
        with jax.named_scope("embed"):
            x = embed((self.embedding or self.head).matrix, tokens)
        stream, new_kv = [x], []
        for i, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            with jax.named_scope(f"layer_{i}"):
                layer_kv, x = layer(x, layer_kv, ragged)
            new_kv.append(layer_kv)
            stream.append(x)
        with jax.named_scope("final_norm"):
            return tuple(new_kv), self.norm(x), tuple(stream)

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """dtype[B, d] -> f32[B, V]."""
        with jax.named_scope("logits"):
            return self.head(hidden, num_rows=num_rows, out_dtype=jnp.float32)


def rope_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """f32[D / 2]: radians per position, stretched as the spec says."""
    frequencies = inverse_frequencies(head_dim, rope.theta)
    match rope.type:
        case "default":
            return frequencies
        case "linear":
            return linear_scaling(frequencies, rope.factor)
        case "llama3":
            return llama3_scaling(
                frequencies,
                factor=rope.factor,
                low_freq_factor=rope.low_freq_factor,
                high_freq_factor=rope.high_freq_factor,
                original_max_position_embeddings=rope.original_max_position_embeddings,
            )
    raise AssertionError(f"rope type {rope.type}")


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder without its weights: pure functions that take them as a flat tuple of arrays.

    Made from the spec alone, so that executables can be compiled while the weights are still being
    read: `leaves` holds the shapes and types to lower with. The functions are jit-able; wrap them
    in a `jax.jit` of your own, they do not hold one.
    """

    spec: ModelSpec
    dtype: np.dtype
    names: tuple[str, ...]  # of the leaves: "layers.0.attention.qkv.weight"
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    packings: Mapping[str, Packing]  # of the leaves that are packed: "layers.0.mlp.down.weight"
    graphdef: Any
    treedef: Any

    @classmethod
    def build(
        cls,
        decoder: Callable[[ModelSpec, Any, WeightForms], nnx.Module],
        spec: ModelSpec,
        dtype: Any,
        forms: WeightForms,
    ) -> Model:
        """Traces `decoder(spec, dtype, forms)` abstractly: no memory is allocated for weights."""
        dtype = jnp.dtype(dtype)
        module = nnx.eval_shape(lambda: decoder(spec, dtype, forms))
        graphdef, state = nnx.split(module)
        flat, treedef = jax.tree_util.tree_flatten_with_path(state)
        return cls(
            spec=spec,
            dtype=dtype,
            names=tuple(_leaf_name(path) for path, _ in flat),
            leaves=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in flat),
            packings={
                ".".join(map(str, (*path, "weight"))): node.packing
                for path, node in nnx.iter_graph(module)
                if isinstance(node, Linear) and node.packing is not None
            },
            graphdef=graphdef,
            treedef=treedef,
        )

    @property
    def param_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def forward(
        self,
        leaves: Leaves,
        kv: KV,
        tokens: jax.Array,
        positions: jax.Array,
        slot_mapping: jax.Array,
        block_tables: jax.Array,
        kv_lens: jax.Array,
        cu_q_lens: jax.Array,
        num_seqs: jax.Array,
        *,
        implementation: Implementation = "auto",
        max_q_len: int | None = None,
        uniform: bool = False,
        return_hidden_states: bool = False,
    ) -> Any:
        """One step of the decoder over ragged rows: writes their keys and values, then attends.

        Decode rows, verify rows and prefill chunks are the same thing with other `cu_q_lens`.

        Args:
          leaves: the weights, in the order of `Model.leaves`.
          kv: per layer dtype[N, 2, K, bs, D], where uint16 holds the bits of the model's 16-bit
            dtype; or a `QuantizedKV`.
          tokens, positions: i32[T].
          slot_mapping: i32[T], `block * bs + offset` of each token; `N * bs` where nothing is
            written.
          block_tables: i32[S, max_blocks]. kv_lens: i32[S], this step's tokens included.
          cu_q_lens: i32[S + 1], where each sequence's rows start. num_seqs: i32[].
          implementation: of attention. "reference" with float32 `kv` is differentiable.
          max_q_len: a promise that no sequence has more rows in this step, 1 for a decode step:
            less is compiled.
          uniform: compute every row of attention in the same way (the deterministic tier).
          return_hidden_states: also return the residual stream.

        Returns:
          (kv, hidden): hidden is dtype[T, d] after the final norm; rows of no sequence may hold
          anything. With `return_hidden_states`,
          (kv, hidden, stream): stream is L + 1 arrays dtype[T, d], the embedding and each layer's
          output.

        Raises:
          NotImplementedError: a gradient is asked of another combination than float32 `kv` and
            implementation="reference".
        """
        frequencies = rope_frequencies(self.spec.rope, self.spec.head_dim)
        with jax.named_scope("rope_tables"):
            cos, sin = rope_tables(positions, frequencies)
        ragged = Ragged(
            cos=cos,
            sin=sin,
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            num_seqs=num_seqs,
            num_tokens=cu_q_lens[num_seqs],
            kv_dtype=bits_of(kv[0].dtype, self.dtype),
            implementation=implementation,
            max_q_len=max_q_len,
            uniform=uniform,
        )
        decoder = self._merge(leaves)
        kv, hidden, stream = decoder.hidden(tokens, kv, ragged)
        return (kv, hidden, stream) if return_hidden_states else (kv, hidden)

    def logits(
        self, leaves: Leaves, hidden: jax.Array, num_rows: jax.Array | None = None
    ) -> jax.Array:
        """hidden: dtype[B, d], after the final norm -> f32[B, V].

        `num_rows` (i32[]) is a promise that rows from there on are not needed.
        """
        return self._merge(leaves).logits(hidden, num_rows)

    def final_norm(self, leaves: Leaves, stream: jax.Array) -> jax.Array:
        """The final norm on rows of the residual stream, dtype[B, d]: half of a logit lens."""
        return self._merge(leaves).norm(stream)

    def _merge(self, leaves: Leaves) -> Any:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def _leaf_name(path: tuple[Any, ...]) -> str:
    keys = (getattr(entry, "key", getattr(entry, "name", None)) for entry in path)
    return ".".join(str(key) for key in keys if key is not None and key != "value")
