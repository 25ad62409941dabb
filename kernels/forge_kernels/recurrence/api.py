"""A layer with a linear recurrence between its projections: convolution, recurrence, state.

A `Rule` is the recurrence: gated DeltaNet's or Mamba-2's.

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

from forge_kernels.derivatives import with_derivative_of, zero_from
from forge_kernels.norm import rms_norm
from forge_kernels.recurrence.delta_rule import DELTA_RULE
from forge_kernels.recurrence.ragged import Rows, by_chunk, by_token
from forge_kernels.recurrence.rule import Heads, Rule, Tokens
from forge_kernels.recurrence.state_space import STATE_SPACE

__all__ = [
    "DELTA_RULE",
    "STATE_SPACE",
    "Form",
    "RecurrentState",
    "RecurrentWeights",
    "gated_rms_norm",
    "ragged_recurrence",
]

Form = Literal["auto", "chunk", "token", "scan"]


class RecurrentState(NamedTuple):
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


class RecurrentWeights(NamedTuple):
    """The weights of a layer between its projections.

    Attributes:
      taps: dtype[C, K], the weight of the causal depthwise convolution, which SiLU follows.
      bias: dtype[C], of the convolution, or None.
      skip: f32[H], the factor on a token's value in its own output (D of Mamba), or None.
    """

    taps: jax.Array
    bias: jax.Array | None = None
    skip: jax.Array | None = None


def ragged_recurrence(  # noqa: PLR0913
    x: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    weights: RecurrentWeights,
    state: RecurrentState,
    slots: jax.Array,
    positions: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    heads: Heads,
    rule: Rule = DELTA_RULE,
    max_q_len: int | None = None,
    form: Form = "auto",
) -> tuple[RecurrentState, jax.Array]:
    """Convolve queries, keys and values, apply the rule, and update the states.

    A sequence whose first position is 0 starts from zeros, whatever its slot has.

    Args:
      x: dtype[T, C], queries, keys and values of each token before the convolution, in the rule's
        order.
      log_decay: f32[T, H], at most 0.
      beta: f32[T, H], see `Tokens`.
      weights: parameters of the convolution and the skip.
      state: the states of all slots.
      slots: i32[S], a different one for each sequence in use. The last slot is for the others.
      positions: i32[T].
      cu_q_lens: i32[S + 1], where each sequence's rows start.
      num_seqs: i32[].
      heads: the sizes.
      rule: the recurrence.
      max_q_len: upper bound of the rows of a sequence.
      form: "chunk" computes matrix products. "token" computes token by token, so that a row's bits
        do not depend on the other rows. "scan" is the same with a loop of known length.
        "auto" is "token" on CPUs, where XLA is slow at products of small matrices, else "chunk".

    Returns:
      (state, f32[T, H, Dv]); rows that belong to no sequence are undefined. The derivative of all
      forms is that of "scan", which needs memory for the state of each token.
    """

    def net(form: Form, *arrays: Any) -> tuple[RecurrentState, jax.Array]:
        return _recurrence(*arrays, heads=heads, rule=rule, max_q_len=max_q_len, form=form)

    def clean(
        found: tuple[RecurrentState, jax.Array], *arrays: Any
    ) -> tuple[RecurrentState, jax.Array]:
        after, out = found
        *_, cu_q_lens, num_seqs = arrays
        return after, zero_from(out, cu_q_lens[num_seqs])

    differentiable = with_derivative_of(partial(net, "scan"), partial(net, form), clean=clean)
    return differentiable(x, log_decay, beta, weights, state, slots, positions, cu_q_lens, num_seqs)


def _recurrence(  # noqa: PLR0913
    x: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    weights: RecurrentWeights,
    state: RecurrentState,
    slots: jax.Array,
    positions: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    heads: Heads,
    rule: Rule,
    max_q_len: int | None,
    form: Form,
) -> tuple[RecurrentState, jax.Array]:
    rows = Rows.of(cu_q_lens, num_seqs, positions, state.base, slots, state.pending)
    held = rows.slots
    inputs = jnp.concatenate([state.tail[held], state.inputs[held]], axis=1)
    inputs = jnp.where(rows.fresh[:, None, None], 0.0, inputs)
    gates = jnp.where(rows.fresh[:, None, None, None], 0.0, state.gates[held])
    initial = jnp.where(rows.fresh[:, None, None, None], 0.0, state.state[held])
    if form == "scan":  # its derivative is a sum over all rows, in which padding may be NaN
        x, log_decay, beta = (zero_from(a, cu_q_lens[num_seqs]) for a in (x, log_decay, beta))
    x = x.astype(jnp.float32)

    width, W = weights.taps.shape[1], state.pending
    new_gates, rule = jnp.stack([log_decay, beta], axis=1), rule.with_skip(weights.skip)

    def tokens_of(shifted: Callable[[int], jax.Array], gates: jax.Array) -> Tokens:
        return rule.tokens(_convolved(shifted, weights), gates, heads)

    def tokens() -> tuple[jax.Array, jax.Array]:
        token_at = _single_tokens(rows, x, inputs, new_gates, gates, width, tokens_of)
        return by_token(initial, token_at, rows, W, rule, scan=form == "scan")

    def chunks() -> tuple[jax.Array, jax.Array]:
        new = tokens_of(lambda tap: _input(rows, x, inputs, width, tap), new_gates)
        old = tokens_of(lambda tap: inputs[:, width - 1 - tap :][:, :W], gates)
        return by_chunk(initial, old, new, rows, rule, max_q_len)

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
        after = RecurrentState(final, rows.first + applied, tail, pending, kept_gates)
        used = jnp.where(rows.lengths > 0, held, len(state.base))  # each slot at most once

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return old.at[used].set(new, mode="drop", unique_indices=True)

        return RecurrentState(*map(put, state, after)), out


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


def _convolved(shifted: Callable[[int], jax.Array], weights: RecurrentWeights) -> jax.Array:
    """Return f32[..., C]; `shifted(i)` is the input i tokens before each token."""
    taps, total = weights.taps.astype(jnp.float32), 0.0
    for i in range(taps.shape[1]):
        x = shifted(taps.shape[1] - 1 - i)
        total = total + x * jnp.broadcast_to(taps[:, i], x.shape)
    if weights.bias is not None:
        total = total + jnp.broadcast_to(weights.bias.astype(jnp.float32), jnp.shape(total))
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
    width: int,
    tokens_of: Callable[[Callable[[int], jax.Array], jax.Array], Tokens],
) -> Callable[[jax.Array, jax.Array], Tokens]:
    """Return `token_at` for `by_token`, which includes the convolution of `width` taps."""
    S, stored = inputs.shape[:2]
    pending = gates.shape[1]
    all_inputs = jnp.concatenate([inputs.reshape(S * stored, -1), x])
    all_gates = jnp.concatenate([gates.reshape(S * pending, *gates.shape[2:]), new_gates])

    def at(s: jax.Array, offset: jax.Array, size: int, before: int) -> jax.Array:
        old = s * size + rows.pending[s] + before + offset
        return jnp.where(offset < 0, old, S * size + rows.starts[s] + offset)

    def token_at(s: jax.Array, offset: jax.Array) -> Tokens:
        def shifted(tap: int) -> jax.Array:
            return all_inputs[at(s, offset - tap, stored, width - 1)]

        return tokens_of(shifted, all_gates[at(s, offset, pending, 0)])

    return token_at


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
