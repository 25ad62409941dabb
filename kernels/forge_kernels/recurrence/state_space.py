"""Mamba-2's state space model (Dao and Gu 2024, arXiv:2405.21060): one token, or a chunk of tokens.

Each token decays the state and adds its value at its key. In the paper's letters, the key is B, the
query is C, and the value is x. Beta is the time step, and the log decay is the time step times A.

Letters: see `rule.py`; G key heads, each for R value heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from forge_kernels.recurrence.rule import Decays, Heads, Rule, Tokens, product


def tokens(x: jax.Array, gates: jax.Array, heads: Heads) -> Tokens:
    """Split values, keys and queries, f32[..., C]. Queries and keys keep their G heads."""
    inner, size = heads.values * heads.value_dim, heads.keys * heads.key_dim
    v, k, q = jnp.split(x, (inner, inner + size), axis=-1)
    q, k = (y.reshape(*y.shape[:-1], heads.keys, heads.key_dim) for y in (q, k))
    v = v.reshape(*v.shape[:-1], heads.values, heads.value_dim)
    return Tokens(q, k, v, gates[..., 0, :], gates[..., 1, :])


def one_token(state: jax.Array, token: Tokens) -> tuple[jax.Array, jax.Array]:
    group = len(state) // len(token.k)
    q, k = (jnp.repeat(y, group, axis=0) for y in (token.q, token.k))
    change = token.v * token.beta[:, None]
    state = state * jnp.exp(token.log_decay)[:, None, None]
    state = state + k[:, :, None] * change[:, None, :]
    return state, (state * q[:, :, None]).sum(axis=1)


def one_chunk(state: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    """Apply C tokens. Products of queries and keys are computed once for a group's value heads."""
    q, k, v = (jnp.moveaxis(x, -2, -3) for x in tokens[:3])  # [..., G or H, C, D]
    log_decay, beta = (jnp.moveaxis(x, -1, -2) for x in tokens[3:])  # [..., H, C]
    decays, change = Decays.of(log_decay), v * beta[..., None]

    def grouped(x: jax.Array) -> jax.Array:  # [..., G, R, :, :]
        return x.reshape(*x.shape[:-3], k.shape[-3], -1, *x.shape[-2:])

    def ungrouped(x: jax.Array) -> jax.Array:  # [..., H, :, :]
        return x.reshape(*x.shape[:-4], -1, *x.shape[-2:])

    seen = grouped(decays.since) * product("...ik,...jk->...ij", q, k)[..., None, :, :]
    out = grouped(decays.before) * product("...gck,...grkv->...grcv", q, grouped(state))
    out = ungrouped(out + product("...ij,...jv->...iv", seen, grouped(change)))
    added = product("...gck,...grcv->...grkv", k, grouped(change * decays.left))
    return state * decays.whole + ungrouped(added), jnp.moveaxis(out, -3, -2)


STATE_SPACE = Rule(tokens, one_token, one_chunk)
