"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): one token, or a chunk of tokens.

A head's state maps keys to values: f32[Dk, Dv]. Each token decays it, then replaces the value that
it returns for the token's key by a mix with the token's value.

Letters: C tokens of a chunk, H value heads, Dk and Dv dims of keys and values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Tokens(NamedTuple):
    """The inputs of the recurrence, in float32. The leading axes are the same in all arrays."""

    q: jax.Array  # [..., H, Dk], normalized and scaled
    k: jax.Array  # [..., H, Dk], normalized
    v: jax.Array  # [..., H, Dv]
    log_decay: jax.Array  # [..., H], at most 0
    beta: jax.Array  # [..., H], from 0 to 1: the share of the new value

    def masked(self, valid: jax.Array) -> Tokens:
        """Return the tokens with zeros where `valid` (bool[...]) is False: they change nothing."""

        def kept(x: jax.Array) -> jax.Array:
            at = valid.reshape(*valid.shape, *(1,) * (x.ndim - valid.ndim))
            return jnp.where(at, x, 0.0)

        return Tokens(*map(kept, self))


def one_token(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    """Return (state, output) after one token.

    Args:
      state: f32[H, Dk, Dv].
      token: no leading axes.

    Returns:
      The state, and f32[H, Dv].
    """
    state = state * jnp.exp(token.log_decay)[:, None, None]
    known = (state * token.k[:, :, None]).sum(axis=1)
    change = (token.v - known) * token.beta[:, None]
    state = state + token.k[:, :, None] * change[:, None, :]
    return state, (state * token.q[:, :, None]).sum(axis=1)


def one_chunk(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Return (state, outputs) after C tokens, computed as matrix products.

    Each token's change of the state depends on those before it, which is a triangular system (the
    UT transform, section 3.2). The decay of each pair of tokens is exponentiated as a difference
    of sums, which is never positive.

    Args:
      state: f32[..., H, Dk, Dv].
      tokens: the leading axes of `state`, then C.

    Returns:
      The state, and f32[..., C, H, Dv].
    """
    q, k, v = (jnp.moveaxis(x, -2, -3) for x in tokens[:3])  # [..., H, C, D]
    decay, beta = (jnp.moveaxis(x, -1, -2) for x in tokens[3:])  # [..., H, C]
    total = jnp.cumsum(decay, axis=-1)
    gaps = total[..., :, None] - total[..., None, :]
    lower = jnp.broadcast_to(jnp.tril(jnp.ones(gaps.shape[-2:], bool)), gaps.shape)
    since = jnp.exp(jnp.where(lower, gaps, -jnp.inf))  # of each pair, [..., H, C, C]
    before = jnp.exp(total)[..., None]
    known = before * _product("...ck,...kv->...cv", k, state)
    system = beta[..., None] * since * _product("...ik,...jk->...ij", k, k)
    change = lax.linalg.triangular_solve(
        system, beta[..., None] * (v - known), left_side=True, lower=True, unit_diagonal=True
    )
    seen = since * _product("...ik,...jk->...ij", q, k)
    out = before * _product("...ck,...kv->...cv", q, state)
    out = out + _product("...ij,...jv->...iv", seen, change)
    left = jnp.exp(total[..., -1:] - total)[..., None]
    state = state * jnp.exp(total[..., -1])[..., None, None]
    state = state + _product("...ck,...cv->...kv", k * left, change)
    return state, jnp.moveaxis(out, -3, -2)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, a, b, precision=lax.Precision.HIGHEST)
