"""A layer of gated DeltaNet between its projections: convolution, recurrence, and their state.

The state of a sequence is stored at the position `base`, with the inputs of up to W tokens from
there on. These tokens are pending, because they may be drafts that are rejected. A step's first
position determines how many of them are part of the sequence. The step applies those to the state,
drops the rest, and keeps its own tokens pending. Nothing needs to be undone. A step of more than W
tokens of a sequence has no drafts, and its tokens are applied at once.

Letters of a step: T tokens, S sequences, N slots. Letters of a layer: C channels of the
convolution, K its taps, H value heads, Dk and Dv dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.delta_rule.ragged import Rows, by_chunk, by_token
from forge_kernels.delta_rule.recurrence import Tokens
from forge_kernels.derivatives import with_derivative_of, zero_from
from forge_kernels.norm import rms_norm

Form = Literal["auto", "chunk", "token", "scan"]


class Heads(NamedTuple):
    """The sizes of a layer: heads of queries and keys, heads of values, and their dims."""

    keys: int
    values: int  # a multiple of `keys`
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """The width of queries, keys and values together."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim


class DeltaState(NamedTuple):
    """The states of a layer, one per slot.

    Attributes:
      state: f32[N, H, Dk, Dv], at `base`.
      base: i32[N].
      tail: f32[N, K - 1, C], inputs of the convolution of the tokens before `base`.
      inputs: f32[N, W, C], the same of the pending tokens.
      gates: f32[N, W, 2, H], log decay and beta of the pending tokens.
    """

    state: jax.Array
    base: jax.Array
    tail: jax.Array
    inputs: jax.Array
    gates: jax.Array

    @property
    def pending(self) -> int:
        """W, the most tokens that can be pending."""
        return self.gates.shape[1]


def ragged_delta_net(  # noqa: PLR0913
    x: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    taps: jax.Array,
    state: DeltaState,
    slots: jax.Array,
    positions: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    heads: Heads,
    max_q_len: int | None = None,
    form: Form = "auto",
) -> tuple[DeltaState, jax.Array]:
    """Convolve queries, keys and values, apply the gated delta rule, and update the states.

    A sequence whose first position is 0 starts from zeros, whatever its slot has.

    Args:
      x: dtype[T, C], queries, keys and values of each token, before the convolution.
      log_decay: f32[T, H], at most 0.
      beta: f32[T, H], from 0 to 1.
      taps: dtype[C, K], the weight of the causal depthwise convolution, which SiLU follows.
      state: of all slots.
      slots: i32[S], a different one for each sequence in use. The last slot is for the others.
      positions: i32[T].
      cu_q_lens: i32[S + 1], where each sequence's rows start.
      num_seqs: i32[].
      heads: the sizes.
      max_q_len: upper bound of the rows of a sequence.
      form: "chunk" computes matrix products. "token" computes token by token, so that a row's bits
        do not depend on the other rows. "scan" is the same with a loop of known length.
        "auto" is "token" on CPUs, where XLA is slow at products of small matrices, else "chunk".

    Returns:
      (state, f32[T, H, Dv]); rows that belong to no sequence are undefined. The derivative of all
      forms is that of "scan", which needs memory for the state of each token.
    """

    def net(form: Form, *arrays: Any) -> tuple[DeltaState, jax.Array]:
        return _delta_net(*arrays, heads=heads, max_q_len=max_q_len, form=form)

    def clean(found: tuple[DeltaState, jax.Array], *arrays: Any) -> tuple[DeltaState, jax.Array]:
        after, out = found
        *_, cu_q_lens, num_seqs = arrays
        return after, zero_from(out, cu_q_lens[num_seqs])

    differentiable = with_derivative_of(partial(net, "scan"), partial(net, form), clean=clean)
    return differentiable(x, log_decay, beta, taps, state, slots, positions, cu_q_lens, num_seqs)


