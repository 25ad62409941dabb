"""The decoder as Flax NNX modules, and `Model`: its pure functions on a flat tuple of weights.

Modules define the weights and the arithmetic; they hold no state and know nothing of files,
requests or scheduling. Layers are unrolled: XLA copies every layer's matrices out of a stacked
array at each step.

Of a model that several devices share (tensor parallelism), the modules are those of one shard, and
are called inside of `shard_map`. `axis` is the mesh's, where there is something to add up.

Letters: T tokens in the step, S sequences, B rows of logits, N blocks, bs tokens of a block, L
layers, H query heads, K key/value heads, D head dim, d hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from forge_jax.models.kv import KV, LayerKV, bits_of
from forge_jax.models.lora import LayerLora, Lora
from forge_jax.models.spec import ExpertSpec, ModelSpec, RopeSpec
from forge_jax.weights.blocks import BlockForm, BlockRows, Pieces, forms_by_piece
from forge_jax.weights.forms import QuantizedForm
from forge_jax.weights.partition import AXIS, shard_spec, shard_vocab
from forge_jax.weights.quantization import Values
from forge_kernels.attention import Implementation, ragged_paged_attention, rotate_and_write
from forge_kernels.embed import embed
from forge_kernels.experts import choose_experts, mix_experts
from forge_kernels.linear import (
    BlockPacking,
    Format,
    PackedWeight,
    Packing,
    Quantization,
    QuantizedWeight,
    Weight,
    linear,
)
from forge_kernels.linear.quantized import ARRAYS
from forge_kernels.norm import rms_norm
from forge_kernels.rope import (
    inverse_frequencies,
    linear_scaling,
    llama3_scaling,
    rope_tables,
)

Leaves = tuple[jax.Array, ...]
Form = Format | QuantizedForm | BlockForm | Pieces | None  # of a matrix; None: plain


class Ragged(NamedTuple):
    """What every layer needs to know about the step: its rows, and how attention is computed."""

    ropes: tuple[tuple[jax.Array, jax.Array], ...]  # cos and sin, f32[T, D / 2], by kind
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
    lora: LayerLora | None = None  # the layer's own


@dataclass(frozen=True, kw_only=True)
class WeightForms:
    """The form of the matrices: plain (None), or packed for the CPU kernels.

    `quantized`: of those that the checkpoint has quantised, by the names of their leaves.
    `blocks`: the same of a GGUF file, embedding and head among them.
    `block_rows`: what the CPU kernels round activations to before they multiply these.
    `rounded`: what those of the layers are rounded to as they are read, where not for the kernels.
    """

    layers: Format | None = None
    head: Format | None = None
    embedding: Format | None = None  # where it is not the head
    quantized: Mapping[str, QuantizedForm] = field(default_factory=dict)
    blocks: Mapping[str, BlockForm | Pieces] = field(default_factory=dict)
    block_rows: BlockRows | None = None
    rounded: Values | None = None
    lora: bool = False  # adapters add to gates and ups: SwiGLU cannot be a part of their product

    @property
    def packed(self) -> dict[str, Format | None]:
        """What says how matrices are packed, by the names of the fields."""
        return {"layers": self.layers, "head": self.head, "embedding": self.embedding}

    def of_layer(self, layer: int, name: str) -> Form:
        """Of the matrix "attention.qkv" and the like."""
        return self.of(f"layers.{layer}.{name}.weight", self.layers)

    def of_experts(self, layer: int) -> tuple[Form, Form]:
        """Of both matrices of the experts: packed are both or none."""
        both = self.of_layer(layer, "mlp.gate_up"), self.of_layer(layer, "mlp.down")
        if all(form is None or isinstance(form, str) for form in both):
            return both
        gate_up, down = (None if isinstance(form, str) else form for form in both)
        return gate_up, down

    def of(self, leaf: str, otherwise: Format | None) -> Form:
        return self.blocks.get(leaf) or self.quantized.get(leaf) or otherwise


class RMSNorm(nnx.Module):
    def __init__(self, size: int, spec: ModelSpec, dtype: Any, axis: str | None = None):
        self.weight = nnx.Param(jnp.zeros(size, dtype))
        self.eps, self.axis = spec.rms_norm_eps, axis
        self.offset, self.in_float32 = spec.norm_offset, spec.norm_in_float32

    @property
    def is_plain(self) -> bool:
        """Whether it is as in Llama, so that `forge_kernels.linear` can do it."""
        return not self.offset and not self.in_float32

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(
            x,
            self.weight[...],
            self.eps,
            offset=self.offset,
            in_float32=self.in_float32,
            axis_name=self.axis,
        )


class Linear(nnx.Module):
    """A matrix in one of its forms; `forge_kernels.linear` says what a call can do besides.

    It may be of several pieces, one below the other, each in a form of its own.

    With `experts` it is a matrix for each of them, which is not called by itself. `targets` are the
    names under which adapters know its rows. With `axis` each device has some of the inputs, and
    what they give is added up.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        dtype: Any,
        form: Form = None,
        *,
        paired: bool = False,
        bias: bool = False,
        experts: int | None = None,
        targets: tuple[str, ...] = (),
        axis: str | None = None,
    ):
        self.targets, self.axis, self.dtype = targets, axis, dtype
        if bias:
            self.bias = nnx.Param(jnp.zeros(outputs, dtype))
        self.has_bias = bias
        self.packing: Packing | BlockPacking | None = None
        self.quantization: Quantization | None = None
        self.is_ordered = False
        self.has_pieces = isinstance(form, Pieces)
        if isinstance(form, Pieces):
            assert experts is None and sum(piece.rows for piece in form.pieces) == outputs
            each = (Linear(inputs, piece.rows, dtype, piece.form) for piece in form.pieces)
            self.pieces = nnx.List(each)
            return
        if isinstance(form, QuantizedForm | BlockForm):
            self.is_ordered = isinstance(form, QuantizedForm) and form.is_ordered
            if self.is_ordered:
                shape = (inputs,) if experts is None else (experts, inputs)
                self.order = nnx.Param(jnp.zeros(shape, jnp.int32))
            self.packing = form.packing(outputs, inputs, paired, experts)
            if self.packing is None:
                self._add_quantized(form.quantization(outputs, inputs, experts))
                return
        elif form is not None:
            self.packing = Packing(form, outputs, inputs, paired, experts)
        if self.packing is None:
            shape = (outputs, inputs) if experts is None else (experts, outputs, inputs)
            self.weight = nnx.Param(jnp.zeros(shape, dtype))
            return
        self.weight = _param(self.packing.weight)
        if self.packing.scale is not None:
            self.scale = _param(self.packing.scale)

    def _add_quantized(self, quantization: Quantization) -> None:
        self.quantization = quantization
        for name in ARRAYS:
            shape = getattr(quantization, name)
            if shape is not None:
                setattr(self, name, _param(shape))

    @property
    def matrix(self) -> Weight:
        if self.quantization is not None:
            quantization = self.quantization

            def array(name: str) -> Any:
                return None if getattr(quantization, name) is None else getattr(self, name)[...]

            arrays = {name: array(name) for name in ARRAYS}
            return QuantizedWeight(**arrays, quantization=quantization)
        assert not self.has_pieces, "a matrix of several pieces"
        if self.packing is None:
            return self.weight[...]
        scale = None if self.packing.scale is None else self.scale[...]
        return PackedWeight(self.weight[...], scale, self.packing)

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: RMSNorm | None = None,
        residual: jax.Array | None = None,
        lora: LayerLora | None = None,
        **options: Any,
    ) -> jax.Array:
        if lora is not None:
            return self._adapted(x if norm is None else norm(x), lora, residual, **options)
        scaling = None
        if self.is_ordered:
            x, norm = self._in_order(x if norm is None else norm(x)), None
        if norm is not None and norm.is_plain:
            scaling = (norm.weight[...], norm.eps)
        elif norm is not None:
            with jax.named_scope("norm"):
                x = norm(x)
        if not self.has_bias and self.axis is None:
            return self._multiply(x, norm=scaling, residual=residual, **options)
        y = self._multiply(x, norm=scaling, **options)
        if self.axis is not None:
            y = add_up(y, self.axis)
        if self.has_bias:
            y = y + self.bias[...]
        return y if residual is None else residual + y

    def _multiply(
        self,
        x: jax.Array,
        *,
        residual: jax.Array | None = None,
        swiglu: bool = False,
        **options: Any,
    ) -> jax.Array:
        if not self.has_pieces:
            return linear(x, self.matrix, residual=residual, swiglu=swiglu, **options)
        if swiglu:  # of gates and ups that have not been rounded, as where they are one matrix
            options["out_dtype"] = jnp.float32
        y = jnp.concatenate([linear(x, each.matrix, **options) for each in self.pieces], axis=1)
        if swiglu:
            gate, up = jnp.split(y, 2, axis=-1)
            y = (jax.nn.silu(gate) * up).astype(x.dtype)
        return y if residual is None else residual + y

    def _adapted(
        self, x: jax.Array, lora: LayerLora, residual: jax.Array | None, **options: Any
    ) -> jax.Array:
        """What adapters add stands beside the product, in plain XLA, whatever the matrix' form."""
        assert not options.get("swiglu"), "a model whose forms do not say lora"
        y = self._multiply(self._in_order(x) if self.is_ordered else x, **options)
        y = y + lora.delta(x, self.targets)
        if self.axis is not None:
            y = add_up(y, self.axis)
        if self.has_bias:
            y = y + self.bias[...]
        return y if residual is None else residual + y

    def _in_order(self, x: jax.Array) -> jax.Array:
        """The columns of x that the matrix' are for: of inputs that are cut, from all devices."""
        if self.axis is not None:
            with jax.named_scope("gather"):
                x = lax.all_gather(x, self.axis, axis=1, tiled=True)
        return _columns(x, self.order[...])


