"""The decoder as Flax NNX modules, and `Model`: its pure functions on a flat tuple of weights.

Modules define the weights and the arithmetic. They hold no state and do not depend on files,
requests or scheduling. Layers are unrolled, because XLA copies every layer's matrices out of a
stacked array at each step.

If several devices share a model (tensor parallelism), the modules are those of one shard, and are
called inside `shard_map`. `axis` is the mesh axis to sum over.

Letters of a step: T tokens, S sequences, B rows of logits, N blocks, bs tokens per block.
Letters of a model: L layers, H query heads, K key/value heads, D head dim, d hidden size,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.dtypes import itemsize_bits

from forge_jax.models.interface import DecoderFactory, DecoderModule
from forge_jax.models.kv import KV, PagedKV, bits_of, first_paged
from forge_jax.models.linear import (
    Delta,
    Linear,
    MatrixBuilder,
    Norm,
    RMSNorm,
    add_up,
    new_bias,
    new_norm,
)
from forge_jax.models.lora import LayerLora, Lora
from forge_jax.models.probe import Probe
from forge_jax.models.spec import Activation, ExpertSpec, ModelSpec, RopeSpec
from forge_jax.models.stages import Stage
from forge_jax.models.summary import summarize
from forge_jax.weights.formats import (
    MatrixSpec,
    WeightFormat,
    WeightFormats,
    split_pieces,
)
from forge_jax.weights.partition import AXIS, shard_spec, shard_vocab
from forge_kernels.attention import (
    Implementation,
    chunked_batch,
    pattern_attention,
    ragged_paged_attention,
    refuse_gradient,
    rotate_and_write,
    rotate_write_attend,
)
from forge_kernels.collectives import sums_in_order
from forge_kernels.derivatives import zero_from
from forge_kernels.embed import embed
from forge_kernels.experts import choose_experts, geglu, mix_experts
from forge_kernels.linear import (
    BlockPacking,
    MatrixWeight,
    Packing,
)
from forge_kernels.rope import (
    apply_rope,
    inverse_frequencies,
    linear_scaling,
    llama3_scaling,
    rope_tables,
    yarn_scaling,
)

Leaves = tuple[jax.Array, ...]


class RopeTables(NamedTuple):
    """One rotation at the step's positions, see `forge_kernels.rope.apply_rope`."""

    cos: jax.Array  # f32[T, pairs]
    sin: jax.Array  # f32[T, pairs]
    interleaved: bool


