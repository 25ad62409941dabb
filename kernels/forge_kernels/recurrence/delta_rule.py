"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464): one token, or a chunk of tokens.

Each token decays the state, then replaces the value that it returns for the token's key by a mix
with the token's value. Letters: see `rule.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.recurrence.rule import Decays, Heads, Rule, Tokens, product


def tokens(x: jax.Array, gates: jax.Array, heads: Heads) -> Tokens:
    """Split queries, keys and values, f32[..., C], and normalize queries and keys."""
    size, group = heads.keys * heads.key_dim, heads.values // heads.keys
    q, k, v = jnp.split(x, (size, 2 * size), axis=-1)
    q, k = (y.reshape(*y.shape[:-1], heads.keys, heads.key_dim) for y in (q, k))
    q, k = (y * lax.rsqrt((y * y).sum(axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    q, k = (jnp.repeat(y, group, axis=-2) for y in (q * heads.key_dim**-0.5, k))
    v = v.reshape(*v.shape[:-1], heads.values, heads.value_dim)
    return Tokens(q, k, v, gates[..., 0, :], gates[..., 1, :])


def one_token(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    state = state * jnp.exp(token.log_decay)[:, None, None]
    known = (state * token.k[:, :, None]).sum(axis=1)
    change = (token.v - known) * token.beta[:, None]
    state = state + token.k[:, :, None] * change[:, None, :]
    return state, (state * token.q[:, :, None]).sum(axis=1)


def one_chunk(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Apply C tokens.

    Each token's change of the state depends on those before it, which is a triangular system (the
    UT transform, section 3.2).
    """
    q, k, v = (jnp.moveaxis(x, -2, -3) for x in tokens[:3])  # [..., H, C, D]
    log_decay, beta = (jnp.moveaxis(x, -1, -2) for x in tokens[3:])  # [..., H, C]
    decays = Decays.of(log_decay)
    known = decays.before * product("...ck,...kv->...cv", k, state)
    system = beta[..., None] * decays.since * product("...ik,...jk->...ij", k, k)
    change = lax.linalg.triangular_solve(
        system, beta[..., None] * (v - known), left_side=True, lower=True, unit_diagonal=True
    )
    seen = decays.since * product("...ik,...jk->...ij", q, k)
    out = decays.before * product("...ck,...kv->...cv", q, state)
    out = out + product("...ij,...jv->...iv", seen, change)
    state = state * decays.whole + product("...ck,...cv->...kv", k * decays.left, change)
    return state, jnp.moveaxis(out, -3, -2)


DELTA_RULE = Rule(tokens, one_token, one_chunk)