def _param(shape: jax.ShapeDtypeStruct) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape.shape, shape.dtype))


def _columns(x: jax.Array, order: jax.Array) -> jax.Array:
    """x[:, order]; 16-bit floats as their bits, for XLA:CPU would convert all of x."""
    if x.dtype.itemsize != 2:
        return x[:, order]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16)[:, order], x.dtype)


def add_up(x: jax.Array, axis: str) -> jax.Array:
    """The sum over the devices of a mesh's axis, on each of them."""
    with jax.named_scope("add_up"):
        return jax.lax.psum(x, axis)


class Block(nnx.Module):
    """What attention, MLP and experts share: norms around them, and the sum with the stream."""

    def __init__(self, spec: ModelSpec, dtype: Any):
        before = spec.norm_placement in ("before", "both")
        after = spec.norm_placement in ("after", "both")
        self.norm = RMSNorm(spec.hidden_size, spec, dtype) if before else None
        self.post_norm = RMSNorm(spec.hidden_size, spec, dtype) if after else None
        self.scale = spec.residual_scale

    def add(self, x: jax.Array, last: Linear, inner: jax.Array, ragged: Ragged) -> jax.Array:
        """x: dtype[T, d], with what `last` makes of `inner` added."""
        rows, lora = ragged.num_tokens, ragged.lora
        if self.post_norm is None and self.scale == 1.0:
            return last(inner, residual=x, lora=lora, num_rows=rows)
        return self.add_result(x, last(inner, lora=lora, num_rows=rows))

    def add_result(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """x: dtype[T, d], with `y` of the same shape added."""
        if self.post_norm is not None:
            with jax.named_scope("post_norm"):
                y = self.post_norm(y)
        return x + (y if self.scale == 1.0 else y * self.scale)


class Attention(Block):
    """Grouped-query attention over the paged cache; queries, keys and values in one matrix."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: Any,
        forms: WeightForms,
        layer: int,
        axis: str | None = None,
    ):
        super().__init__(spec, dtype)
        self.heads, self.kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.head_dim, self.sm_scale = spec.head_dim, spec.sm_scale
        self.window, self.soft_cap = spec.window(layer), spec.attention_soft_cap
        self.rope = rope_kinds(spec).index(rope_kind(spec, layer))
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        d, inner = spec.hidden_size, self.heads * self.head_dim
        bias, output_bias = spec.attention_bias, spec.output_bias
        qkv, out = forms.of_layer(layer, "attention.qkv"), forms.of_layer(layer, "attention.out")
        self.qkv = Linear(d, rows, dtype, qkv, bias=bias, targets=("q", "k", "v"))
        self.out = Linear(inner, d, dtype, out, bias=output_bias, targets=("o",), axis=axis)
        self.norm_all = spec.qk_norm == "all"
        heads, kv_heads = (self.heads, self.kv_heads) if self.norm_all else (1, 1)
        has, norm_axis = spec.qk_norm is not None, axis if self.norm_all else None
        self.q_norm = RMSNorm(heads * self.head_dim, spec, dtype, norm_axis) if has else None
        self.k_norm = RMSNorm(kv_heads * self.head_dim, spec, dtype, norm_axis) if has else None

    def __call__(self, x: jax.Array, kv: LayerKV, ragged: Ragged) -> tuple[LayerKV, jax.Array]:
        """x: dtype[T, d]; kv: one layer's -> (kv, x with the attention added)."""
        H, K, D = self.heads, self.kv_heads, self.head_dim
        with jax.named_scope("qkv"):
            qkv = self.qkv(x, norm=self.norm, lora=ragged.lora, num_rows=ragged.num_tokens)
            qkv = self._normed(qkv.reshape(-1, H + 2 * K, D))
        with jax.named_scope("rope_write"):
            q, kv = rotate_and_write(
                qkv,
                kv,
                *ragged.ropes[self.rope],
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
                window=self.window,
                soft_cap=self.soft_cap,
            )
        out = out.reshape(-1, H * D)
        with jax.named_scope("attention_out"):
            return kv, self.add(x, self.out, out, ragged)

    def _normed(self, qkv: jax.Array) -> jax.Array:
        """dtype[T, H + 2K, D], with the norms of queries and keys where the model has them."""
        if self.q_norm is None or self.k_norm is None:
            return qkv
        H, K = self.heads, self.kv_heads
        normed = []
        for norm, part in ((self.q_norm, qkv[:, :H]), (self.k_norm, qkv[:, H : H + K])):
            shape = (len(part), -1) if self.norm_all else part.shape
            with jax.named_scope("norm"):
                normed.append(norm(part.reshape(shape)).reshape(part.shape))
        return jnp.concatenate([*normed, qkv[:, H + K :]], axis=1)


class MLP(Block):
    """SwiGLU (Shazeer 2020), or the same with another activation; gate and up in one matrix."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: Any,
        forms: WeightForms,
        layer: int,
        axis: str | None = None,
    ):
        super().__init__(spec, dtype)
        self.activation = spec.activation
        self.swiglu = spec.activation == "silu" and not spec.mlp_bias and not forms.lora
        d, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        gate_up, down = forms.of_layer(layer, "mlp.gate_up"), forms.of_layer(layer, "mlp.down")
        self.gate_up = Linear(
            d, 2 * inner, dtype, gate_up, paired=self.swiglu, bias=bias, targets=("gate", "up")
        )
        self.down = Linear(inner, d, dtype, down, bias=bias, targets=("down",), axis=axis)

    def __call__(self, x: jax.Array, ragged: Ragged) -> jax.Array:
        """dtype[T, d] -> x with the MLP added."""
        with jax.named_scope("gate_up"):
            rows, lora = ragged.num_tokens, ragged.lora
            inner = self.gate_up(x, norm=self.norm, lora=lora, swiglu=self.swiglu, num_rows=rows)
            if not self.swiglu:
                gate, up = jnp.split(inner, 2, axis=-1)
                inner = _ACTIVATIONS[self.activation](gate) * up
        with jax.named_scope("down"):
            return self.add(x, self.down, inner, ragged)


class Experts(Block):
    """A mixture of experts in place of the MLP: a router chooses some for each token."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: Any,
        forms: WeightForms,
        layer: int,
        experts: ExpertSpec,
        axis: str | None = None,
    ):
        super().__init__(spec, dtype)
        self.axis = axis
        d, inner, count = spec.hidden_size, experts.intermediate_size, experts.count
        self.per_token, self.normalised = experts.per_token, experts.normalised
        self.router = Linear(d, count, dtype, forms.of(f"layers.{layer}.mlp.router.weight", None))
        gate_up, down = forms.of_experts(layer)
        self.gate_up = Linear(d, 2 * inner, dtype, gate_up, paired=True, experts=count)
        self.down = Linear(inner, d, dtype, down, experts=count)

    def __call__(self, x: jax.Array, ragged: Ragged) -> jax.Array:
        """dtype[T, d] -> x with what the experts give added."""
        with jax.named_scope("norm"):
            normed = x if self.norm is None else self.norm(x)
        with jax.named_scope("router"):
            logits = self.router(normed, out_dtype=jnp.float32)
            chosen, weights = choose_experts(logits, self.per_token, normalised=self.normalised)
        with jax.named_scope("experts"):
            y = mix_experts(
                normed,
                self.gate_up.matrix,
                self.down.matrix,
                chosen,
                weights,
                order=self.gate_up.order[...] if self.gate_up.is_ordered else None,
                num_rows=ragged.num_tokens,
                implementation="reference" if ragged.implementation == "reference" else "auto",
            )
            if self.axis is not None:
                y = add_up(y, self.axis)
            return self.add_result(x, y)