class Ragged(NamedTuple):
    """The inputs of a step that every layer needs: its rows, and how attention is computed."""

    positions: jax.Array  # i32[T]
    ropes: tuple[RopeTables, ...]  # by kind
    slot_mapping: jax.Array  # i32[T]
    block_tables: jax.Array  # i32[S, max_blocks]
    kv_lens: jax.Array  # i32[S]
    cu_q_lens: jax.Array  # i32[S + 1]
    num_seqs: jax.Array  # i32[]
    num_tokens: jax.Array  # i32[], rows in use
    kv_dtype: np.dtype | None  # if the cache stores bits: their type
    implementation: Implementation
    max_q_len: int | None
    uniform: bool
    axis: str | None = None  # mesh axis, if several devices share the model
    lora: LayerLora | None = None  # adapters of the current layer
    # i32[S], each sequence's index in the layers' state. None if no layer has state.
    state_slots: jax.Array | None = None
    probe: Probe | None = None  # activation probe for research; None in a served step
    num_rows: jax.Array | None = None  # i32[], rows that products compute; None: all, with padding

    def in_layer(self, layer: int) -> Ragged:
        """Return the inputs of a layer, whose activations have its number in their names."""
        if self.probe is None:
            return self
        return self._replace(probe=self.probe.in_layer(layer))

    def tap(self, point: str, x: jax.Array) -> jax.Array:
        """Return an activation, [T, ...], or what replaces it. `point`: such as "mlp.out"."""
        return x if self.probe is None else self.probe.visit(point, x)

    def embeddings(self) -> jax.Array | None:
        """Return float[T, d] to use in place of the embeddings of tokens, or None.

        A decoder that does not call this method supports no `inputs_embeds`.
        """
        return None if self.probe is None else self.probe.embeddings()

    def wants(self, point: str) -> bool:
        """Return True if this call returns or replaces an activation."""
        return self.probe is not None and self.probe.wants(point)

    def attention(self) -> Callable[..., jax.Array] | None:
        """Return the attention that computes all softmax weights; None if they are not needed."""
        if self.probe is None:
            return None
        tap = partial(self.tap, "attn.pattern") if self.wants("attn.pattern") else None
        if tap is None and not self.probe.full_attention:
            return None
        return partial(pattern_attention, tap=tap)

    @property
    def batch(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The arguments of attention that describe the sequences."""
        return self.block_tables, self.kv_lens, self.cu_q_lens, self.num_seqs

    def zero_padding(self, x: jax.Array) -> jax.Array:
        """Return x, [T, ...], with zeros in rows that belong to no sequence."""
        return zero_from(x, self.num_tokens)

    def delta(self, *targets: str) -> Delta | None:
        """Return the function that adds the adapters of these targets; None without adapters."""
        lora = self.lora
        return None if lora is None else lambda x: lora.delta(x, targets, self.num_rows)


def attend(
    qkv: jax.Array,
    kv: PagedKV,
    ragged: Ragged,
    *,
    rope: int = 0,
    sm_scale: float,
    window: int | None = None,
    chunk: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[PagedKV, jax.Array]:
    """Rotate queries and keys, write keys and values to the cache, and attend.

    Args:
      qkv: dtype[T, H + 2 K, D], the heads of queries, keys and values.
      kv: one layer's cache, with K heads.
      ragged: the step.
      rope: the index in `ragged.ropes` of the rotation.
      sm_scale: the factor on scores.
      window: how many keys a query attends to, or None for all.
      chunk: the size of the chunks of positions that queries attend within, or None.
      soft_cap: the cap of scores, or None.
      sinks: f32[H], logits of the softmax without a value, or None.

    Returns:
      (kv, dtype[T, H * D]): the cache with the new keys and values, and the heads' outputs.
    """
    tables = ragged.ropes[rope]
    qkv = _tapped_heads(qkv, kv.shape[2], ragged)
    scoring = {"sm_scale": sm_scale, "window": window, "soft_cap": soft_cap, "sinks": sinks}
    scoring |= {"kv_dtype": ragged.kv_dtype, "max_q_len": ragged.max_q_len}
    rotation = tables.cos, tables.sin, ragged.slot_mapping
    if (attention := ragged.attention()) is not None:
        q, kv = rotate_and_write(
            qkv, kv, *rotation, interleaved=tables.interleaved, kv_dtype=ragged.kv_dtype
        )
        chunks = {} if chunk is None else {"chunk": chunk}
        out = attention(q, kv, *ragged.batch, **chunks, **scoring)
        return kv, out.reshape(len(out), -1)
    batch = ragged.batch
    if chunk is not None:
        longest = ragged.max_q_len
        batch = chunked_batch(
            *batch, chunk=chunk, tokens=len(qkv), block_size=kv.shape[3], max_q_len=longest
        )
        scoring["max_q_len"] = chunk if longest is None else min(longest, chunk)
    kv, out = rotate_write_attend(
        qkv,
        kv,
        *rotation,
        *batch,
        interleaved=tables.interleaved,
        num_tokens=ragged.num_tokens,
        implementation=ragged.implementation,
        uniform=ragged.uniform,
        **scoring,
    )
    return kv, _of_all_heads(out, ragged)


def attend_to_written(
    q: jax.Array,
    kv: PagedKV,
    ragged: Ragged,
    *,
    rope: int = 0,
    sm_scale: float,
    window: int | None = None,
) -> jax.Array:
    """Rotate queries, and attend to keys and values that another layer wrote in this step.

    Args:
      q: dtype[T, H, D].
      kv: the other layer's cache, with this step's keys and values.
      ragged: the step.
      rope: the index in `ragged.ropes` of the rotation.
      sm_scale: the factor on scores.
      window: how many keys a query attends to, or None for all.

    Returns:
      dtype[T, H * D], the heads' outputs.

    Raises:
      NotImplementedError: a gradient was requested, but `kv` is not float32.
    """
    tables = ragged.ropes[rope]
    if kv.dtype != jnp.float32:  # the gradient through the other layer's keys would be missing
        q = refuse_gradient(q)
    q = ragged.tap("attn.q", q)
    attention = ragged.attention() or partial(
        ragged_paged_attention, implementation=ragged.implementation, uniform=ragged.uniform
    )
    with jax.named_scope("rope"):
        q = apply_rope(q, tables.cos, tables.sin, interleaved=tables.interleaved)
    with jax.named_scope("attention"):
        out = attention(
            q,
            kv,
            *ragged.batch,
            sm_scale=sm_scale,
            window=window,
            kv_dtype=ragged.kv_dtype,
            max_q_len=ragged.max_q_len,
        )
    return _of_all_heads(out, ragged)


def _of_all_heads(out: jax.Array, ragged: Ragged) -> jax.Array:
    """Return dtype[T, H * D] of out: dtype[T, H, D], without undefined rows."""
    if ragged.implementation == "cpu" and ragged.num_rows is None:
        out = ragged.zero_padding(out)
    return out.reshape(len(out), -1)


def _tapped_heads(qkv: jax.Array, kv_heads: int, ragged: Ragged) -> jax.Array:
    """Return qkv: dtype[T, H + 2 K, D], with the heads that replace those of queries and keys."""
    points = ("attn.q", "attn.k", "attn.v")
    if not any([ragged.wants(point) for point in points]):
        return qkv
    parts = jnp.split(qkv, (qkv.shape[1] - 2 * kv_heads, qkv.shape[1] - kv_heads), axis=1)
    tapped = [ragged.tap(point, part) for point, part in zip(points, parts, strict=True)]
    return jnp.concatenate(tapped, axis=1)


class ResidualBlock(nnx.Module):
    """The common part of attention, MLP and experts: the norms around them and the residual sum."""

    def __init__(self, spec: ModelSpec, dtype: Any):
        before = spec.norm_placement in ("before", "both")
        after = spec.norm_placement in ("after", "both")
        self.norm = new_norm(spec.hidden_size, spec, dtype) if before else None
        self.post_norm = new_norm(spec.hidden_size, spec, dtype) if after else None
        self.scale = spec.residual_scale

    def add(
        self, x: jax.Array, last: Linear, inner: jax.Array, ragged: Ragged, target: str
    ) -> jax.Array:
        """Return x + last(inner), dtype[T, d]. `target` is the adapters' name of `last`."""
        rows, delta, axis = ragged.num_rows, ragged.delta(target), ragged.axis
        point = "attn.out" if target == "o" else "mlp.out"
        if self.post_norm is None and self.scale == 1.0 and not ragged.wants(point):
            return last(inner, residual=x, delta=delta, axis=axis, num_rows=rows)
        y = last(inner, delta=delta, axis=axis, num_rows=rows)
        return self.add_result(x, y, ragged, point)

    def add_result(
        self, x: jax.Array, y: jax.Array, ragged: Ragged, point: str = "mlp.out"
    ) -> jax.Array:
        """Return x + y, after the norm and the scale of y. x, y: dtype[T, d]."""
        if self.post_norm is not None:
            with jax.named_scope("post_norm"):
                y = self.post_norm(y)
        return x + ragged.tap(point, y if self.scale == 1.0 else y * self.scale)


class Attention(ResidualBlock):
    """Grouped-query attention over the paged cache, with a fused matrix for q, k and v."""

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        super().__init__(spec, dtype)
        self.heads, self.kv_heads = spec.num_attention_heads, spec.num_key_value_heads
        self.head_dim, self.sm_scale = spec.head_dim, spec.sm_scale
        self.window, self.chunk = spec.window(layer), spec.chunk(layer)
        self.soft_cap = spec.attention_soft_cap
        self.growth, self.original = spec.query_growth, spec.rope.original_max_position_embeddings
        self.rope = rope_kinds(spec).index(rope_kind(spec, layer))
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        d, inner = spec.hidden_size, self.heads * self.head_dim
        self.qkv = Linear(
            matrix(f"layers.{layer}.attention.qkv.weight", rows, d),
            new_bias(rows, dtype, exists=spec.attention_bias),
        )
        self.out = Linear(
            matrix(f"layers.{layer}.attention.out.weight", d, inner),
            new_bias(d, dtype, exists=spec.output_bias),
        )
        self.norm_all = spec.qk_norm == "all"
        self.q_norm = _qk_norm(self.heads, spec, dtype)
        self.k_norm = _qk_norm(self.kv_heads, spec, dtype)

    def __call__(self, x: jax.Array, kv: PagedKV, ragged: Ragged) -> tuple[PagedKV, jax.Array]:
        """Return (kv, x plus the attention). x: dtype[T, d]; kv: one layer's."""
        heads = self.heads + 2 * self.kv_heads
        with jax.named_scope("qkv"):
            delta = ragged.delta("q", "k", "v")
            qkv = self.qkv(x, norm=self.norm, delta=delta, num_rows=ragged.num_rows)
            qkv = self.prepared(qkv.reshape(-1, heads, self.head_dim), ragged)
        kv, out = attend(
            qkv,
            kv,
            ragged,
            rope=self.rope,
            sm_scale=self.sm_scale,
            window=self.window,
            chunk=self.chunk,
            soft_cap=self.soft_cap,
            sinks=self.sink_logits(),
        )
        with jax.named_scope("attention_out"):
            return kv, self.add(x, self.out, out, ragged, "o")

    def sink_logits(self) -> jax.Array | None:
        """Return the sinks, f32[H], of a family that has them. For subclasses to replace."""
        return None

    def prepared(self, qkv: jax.Array, ragged: Ragged) -> jax.Array:
        """Return qkv, dtype[T, H + 2K, D], before the rotation. For subclasses to replace."""
        qkv = self._normed(qkv, ragged.axis)
        if not self.growth:
            return qkv
        return self.grown(qkv, ragged.positions // self.original, self.growth)

    def grown(self, qkv: jax.Array, periods: jax.Array, growth: float) -> jax.Array:
        """Multiply the queries of qkv, dtype[T, H + 2K, D], by 1 + growth log(1 + periods).

        `periods`: i32[T], of each token.
        """
        factor = 1 + growth * jnp.log1p(periods.astype(jnp.float32))
        queries, others = jnp.split(qkv, [self.heads], axis=1)
        grown = queries * factor.astype(qkv.dtype)[:, None, None]
        return jnp.concatenate([grown, others], axis=1)

    def _normed(self, qkv: jax.Array, axis: str | None) -> jax.Array:
        """Apply the norms of queries and keys, if any, to qkv: dtype[T, H + 2K, D]."""
        if self.q_norm is None or self.k_norm is None:
            return qkv
        H, K = self.heads, self.kv_heads
        normed = []
        for norm, part in ((self.q_norm, qkv[:, :H]), (self.k_norm, qkv[:, H : H + K])):
            shape = (len(part), -1) if self.norm_all else part.shape
            with jax.named_scope("norm"):
                if isinstance(norm, RMSNorm):
                    part_axis = axis if self.norm_all else None  # the norm spans all heads, or one
                    normed.append(norm(part.reshape(shape), part_axis).reshape(part.shape))
                else:
                    normed.append(norm(part))
        return jnp.concatenate([*normed, qkv[:, H + K :]], axis=1)


def _qk_norm(heads: int, spec: ModelSpec, dtype: Any) -> Norm | None:
    """Return the norm of so many heads of queries or keys, or None."""
    match spec.qk_norm:
        case None:
            return None
        case "head":
            return RMSNorm(spec.head_dim, spec, dtype)
        case "all":
            return RMSNorm(heads * spec.head_dim, spec, dtype)
        case "each_head":
            return new_norm((heads, spec.head_dim), spec, dtype)


class MLP(ResidualBlock):
    """SwiGLU (Shazeer 2020), or a variant with another activation; gate and up in one matrix.

    An MLP that is not gated activates the up projection (Vaswani et al. 2017, section 3.3).
    """

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        super().__init__(spec, dtype)
        spec = spec.of_layer(layer)
        self.activation, self.gated = spec.activation, spec.mlp_gated
        d, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        silu = self.gated and spec.activation == "silu"
        self.swiglu = silu and not bias and not matrix.formats.lora
        # Before the activation: gate and up, or up alone.
        name, rows = ("gate_up", 2 * inner) if self.gated else ("up", inner)
        first = Linear(
            matrix(f"layers.{layer}.mlp.{name}.weight", rows, d, paired=self.swiglu),
            new_bias(rows, dtype, exists=bias),
        )
        self.gate_up, self.up = (first, None) if self.gated else (None, first)
        self.down = Linear(
            matrix(f"layers.{layer}.mlp.down.weight", d, inner),
            new_bias(d, dtype, exists=bias),
        )

    def __call__(
        self, x: jax.Array, ragged: Ragged, residual: jax.Array | None = None
    ) -> jax.Array:
        """Return the residual, by default x, plus the MLP of x. x, residual: dtype[T, d]."""
        with jax.named_scope("gate_up" if self.gated else "up"):
            inner = ragged.tap("mlp.inner", self._inner(x, ragged))
        with jax.named_scope("down"):
            return self.add(x if residual is None else residual, self.down, inner, ragged, "down")

    def _inner(self, x: jax.Array, ragged: Ragged) -> jax.Array:
        """Return the activations that `down` multiplies, dtype[T, intermediate size]."""
        act, rows = ACTIVATION_FUNCTIONS[self.activation], ragged.num_rows
        if self.up is not None:
            return act(self.up(x, norm=self.norm, delta=ragged.delta("up"), num_rows=rows))
        assert self.gate_up is not None
        delta = ragged.delta("gate", "up")
        inner = self.gate_up(x, norm=self.norm, delta=delta, swiglu=self.swiglu, num_rows=rows)
        if self.swiglu:
            return inner
        gate, up = jnp.split(inner, 2, axis=-1)
        return act(gate) * up


class Experts(ResidualBlock):
    """A mixture of experts in place of the MLP; a router chooses some for each token."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: Any,
        matrix: MatrixBuilder,
        layer: int,
        experts: ExpertSpec,
    ):
        super().__init__(spec, dtype)
        d, inner, own = spec.hidden_size, experts.intermediate_size, experts.own
        self.per_token, self.normalized = experts.per_token, experts.normalized
        self.count, self.own = experts.count, own
        self.route = experts.router
        mlp = f"layers.{layer}.mlp"
        self.router = Linear(matrix(f"{mlp}.router.weight", experts.count, d))
        correction = jnp.zeros(experts.count, jnp.float32)
        self.correction = nnx.Param(correction) if experts.router.correction else None
        gate_up = matrix(f"{mlp}.gate_up.weight", 2 * inner, d, paired=True, experts=own)
        self.gate_up = nnx.Param(gate_up)
        self.down = nnx.Param(matrix(f"{mlp}.down.weight", d, inner, experts=own))
        self.is_silu = spec.activation == "silu"
        self.shared = (
            SharedExperts(d, matrix, mlp, experts, spec.activation) if experts.shared_size else None
        )

    def __call__(
        self, x: jax.Array, ragged: Ragged, residual: jax.Array | None = None
    ) -> jax.Array:
        """Return the residual, by default x, plus the weighted outputs of the experts.

        x, residual: dtype[T, d].
        """
        with jax.named_scope("norm"):
            normed = x if self.norm is None else self.norm(x)
        y = self.routed(normed, normed, ragged)
        if self.shared is not None:
            with jax.named_scope("shared_experts"):
                y = y + self.shared(normed, ragged)
        with jax.named_scope("experts"):
            if ragged.axis is not None:
                y = add_up(y, ragged.axis)
            return self.add_result(x if residual is None else residual, y, ragged)

    def routed(self, x: jax.Array, to_router: jax.Array, ragged: Ragged) -> jax.Array:
        """Return this device's part of the experts' weighted outputs for x, dtype[T, d].

        Args:
          x: dtype[T, d], after its norm.
          to_router: dtype[T, d], from which the router chooses.
          ragged: the step.
        """
        with jax.named_scope("router"):
            logits = ragged.tap("mlp.router.logits", self.router(to_router, out_dtype=jnp.float32))
            chosen, weights = choose_experts(
                logits,
                self.per_token,
                normalized=self.normalized,
                scores=self.route.scores,
                correction=None if self.correction is None else self.correction[...],
                groups=self.route.groups,
                kept_groups=self.route.kept_groups,
                best_of_group=self.route.best_of_group,
                scale=self.route.scale,
            )
            chosen = ragged.tap("mlp.router.chosen", chosen)
            weights = ragged.tap("mlp.router.weights", self.scaled(weights, chosen))
            if self.own < self.count:
                assert ragged.axis is not None
                chosen = self._of_device(chosen, ragged.axis)
        with jax.named_scope("experts"):
            return self.mixed(x, chosen, weights, ragged)

    def mixed(
        self, x: jax.Array, chosen: jax.Array, weights: jax.Array, ragged: Ragged
    ) -> jax.Array:
        """Return the weighted outputs of each row's experts. For subclasses to extend.

        Args:
          x: dtype[R, d], of which `ragged.num_rows` are in use.
          chosen: i32[R, k], the experts.
          weights: f32[R, k].
          ragged: the step.
        """
        return mix_experts(
            x,
            self.gate_up.get_value(),
            self.down.get_value(),
            chosen,
            weights,
            num_rows=ragged.num_rows,
            total=self.count if self.own < self.count else None,
            implementation="reference" if ragged.implementation == "reference" else "auto",
            **self.options(ragged.axis),
        )

    def scaled(self, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Return the weights, f32[T, k], of the chosen experts. For subclasses to replace."""
        del chosen
        return weights

    def _of_device(self, chosen: jax.Array, axis: str) -> jax.Array:
        """Return i32[T, k] as numbers of this device's experts, or `own` for those of others."""
        local = chosen - jax.lax.axis_index(axis) * self.own
        return jnp.where((local >= 0) & (local < self.own), local, self.own)

    def options(self, axis: str | None) -> dict[str, Any]:
        """Return biases and activation for `mix_experts`. For subclasses to replace.

        `axis`: the mesh axis whose devices' results are added up.
        """
        del axis
        return {} if self.is_silu else {"activation": geglu}


class SharedExperts(nnx.Module):
    """The MLP that computes every token in addition to its experts, with an optional gate."""

    def __init__(
        self,
        d: int,
        matrix: MatrixBuilder,
        mlp: str,
        experts: ExpertSpec,
        activation: Activation = "silu",
    ):
        inner, self.swiglu = experts.shared_size, activation == "silu"
        first = matrix(f"{mlp}.shared.gate_up.weight", 2 * inner, d, paired=self.swiglu)
        self.gate_up = Linear(first)
        self.down = Linear(matrix(f"{mlp}.shared.down.weight", d, inner))
        gate = matrix(f"{mlp}.shared.gate.weight", 1, d) if experts.shared_gate else None
        self.gate = None if gate is None else Linear(gate)

    def __call__(self, x: jax.Array, ragged: Ragged) -> jax.Array:
        """Return this device's part of the MLP of x: dtype[T, d]."""
        rows = ragged.num_rows
        inner = self.gate_up(x, swiglu=self.swiglu, num_rows=rows)
        y = self.down(inner if self.swiglu else geglu(inner), num_rows=rows)
        if self.gate is None:
            return y
        return y * jax.nn.sigmoid(self.gate(x, out_dtype=jnp.float32)).astype(y.dtype)


ACTIVATION_FUNCTIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def new_mlp(spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int) -> MLP | Experts:
    """Return a layer's MLP, or its experts."""
    experts = spec.experts_of(layer)
    if experts is None:
        return MLP(spec, dtype, matrix, layer)
    return Experts(spec, dtype, matrix, layer, experts)


class DecoderLayer(nnx.Module):
    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, layer: int):
        self.parallel = spec.parallel_block
        self.attention = Attention(spec, dtype, matrix, layer)
        self.mlp = new_mlp(spec, dtype, matrix, layer)

    def __call__(self, x: jax.Array, kv: PagedKV, ragged: Ragged) -> tuple[PagedKV, jax.Array]:
        kv, attended = self.attention(x, kv, ragged)
        return kv, self.mlp(x if self.parallel else attended, ragged, residual=attended)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head of every family, configured by the spec.

    If `shards` is above 1, this is one shard of the model.

    Attributes:
      layer: the class of the layers, which is called with the spec of the shard, the dtype, the
        `MatrixBuilder` and the layer's index.
    """

    layer: Callable[[ModelSpec, Any, MatrixBuilder, int], Any] = DecoderLayer

    def __init__(self, spec: ModelSpec, dtype: Any, matrix: MatrixBuilder, shards: int = 1):
        self.axis, self.dtype = AXIS if shards > 1 else None, dtype
        self.vocab_size = spec.vocab_size
        self.vocab_rows = vocab_rows = shard_vocab(spec.vocab_size, shards)
        of_shard = shard_spec(spec, shards)
        self.layers = nnx.List(
            [self.layer(of_shard, dtype, matrix, i) for i in range(spec.num_hidden_layers)]
        )
        self.norm = new_norm(spec.hidden_size, spec, dtype)
        self.embedding_scale, self.logit_scale = spec.embedding_scale, spec.logit_scale
        self.logit_soft_cap = spec.logit_soft_cap
        # With tied embeddings, the head is also the embedding.
        d = spec.hidden_size
        self.head = Linear(
            matrix("head.weight", vocab_rows, d),
            new_bias(vocab_rows, dtype, exists=spec.head_bias),
        )
        self.embedding = (
            None if spec.tie_word_embeddings else Linear(matrix("embedding.weight", vocab_rows, d))
        )

    def hidden(
        self,
        tokens: jax.Array,  # i32[T]
        kv: KV,
        ragged: Ragged,
        lora: Callable[[int], LayerLora] | None = None,  # by layer
    ) -> tuple[KV, jax.Array, tuple[jax.Array, ...]]:
        """Return (kv, dtype[T, d] after the final norm, the residual stream, L + 1 arrays)."""
        ragged = ragged._replace(axis=self.axis)
        x = self.first_stream(tokens, ragged)
        kv, stream = self.run_layers(range(len(self.layers)), x, kv, ragged, lora)
        return kv, self.last_hidden(stream[-1], ragged), stream

    def first_stream(self, tokens: jax.Array, ragged: Ragged) -> jax.Array:
        """Return the residual stream before the first layer, dtype[T, d], for i32[T]."""
        with jax.named_scope("embed"):
            return ragged.tap("embed", self.embed(tokens, ragged))

    def run_layers(
        self,
        layers: range,
        x: jax.Array,  # dtype[T, d], the residual stream before them
        kv: KV,  # theirs
        ragged: Ragged,
        lora: Callable[[int], LayerLora] | None = None,  # by layer
    ) -> tuple[KV, tuple[jax.Array, ...]]:
        """Run some layers. Return (kv, the residual stream): x and each layer's output."""
        stream, new_kv = [x], []
        for i, layer_kv in zip(layers, kv, strict=True):
            with jax.named_scope(f"layer_{i}"):
                ragged = ragged.in_layer(i)
                if lora is not None:
                    ragged = ragged._replace(lora=lora(i))
                layer_kv, x = self.layers[i](x, layer_kv, ragged)
            x = ragged.tap("resid", x)
            new_kv.append(layer_kv)
            stream.append(x)
        return tuple(new_kv), tuple(stream)

    def last_hidden(self, x: jax.Array, ragged: Ragged) -> jax.Array:
        """Return dtype[T, d] after the final norm, for the residual stream after all layers."""
        with jax.named_scope("final_norm"):
            return ragged.tap("final_norm", self.norm(x))

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """Return f32[B, V] for hidden: dtype[B, d]."""
        with jax.named_scope("logits"):
            logits = self.head(hidden, num_rows=num_rows, out_dtype=jnp.float32)
            if self.axis is not None:
                logits = jax.lax.all_gather(logits, self.axis, axis=1, tiled=True)
                logits = logits[:, : self.vocab_size]  # without the padding of the last shard
            if self.logit_scale != 1.0:
                logits = logits * self.logit_scale
            if self.logit_soft_cap is None:
                return logits
            return self.logit_soft_cap * jnp.tanh(logits / self.logit_soft_cap)

    def embed(self, tokens: jax.Array, ragged: Ragged) -> jax.Array:
        """Embed i32[T] as dtype[T, d], the first residual stream. For subclasses to extend."""
        given = ragged.embeddings()
        if given is None:
            return self.embed_tokens(tokens)
        return ragged.zero_padding(given.astype(self.dtype))

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """Return the embeddings of i32[T] as dtype[T, d], without positions."""
        x = self._token_embedding(tokens)
        if self.embedding_scale == 1.0:
            return x
        return x * jnp.asarray(self.embedding_scale, x.dtype)

    def _token_embedding(self, tokens: jax.Array) -> jax.Array:
        """Embed i32[T] as dtype[T, d]. One shard has a token's row; the others add exact zeros."""
        table = (self.embedding or self.head).matrix.get_value()
        if self.axis is None:
            return embed(table, tokens, self.dtype)
        local = tokens - jax.lax.axis_index(self.axis) * self.vocab_rows
        is_own = (local >= 0) & (local < self.vocab_rows)
        own = jnp.clip(local, 0, self.vocab_rows - 1)
        x = embed(table, own, self.dtype)
        return add_up(jnp.where(is_own[:, None], x, jnp.zeros((), x.dtype)), self.axis)


def rope_kind(spec: ModelSpec, layer: int) -> RopeSpec | None:
    """Return how this layer rotates queries and keys, or None if it does not."""
    if layer in spec.no_rope:
        return None
    windowed = spec.window(layer) is not None
    return spec.local_rope if windowed and spec.local_rope is not None else spec.rope


def rope_kinds(spec: ModelSpec) -> list[RopeSpec | None]:
    """Return the distinct rotations of a model, in the order of the layers."""
    return list(dict.fromkeys(rope_kind(spec, i) for i in range(spec.num_hidden_layers)))


def rope_frequencies(rope: RopeSpec | None, head_dim: int) -> np.ndarray:
    """Return f32[pairs], radians per position of each rotated pair, with its scaling."""
    if rope is None:
        return np.zeros(head_dim // 2, np.float32)
    frequencies = inverse_frequencies(rope.dims or head_dim, rope.theta)
    match rope.type:
        case "default" | "dynamic":  # no scaling up to the longest context
            return frequencies
        case "linear":
            return linear_scaling(frequencies, rope.factor)
        case "proportional":
            rotated = np.arange(len(frequencies)) < rope.pairs
            return np.where(rotated, frequencies / np.float32(rope.factor), np.float32(0))
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
        case "yarn":
            return yarn_scaling(
                frequencies,
                theta=rope.theta,
                factor=rope.factor,
                beta_fast=rope.beta_fast,
                beta_slow=rope.beta_slow,
                original_max_position_embeddings=rope.original_max_position_embeddings,
                truncate=rope.truncate,
            )
    raise AssertionError(f"rope type {rope.type}")


def _rope_tables(rope: RopeSpec | None, head_dim: int, positions: jax.Array) -> RopeTables:
    cos, sin = rope_tables(positions, rope_frequencies(rope, head_dim))
    if rope is None:
        return RopeTables(cos, sin, interleaved=False)
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return RopeTables(cos, sin, rope.interleaved)


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A decoder without its weights: pure functions that take them as a flat tuple of arrays.

    It is made from the spec alone, so that executables compile while the weights are still being
    read. `leaves` holds the shapes and types to lower with. The functions can be jitted, but are
    not: wrap them in your own `jax.jit`.

    If `shards` is above 1, this is one shard of the model of the whole `spec`. `leaves`,
    `param_bytes` and `packings` are the shard's, and the functions run inside `shard_map`, see
    `forge_jax.step.mesh`.

    If `stage` is not None, this is one stage of pipeline parallelism, see `of_stage`. `spec` still
    describes all layers.
    """

    spec: ModelSpec
    dtype: np.dtype
    names: tuple[str, ...]  # leaf names, such as "layers.0.attention.qkv.weight"
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    matrices: Mapping[str, MatrixSpec]  # by leaf name
    graphdef: Any
    treedef: Any
    shards: int = 1
    stage: Stage | None = None  # whose leaves these are; None: all of the model
    whole: Model | None = None  # with the leaves of all stages; None: this one

    @classmethod
    def build(
        cls,
        decoder: DecoderFactory,
        spec: ModelSpec,
        dtype: Any,
        formats: WeightFormats,
        shards: int = 1,
    ) -> Model:
        """Trace `decoder(spec, dtype, matrix, shards)` abstractly, without allocating weights."""
        dtype = jnp.dtype(dtype)
        matrix = MatrixBuilder(formats, dtype)
        module = nnx.eval_shape(lambda: decoder(spec, dtype, matrix, shards))
        graphdef, state = nnx.split(module)
        flat, treedef = jax.tree_util.tree_flatten_with_path(state)
        return cls(
            spec=spec,
            dtype=dtype,
            names=tuple(_leaf_name(path) for path, _ in flat),
            leaves=tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for _, leaf in flat),
            matrices=matrix.matrices,
            graphdef=graphdef,
            treedef=treedef,
            shards=shards,
        )

    @property
    def has_stages(self) -> bool:
        """True if the decoder computes its layers one after another, as `Decoder` does."""
        return type(self.decoder(self.leaves)).hidden is Decoder.hidden

    def of_stage(self, stage: Stage) -> Model:
        """Return one stage of this model, which has the names and leaves that the stage owns.

        Its `forward` takes the residual stream of the stage before, and returns its own, unless it
        is the first or the last stage.
        """
        own = [stage.owns(name) for name in self.names]
        return replace(
            self,
            names=tuple(compress(self.names, own)),
            leaves=tuple(compress(self.leaves, own)),
            matrices={leaf: each for leaf, each in self.matrices.items() if stage.owns(leaf)},
            stage=stage,
            whole=self,
        )

    @cached_property
    def pieces(self) -> Mapping[str, MatrixSpec]:
        """The matrices that are multiplied separately: matrices of several pieces are split."""
        return split_pieces(self.matrices)

    @cached_property
    def packings(self) -> Mapping[str, Packing | BlockPacking]:
        """The packing of each packed matrix, by leaf name such as "layers.0.mlp.down.weight"."""
        found = {leaf: matrix.packing for leaf, matrix in self.pieces.items()}
        return {leaf: packing for leaf, packing in found.items() if packing is not None}

    @property
    def formats(self) -> set[str]:
        """The formats of the matrices that are not plain, such as "bf16" and "gptq int4"."""
        return {name for matrix in self.pieces.values() for name in matrix.names}

    def in_format[F: WeightFormat](self, kind: type[F]) -> dict[str, F]:
        """Return the formats of class `kind`, by leaf name."""
        formats = {leaf: matrix.format for leaf, matrix in self.pieces.items()}
        return {leaf: format for leaf, format in formats.items() if isinstance(format, kind)}

    def weight(self, leaves: Leaves, name: str) -> MatrixWeight:
        """Return the weight of a matrix ("layers.0.mlp.down.weight"), or of a piece of one."""
        format, shape = self.pieces[name]
        paths, treedef = jax.tree_util.tree_flatten_with_path(format.weight(shape, self.dtype))
        names = [f"{name.removesuffix('weight')}{_leaf_name(path)}" for path, _ in paths]
        return jax.tree.unflatten(treedef, [leaves[self.names.index(each)] for each in names])

    def leaf(self, name: str) -> jax.ShapeDtypeStruct:
        """Return the shape and type of a leaf."""
        return self.leaves[self.names.index(name)]

    @property
    def param_bytes(self) -> int:
        """The bytes of all weights; of one shard if the model is split."""
        bits = (math.prod(leaf.shape) * itemsize_bits(leaf.dtype) for leaf in self.leaves)
        return sum(bits) // 8

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
        state_slots: jax.Array | None = None,
        probe: Probe | None = None,
        skip_padding: bool = False,
        stream: jax.Array | None = None,
    ) -> Any:
        """Run one step over ragged rows: write their keys and values, then attend.

        Decode rows, draft rows and prefill chunks differ only in `cu_q_lens`.

        Args:
          leaves: the weights, in the order of `Model.leaves`.
          kv: per layer, dtype[N, 2, K, bs, D] or a `QuantizedKV`. A uint16 array stores the bits of
            the model's 16-bit dtype. A layer with state has a dict of its arrays.
          tokens, positions: i32[T].
          slot_mapping: i32[T], `block * bs + offset` of each token, each at most once; `N * bs` to
            write nothing.
          block_tables: i32[S, max_blocks].
          kv_lens: i32[S], including this step's tokens.
          cu_q_lens: i32[S + 1], where each sequence's rows start.
          num_seqs: i32[].
          implementation: the attention implementation.
          max_q_len: upper bound of the rows of a sequence, 1 for a decode step; a lower bound
            compiles less code.
          uniform: compute every row of attention in the same way, and add over GPUs in a fixed
            order (the deterministic tier).
          return_hidden_states: also return the residual stream.
          lora: the adapters, and the adapter of each token; for models with `WeightFormats.lora`.
          state_slots: i32[S], the slot of each sequence in layers with state. Default: its index.
          probe: returns and replaces activations, for research. Its caller calls `finish`.
          skip_padding: do not compute rows that belong to no sequence. The CPU kernels leave them
            undefined, and a sum over all rows, such as a weight's gradient, could become NaN.
          stream: for a stage other than the first, dtype[T, d], the residual stream before its
            layers. `kv` has only the stage's layers, and `tokens` is ignored.

        Returns:
          (kv, hidden): hidden is dtype[T, d] after the final norm, or after the layers of a stage
          other than the last. Rows that belong to no sequence have no meaning. If
          `return_hidden_states`, (kv, hidden, stream): stream is L + 1 arrays dtype[T, d], the
          embedding and each layer's output.

        Gradients are those of `forge_kernels.attention.rotate_write_attend`.

        Raises:
          NotImplementedError: a gradient was requested with respect to `kv`, or through layers that
            share a cache, and `kv` is not float32.
          ValueError: `kv` has state for fewer sequences than S, and there are no `state_slots`.
        """
        ragged = Ragged(
            positions=positions,
            ropes=self._ropes(positions),
            slot_mapping=slot_mapping,
            block_tables=block_tables,
            kv_lens=kv_lens,
            cu_q_lens=cu_q_lens,
            num_seqs=num_seqs,
            num_tokens=cu_q_lens[num_seqs],
            kv_dtype=bits_of(first_paged(kv).dtype, self.dtype),
            implementation=implementation,
            max_q_len=max_q_len,
            uniform=uniform,
            state_slots=_state_slots(kv, state_slots, num_seqs, len(kv_lens)),
            probe=probe,
        )
        if skip_padding:
            ragged = ragged._replace(num_rows=ragged.num_tokens)
        decoder, stage = self.decoder(leaves), self.stage
        by_layer = None if lora is None else partial(lora.layer, self.spec)
        with sums_in_order(uniform):
            if stage is None:
                kv, hidden, states = decoder.hidden(tokens, kv, ragged, by_layer)
                return (kv, hidden, states) if return_hidden_states else (kv, hidden)
            assert isinstance(decoder, Decoder)
            ragged = ragged._replace(axis=decoder.axis)
            x = decoder.first_stream(tokens, ragged) if stream is None else stream
            kv, states = decoder.run_layers(stage.layers, x, kv, ragged, by_layer)
            return kv, decoder.last_hidden(states[-1], ragged) if stage.is_last else states[-1]

    def _ropes(self, positions: jax.Array) -> tuple[RopeTables, ...]:
        with jax.named_scope("rope_tables"):
            kinds, head_dim = rope_kinds(self.spec), self.spec.head_dim
            return tuple(_rope_tables(rope, head_dim, positions) for rope in kinds)

    def logits(
        self, leaves: Leaves, hidden: jax.Array, num_rows: jax.Array | None = None
    ) -> jax.Array:
        """Return f32[B, V] for hidden: dtype[B, d], after the final norm.

        `num_rows` (i32[]) promises that the caller ignores the rows from there on.
        """
        return self.decoder(leaves).logits(hidden, num_rows)

    def final_norm(self, leaves: Leaves, stream: jax.Array) -> jax.Array:
        """Apply the final norm to rows of the residual stream, dtype[B, d], for a logit lens."""
        return self.decoder(leaves).norm(stream)

    def embed(self, leaves: Leaves, tokens: jax.Array) -> jax.Array:
        """Return the embeddings of tokens, dtype[T, d] for i32[T], without positions.

        Raises:
          ValueError: the decoder of the family is not a `Decoder`.
        """
        decoder = self.decoder(leaves)
        if not isinstance(decoder, Decoder):
            raise ValueError(
                f"{self.spec.architecture} has no embeddings by token: its decoder is not a "
                "forge_jax.models.Decoder"
            )
        return decoder.embed_tokens(tokens)

    def decoder(self, leaves: Sequence[Any]) -> DecoderModule:
        """Return the modules with these weights: an instance of the class given to `build`.

        Leaves that a stage does not own are shapes.
        """
        if self.whole is not None:
            own = dict(zip(self.names, leaves, strict=True))
            others = zip(self.whole.names, self.whole.leaves, strict=True)
            leaves = [own.get(name, shape) for name, shape in others]
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def leaves_of(self, module: DecoderModule) -> Leaves:
        """Return the weights of modules with this structure, as `decoder` returns them.

        Raises:
          ValueError: the modules have other parameters.
        """
        leaves, treedef = jax.tree.flatten(nnx.split(module)[1])
        if treedef != self.treedef:
            raise ValueError(
                f"module: its parameters are not those of this {self.spec.architecture}: pass a "
                "module that the model returned, with other values only"
            )
        return tuple(leaves)

    def __repr__(self) -> str:
        title = f"Model[{self.spec.architecture}, {self.dtype}]"
        return summarize(title, self.spec, self.names, self.leaves)


def _state_slots(
    kv: KV, slots: jax.Array | None, num_seqs: jax.Array, count: int
) -> jax.Array | None:
    """Return `Ragged.state_slots`, i32[count], for a step with `num_seqs` sequences.

    Raises:
      ValueError: there are no slots for `count` sequences, and `slots` is None.
    """
    state = next((layer for layer in kv if isinstance(layer, dict)), None)
    if state is None:
        return None
    seq = jnp.arange(count, dtype=jnp.int32)
    padding = len(next(iter(state.values()))) - 1
    if slots is None and count > padding:
        raise ValueError(f"the cache has state for {padding} sequences, not {count}: set num_slots")
    return jnp.where(seq < num_seqs, seq if slots is None else slots, padding)


# Parts of a path that are not part of a leaf's name: the way modules hold their weights.
_UNNAMED = (None, "value", "matrix")


def _leaf_name(path: tuple[Any, ...]) -> str:
    keys = [getattr(e, "key", getattr(e, "name", getattr(e, "idx", None))) for e in path]
    return ".".join(str(key) for key in keys if key not in _UNNAMED)
