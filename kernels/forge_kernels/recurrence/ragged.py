"""The recurrence over the rows of a step: sequences of different lengths, in static shapes.

Letters: T tokens, S sequences, W tokens that can be pending, H value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.recurrence.rule import Rule, Tokens

CHUNK = 64  # tokens; 32 to 128 are equally fast on GPUs (Yang et al. 2024, arXiv:2406.06484)


class Rows(NamedTuple):
    """The sequences of a step, and the sequence of each row.

    Attributes:
      starts: i32[S], the first row.
      lengths: i32[S], rows; 0 for a sequence that is not in use.
      slots: i32[S]; the last slot for a sequence that is not in use.
      first: i32[S], the position of the first row.
      fresh: bool[S], True if the sequence starts from zeros.
      pending: i32[S], the pending tokens that are part of the sequence.
      sequence: i32[T], of each row.
      offset: i32[T], the row's index in its sequence's rows.
    """

    starts: jax.Array
    lengths: jax.Array
    slots: jax.Array
    first: jax.Array
    fresh: jax.Array
    pending: jax.Array
    sequence: jax.Array
    offset: jax.Array

    @classmethod
    def of(
        cls,
        cu_q_lens: jax.Array,
        num_seqs: jax.Array,
        positions: jax.Array,
        base: jax.Array,
        slots: jax.Array,
        capacity: int,
    ) -> Rows:
        """Return the rows of a step, see `ragged_recurrence`.

        Args:
          cu_q_lens: i32[S + 1].
          num_seqs: i32[].
          positions: i32[T].
          base: i32[N], of each slot.
          slots: i32[S].
          capacity: the most tokens that can be pending.
        """
        S, T = len(cu_q_lens) - 1, len(positions)
        used = jnp.arange(S) < num_seqs
        starts = jnp.where(used, cu_q_lens[:-1], T)
        lengths = jnp.where(used, cu_q_lens[1:] - cu_q_lens[:-1], 0)
        slots = jnp.where(lengths > 0, slots, len(base) - 1)
        first = positions[jnp.clip(starts, 0, T - 1)]
        fresh = (first == 0) | (lengths == 0)
        pending = jnp.where(fresh, 0, jnp.clip(first - base[slots], 0, capacity))
        sequence = jnp.searchsorted(starts, jnp.arange(T), side="right") - 1
        sequence = jnp.clip(sequence, 0, S - 1)
        return cls(
            starts, lengths, slots, first, fresh, pending, sequence,
            jnp.arange(T) - starts[sequence],
        )  # fmt: skip

    def applied(self, pending: int) -> jax.Array:
        """Return bool[S], True if the rows change the state at once, instead of being pending."""
        return self.lengths > pending

    def take(self, x: jax.Array, offset: jax.Array) -> jax.Array:
        """Return x[T, ...] of the rows at i32[S, n] offsets, clipped: [S, n, ...]."""
        return x[jnp.clip(self.starts[:, None] + offset, 0, len(x) - 1)]


def by_token(
    initial: jax.Array,
    token_at: Callable[[jax.Array, jax.Array], Tokens],
    rows: Rows,
    pending: int,
    rule: Rule,
    *,
    scan: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return (states, outputs), computed one token after the other.

    The loop's body has the same shapes in every step. A token's bits therefore depend neither on
    other sequences nor on the distribution of tokens over steps.

    Args:
      initial: f32[S, H, Dk, Dv].
      token_at: returns the token of a sequence (i32[]) with this offset to its first row. Pending
        tokens have negative offsets.
      rows: the step.
      pending: W.
      rule: the recurrence.
      scan: loop over as many tokens as are possible, so that the loop can be differentiated.

    Returns:
      f32[S, H, Dk, Dv], without the tokens that stay pending, and f32[T, H, Dv].
    """
    S, T = len(initial), len(rows.offset)
    ends = jnp.cumsum(rows.pending + rows.lengths)
    applied = rows.applied(pending)

    def body(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        states, running, out = carry
        s = jnp.minimum(jnp.searchsorted(ends, i, side="right"), S - 1)
        offset = i - ends[s] + rows.lengths[s]
        running = jnp.where(offset == -rows.pending[s], states[s], running)
        running, y = rule.one_token(running, token_at(s, offset))
        stays = ((offset < 0) | applied[s]) & (i < ends[-1])
        states = states.at[s].set(jnp.where(stays, running, states[s]))
        row = jnp.where((offset >= 0) & (i < ends[-1]), rows.starts[s] + offset, T)
        return states, running, out.at[row].set(y, mode="drop", unique_indices=True)

    out = jnp.zeros((T, initial.shape[1], initial.shape[3]), initial.dtype)
    carry = initial, jnp.zeros_like(initial[0]), out
    if scan:
        carry, _ = lax.scan(
            lambda carry, i: (body(i, carry), None), carry, jnp.arange(S * pending + T)
        )
    else:
        carry = lax.fori_loop(0, ends[-1], body, carry)
    return carry[0], carry[2]


def by_chunk(
    initial: jax.Array, old: Tokens, new: Tokens, rows: Rows, rule: Rule, max_q_len: int | None
) -> tuple[jax.Array, jax.Array]:
    """Return (states, outputs) as `by_token` does, computed as matrix products.

    Sequences of few rows, such as decodes and drafts, are one batch. The others are computed chunk
    after chunk.

    Args:
      initial: f32[S, H, Dk, Dv].
      old: [S, W, ...], the pending tokens.
      new: [T, ...].
      rows: the step.
      rule: the recurrence.
      max_q_len: upper bound of `rows.lengths`, or None.
    """
    W, T = old.beta.shape[1], len(new.beta)
    if W:
        valid = jnp.arange(W)[None] < rows.pending[:, None]
        initial, _ = rule.one_chunk(initial, old.masked(valid))
    most = T if max_q_len is None else min(max_q_len, T)
    few = min(max(W, 1), most)
    short = rows.lengths <= few
    offset = jnp.arange(few)[None]
    batch = Tokens(*(rows.take(x, offset) for x in new))
    valid = (offset < rows.lengths[:, None]) & short[:, None]
    states, few_out = rule.one_chunk(initial, batch.masked(valid))
    out = few_out[rows.sequence, jnp.clip(rows.offset, 0, few - 1)]
    final = initial if W else states
    if most > few:
        final, long_out = _long(final, new, rows, rule, few)
        out = jnp.where(short[rows.sequence][:, None, None], out, long_out)
    return final, out


def _long(
    states: jax.Array, new: Tokens, rows: Rows, rule: Rule, few: int
) -> tuple[jax.Array, jax.Array]:
    """Return (states, outputs) of the sequences of more than `few` rows; others are undefined."""
    S, T, size = len(states), len(new.beta), min(CHUNK, len(new.beta))
    counts = jnp.where(rows.lengths > few, -(-rows.lengths // size), 0)
    ends = jnp.cumsum(counts)
    padded = Tokens(*(jnp.pad(x, ((0, size), *((0, 0),) * (x.ndim - 1))) for x in new))

    def body(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, out = carry
        s = jnp.minimum(jnp.searchsorted(ends, i, side="right"), S - 1)
        offset = (i - ends[s] + counts[s]) * size
        start = rows.starts[s] + offset
        chunk = Tokens(*(lax.dynamic_slice_in_dim(x, start, size) for x in padded))
        valid = jnp.arange(size) < rows.lengths[s] - offset
        state, y = rule.one_chunk(states[s], chunk.masked(valid))
        # Rows after the chunk's last one belong to later chunks, which overwrite them.
        out = lax.dynamic_update_slice_in_dim(out, y, start, 0)
        return states.at[s].set(state), out

    out = jnp.zeros_like(padded.v)
    states, out = lax.fori_loop(0, ends[-1], body, (states, out))
    return states, out[:T]