_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


class DecoderLayer(nnx.Module):
    def __init__(
        self,
        spec: ModelSpec,
        dtype: Any,
        forms: WeightForms,
        layer: int,
        axis: str | None = None,
    ):
        self.attention = Attention(spec, dtype, forms, layer, axis)
        experts = spec.experts_of(layer)
        self.mlp = (
            MLP(spec, dtype, forms, layer, axis)
            if experts is None
            else Experts(spec, dtype, forms, layer, experts, axis)
        )

    def __call__(self, x: jax.Array, kv: LayerKV, ragged: Ragged) -> tuple[LayerKV, jax.Array]:
        kv, x = self.attention(x, kv, ragged)
        return kv, self.mlp(x, ragged)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head: every family's, by what the spec says.

    With `shards`, one of so many that share the model.
    """

    def __init__(self, spec: ModelSpec, dtype: Any, forms: WeightForms, shards: int = 1):
        self.axis = axis = AXIS if shards > 1 else None
        self.vocab_size = spec.vocab_size
        self.vocab_rows = vocab_rows = shard_vocab(spec.vocab_size, shards)
        of_shard = shard_spec(spec, shards)
        self.layers = nnx.List(
            [DecoderLayer(of_shard, dtype, forms, i, axis) for i in range(spec.num_hidden_layers)]
        )
        self.norm = RMSNorm(spec.hidden_size, spec, dtype)
        self.embedding_scale, self.logit_scale = spec.embedding_scale, spec.logit_scale
        self.logit_soft_cap = spec.logit_soft_cap
        # The head is the embedding too where the model shares them.
        head = forms.of("head.weight", forms.head)
        self.head = Linear(spec.hidden_size, vocab_rows, dtype, head)
        self.embedding = (
            None
            if spec.tie_word_embeddings
            else Linear(
                spec.hidden_size, vocab_rows, dtype, forms.of("embedding.weight", forms.embedding)
            )
        )

    def hidden(
        self,
        tokens: jax.Array,  # i32[T]
        kv: KV,
        ragged: Ragged,
        lora: Callable[[int], LayerLora] | None = None,  # by layer
    ) -> tuple[KV, jax.Array, tuple[jax.Array, ...]]:
        """(kv, dtype[T, d] after the final norm, the stream before each layer and after all)."""
        with jax.named_scope("embed"):
            x = self._embed(tokens)
            if self.embedding_scale != 1.0:
                x = x * jnp.asarray(self.embedding_scale, x.dtype)
        stream, new_kv = [x], []
        for i, (layer, layer_kv) in enumerate(zip(self.layers, kv, strict=True)):
            with jax.named_scope(f"layer_{i}"):
                if lora is not None:
                    ragged = ragged._replace(lora=lora(i))
                layer_kv, x = layer(x, layer_kv, ragged)
            new_kv.append(layer_kv)
            stream.append(x)
        with jax.named_scope("final_norm"):
            return tuple(new_kv), self.norm(x), tuple(stream)

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """dtype[B, d] -> f32[B, V]."""
        with jax.named_scope("logits"):
            logits = self.head(hidden, num_rows=num_rows, out_dtype=jnp.float32)
            if self.axis is not None:
                logits = jax.lax.all_gather(logits, self.axis, axis=1, tiled=True)
                logits = logits[:, : self.vocab_size]  # without the rows that fill up the last
            if self.logit_scale != 1.0:
                logits = logits * self.logit_scale
            if self.logit_soft_cap is None:
                return logits
            return self.logit_soft_cap * jnp.tanh(logits / self.logit_soft_cap)

    def _embed(self, tokens: jax.Array) -> jax.Array:
        """i32[T] -> dtype[T, d]. One shard has a token's row; the others add zeros, exactly."""
        table = self.embedding or self.head
        if self.axis is None:
            return embed(table.matrix, tokens, table.dtype)
        local = tokens - jax.lax.axis_index(self.axis) * self.vocab_rows
        is_own = (local >= 0) & (local < self.vocab_rows)
        own = jnp.clip(local, 0, self.vocab_rows - 1)
        x = embed(table.matrix, own, table.dtype)
        return add_up(jnp.where(is_own[:, None], x, jnp.zeros((), x.dtype)), self.axis)