def _delta_net(  # noqa: PLR0913
    x: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    taps: jax.Array,
    state: DeltaState,
    slots: jax.Array,
    positions: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    heads: Heads,
    max_q_len: int | None,
    form: Form,
) -> tuple[DeltaState, jax.Array]:
    rows = Rows.of(cu_q_lens, num_seqs, positions, state.base, slots, state.pending)
    held = rows.slots
    inputs = jnp.concatenate([state.tail[held], state.inputs[held]], axis=1)
    inputs = jnp.where(rows.fresh[:, None, None], 0.0, inputs)
    gates = jnp.where(rows.fresh[:, None, None, None], 0.0, state.gates[held])
    initial = jnp.where(rows.fresh[:, None, None, None], 0.0, state.state[held])
    if form == "scan":  # its derivative is a sum over all rows, in which padding may be NaN
        x, log_decay, beta = (zero_from(a, cu_q_lens[num_seqs]) for a in (x, log_decay, beta))
    x = x.astype(jnp.float32)

    width, W = taps.shape[1], state.pending
    weight, new_gates = taps.astype(jnp.float32), jnp.stack([log_decay, beta], axis=1)

    def tokens() -> tuple[jax.Array, jax.Array]:
        token_at = _single_tokens(rows, x, inputs, new_gates, gates, weight, heads)
        return by_token(initial, token_at, rows, W, scan=form == "scan")

    def chunks() -> tuple[jax.Array, jax.Array]:
        new = _convolved(lambda tap: _input(rows, x, inputs, width, tap), weight)
        old = _convolved(lambda tap: inputs[:, width - 1 - tap :][:, :W], weight)
        old_tokens, new_tokens = _tokens(old, gates, heads), _tokens(new, new_gates, heads)
        return by_chunk(initial, old_tokens, new_tokens, rows, max_q_len)

    with jax.named_scope("recurrence"):
        if form == "auto":
            final, out = lax.platform_dependent(cpu=tokens, default=chunks)
        else:
            final, out = chunks() if form == "chunk" else tokens()
    with jax.named_scope("state_write"):
        applied = jnp.where(rows.applied(W), rows.lengths, 0)
        kept = _kept_inputs(rows, x, inputs, width, applied)
        tail, pending = kept[:, : width - 1], kept[:, width - 1 :]
        kept_gates = _kept_gates(rows, new_gates, applied, W)
        after = DeltaState(final, rows.first + applied, tail, pending, kept_gates)
        return DeltaState(*(a.at[held].set(b) for a, b in zip(state, after, strict=True))), out


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Return RMSNorm(x) * weight * SiLU(gate), computed in float32.

    Args:
      x: f32[..., Dv].
      gate: dtype[..., Dv].
      weight: dtype[Dv].
      eps: added to the mean square.

    Returns:
      [..., Dv] of the gate's type.
    """
    y = rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32), eps)
    return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def _convolved(shifted: Callable[[int], jax.Array], weight: jax.Array) -> jax.Array:
    """Return f32[..., C]; `shifted(i)` is the input i tokens before each token."""
    total = 0.0
    for i in range(weight.shape[1]):
        x = shifted(weight.shape[1] - 1 - i)
        total = total + x * jnp.broadcast_to(weight[:, i], x.shape)
    return jax.nn.silu(total)


def _input(rows: Rows, x: jax.Array, inputs: jax.Array, width: int, back: int) -> jax.Array:
    """Return f32[T, C], the input `back` tokens before each row."""
    if back == 0:
        return x
    at = rows.pending[rows.sequence] + width - 1 + rows.offset - back
    stored = inputs[rows.sequence, jnp.clip(at, 0, inputs.shape[1] - 1)]
    return jnp.where((rows.offset >= back)[:, None], jnp.roll(x, back, axis=0), stored)


def _single_tokens(
    rows: Rows,
    x: jax.Array,
    inputs: jax.Array,
    new_gates: jax.Array,
    gates: jax.Array,
    weight: jax.Array,
    heads: Heads,
) -> Callable[[jax.Array, jax.Array], Tokens]:
    """Return `token_at` for `by_token`, which includes the convolution."""
    S, stored = inputs.shape[:2]
    pending, width = gates.shape[1], weight.shape[1]
    all_inputs = jnp.concatenate([inputs.reshape(S * stored, -1), x])
    all_gates = jnp.concatenate([gates.reshape(S * pending, *gates.shape[2:]), new_gates])

    def at(s: jax.Array, offset: jax.Array, size: int, before: int) -> jax.Array:
        old = s * size + rows.pending[s] + before + offset
        return jnp.where(offset < 0, old, S * size + rows.starts[s] + offset)

    def token_at(s: jax.Array, offset: jax.Array) -> Tokens:
        def shifted(tap: int) -> jax.Array:
            return all_inputs[at(s, offset - tap, stored, width - 1)]

        return _tokens(_convolved(shifted, weight), all_gates[at(s, offset, pending, 0)], heads)

    return token_at


def _tokens(x: jax.Array, gates: jax.Array, heads: Heads) -> Tokens:
    """Split and normalize f32[..., C]. gates: f32[..., 2, H]."""
    size, group = heads.keys * heads.key_dim, heads.values // heads.keys
    q, k, v = jnp.split(x, (size, 2 * size), axis=-1)
    q, k = (y.reshape(*y.shape[:-1], heads.keys, heads.key_dim) for y in (q, k))
    q, k = (y * lax.rsqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    q, k = (jnp.repeat(y, group, axis=-2) for y in (q * heads.key_dim**-0.5, k))
    v = v.reshape(*v.shape[:-1], heads.values, heads.value_dim)
    return Tokens(q, k, v, gates[..., 0, :], gates[..., 1, :])


def _kept_inputs(
    rows: Rows, x: jax.Array, inputs: jax.Array, width: int, applied: jax.Array
) -> jax.Array:
    """Return f32[S, K - 1 + W, C], the inputs from the token K - 1 before the new base on."""
    offset = applied[:, None] - (width - 1) + jnp.arange(inputs.shape[1])[None]
    at = rows.pending[:, None] + width - 1 + offset
    at = jnp.clip(at, 0, inputs.shape[1] - 1)[:, :, None]
    stored = jnp.take_along_axis(inputs, at, axis=1)
    own = jnp.where((offset < rows.lengths[:, None])[:, :, None], rows.take(x, offset), 0.0)
    return jnp.where((offset >= 0)[:, :, None], own, stored)


def _kept_gates(rows: Rows, gates: jax.Array, applied: jax.Array, pending: int) -> jax.Array:
    """Return f32[S, W, 2, H], those of the tokens from the new base on."""
    offset = applied[:, None] + jnp.arange(pending)[None]
    valid = (offset < rows.lengths[:, None])[:, :, None, None]
    return jnp.where(valid, rows.take(gates, offset), 0.0)
