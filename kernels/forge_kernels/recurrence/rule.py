"""Differences between linear recurrences: `Rule`, its inputs `Tokens`, and the sizes `Heads`.

Letters: C tokens of a chunk, H value heads, Dk and Dv dims of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


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


class Tokens(NamedTuple):
    """The inputs of the recurrence, in float32. The leading axes are the same in all arrays.

    Queries and keys have H heads, or one for each group of value heads if the rule allows it.
    """

    q: jax.Array  # [..., H, Dk]
    k: jax.Array  # [..., H, Dk]
    v: jax.Array  # [..., H, Dv]
    log_decay: jax.Array  # [..., H], at most 0
    beta: jax.Array  # [..., H]: how much of the value the state takes; 0 changes nothing

    def masked(self, valid: jax.Array) -> Tokens:
        """Return the tokens with zeros where `valid` (bool[...]) is False: they change nothing."""

        def kept(x: jax.Array) -> jax.Array:
            at = valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim))
            return jnp.where(at, x, 0.0)

        return Tokens(*map(kept, self))


class Rule(NamedTuple):
    """A linear recurrence, whose state maps keys to values: f32[H, Dk, Dv].

    Attributes:
      tokens: splits f32[..., channels] after the convolution into `Tokens`, with f32[..., 2, H] log
        decays and betas.
      one_token: returns (state, output) after one token: the state, and f32[H, Dv].
      one_chunk: the same for C tokens, computed as matrix products: [..., H, Dk, Dv] states and
        tokens with the same leading axes, then C. The outputs are f32[..., C, H, Dv].
    """

    tokens: Callable[[jax.Array, jax.Array, Heads], Tokens]
    one_token: Callable[[jax.Array, Tokens], tuple[jax.Array, jax.Array]]
    one_chunk: Callable[[jax.Array, Tokens], tuple[jax.Array, jax.Array]]

    def with_skip(self, skip: jax.Array | None) -> Rule:
        """Return the rule whose outputs also have each token's value times f32[H] `skip`."""
        if skip is None:
            return self

        def skipping(
            step: Callable[[jax.Array, Tokens], tuple[jax.Array, jax.Array]],
        ) -> Callable[[jax.Array, Tokens], tuple[jax.Array, jax.Array]]:
            def stepped(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
                state, out = step(state, tokens)
                return state, out + jnp.broadcast_to(skip[:, None], out.shape) * tokens.v

            return stepped

        return self._replace(one_token=skipping(self.one_token), one_chunk=skipping(self.one_chunk))


class Decays(NamedTuple):
    """The decays within a chunk, each in float32 and at most 1."""

    since: jax.Array  # [..., H, C, C], from the second token to the first one; 0 if it is later
    before: jax.Array  # [..., H, C, 1], from before the chunk
    left: jax.Array  # [..., H, C, 1], to the end of the chunk
    whole: jax.Array  # [..., H, 1, 1], of the chunk

    @classmethod
    def of(cls, log_decay: jax.Array) -> Decays:
        """Return the decays of f32[..., H, C].

        Each is exponentiated as a difference of sums, which is never positive.
        """
        total = jnp.cumsum(log_decay, axis=-1)
        gaps = total[..., :, None] - total[..., None, :]
        lower = jnp.broadcast_to(jnp.tril(jnp.ones(gaps.shape[-2:], bool)), gaps.shape)
        return cls(
            since=jnp.exp(jnp.where(lower, gaps, -jnp.inf)),
            before=jnp.exp(total)[..., None],
            left=jnp.exp(total[..., -1:] - total)[..., None],
            whole=jnp.exp(total[..., -1])[..., None, None],
        )


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)