def rope_kind(spec: ModelSpec, layer: int) -> RopeSpec | None:
    """How this layer rotates queries and keys; None: not at all."""
    if layer in spec.no_rope:
        return None
    windowed = spec.window(layer) is not None
    return spec.local_rope if windowed and spec.local_rope is not None else spec.rope


def rope_kinds(spec: ModelSpec) -> list[RopeSpec | None]:
    """All that a model has, in the order in which layers first have them."""
    return list(dict.fromkeys(rope_kind(spec, i) for i in range(spec.num_hidden_layers)))


def rope_frequencies(rope: RopeSpec | None, head_dim: int) -> np.ndarray:
    """f32[D / 2]: radians per position, stretched as the spec says."""
    if rope is None:
        return np.zeros(head_dim // 2, np.float32)
    frequencies = inverse_frequencies(head_dim, rope.theta)
    match rope.type:
        case "default":
            return frequencies
        case "linear":
            return linear_scaling(frequencies, rope.factor)
        case "longrope":
            return (frequencies / np.asarray(rope.factors)).astype(np.float32)
        case "llama3":
            return llama3_scaling(
                frequencies,
                factor=rope.factor,
                low_freq_factor=rope.low_freq_factor,
                high_freq_factor=rope.high_freq_factor,
                original_max_position_embeddings=rope.original_max_position_embeddings,
            )
    raise AssertionError(f"rope type {rope.type}")


def _rope_tables(
    rope: RopeSpec | None, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    cos, sin = rope_tables(positions, rope_frequencies(rope, head_dim))
    factor = 1.0 if rope is None else rope.attention_factor
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder without its weights: pure functions that take them as a flat tuple of arrays.

    Made from the spec alone, so that executables can be compiled while the weights are still being
    read: `leaves` holds the shapes and types to lower with. The functions are jit-able; wrap them
    in a `jax.jit` of your own, they do not hold one.

    With `shards`, it is one of so many that share the model of the whole `spec`: `leaves`, their
    bytes and `packings` are the shard's, and the functions are for inside of `shard_map`, see
    `forge_jax.step.mesh`.
    """

    spec: ModelSpec
    dtype: np.dtype
    names: tuple[str, ...]  # of the leaves: "layers.0.attention.qkv.weight"
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    packings: Mapping[str, Packing | BlockPacking]  # of those packed: "layers.0.mlp.down.weight"
    quantized: Mapping[str, QuantizedForm]  # of those that the checkpoint has quantised
    blocks: Mapping[str, BlockForm | Pieces]  # the same of a GGUF file
    graphdef: Any
    treedef: Any
    shards: int = 1

    @classmethod
    def build(
        cls,
        decoder: Callable[[ModelSpec, Any, WeightForms, int], nnx.Module],
        spec: ModelSpec,
        dtype: Any,
        forms: WeightForms,
        shards: int = 1,
    ) -> Model:
        """Traces `decoder(spec, dtype, forms, shards)` abstractly: no weights are allocated."""
        dtype = jnp.dtype(dtype)
        module = nnx.eval_shape(lambda: decoder(spec, dtype, forms, shards))
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
            quantized=forms.quantized,
            blocks=forms.blocks,
            graphdef=graphdef,
            treedef=treedef,
            shards=shards,
        )

    @property
    def formats(self) -> set[str]:
        """What the matrices are kept in, where they are not plain: "bf16", "int8", "gptq int4"."""
        kept = {packing.format for packing in self.packings.values()}
        kept |= {f"{form.blocks.values} blocks" for form in forms_by_piece(self.blocks).values()}
        return kept | {
            f"{'rounded' if form.rounded else form.scheme.layout} {form.scheme.values}"
            for form in self.quantized.values()
        }

    @property
    def param_bytes(self) -> int:
        """Bytes of all weights, of one shard if it is cut."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves)

    def forward(  # noqa: PLR0913
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
        lora: Lora | None = None,
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
          lora: the adapters, and which of them each token takes; for a model whose forms say so.

        Returns:
          (kv, hidden): hidden is dtype[T, d] after the final norm; rows of no sequence may hold
          anything. With `return_hidden_states`,
          (kv, hidden, stream): stream is L + 1 arrays dtype[T, d], the embedding and each layer's
          output.

        Raises:
          NotImplementedError: a gradient is asked of another combination than float32 `kv` and
            implementation="reference".
        """
        with jax.named_scope("rope_tables"):
            ropes = tuple(
                _rope_tables(rope, self.spec.head_dim, positions) for rope in rope_kinds(self.spec)
            )
        ragged = Ragged(
            ropes=ropes,
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
        by_layer = None if lora is None else partial(lora.layer, self.spec)
        kv, hidden, stream = decoder.hidden(tokens, kv, ragged, by_layer)
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
