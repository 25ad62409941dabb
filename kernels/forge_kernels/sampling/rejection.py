"""Rejection sampling of drafts: the output's distribution is the target's, whatever was drafted.

A draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)). If it is rejected,
the token is sampled from the rest of the target's p, which is max(p - q, 0) over its sum. Sources:
Leviathan, Kalman and Matias 2023, arXiv:2211.17192, section 2.3; Chen et al. 2023,
arXiv:2302.01318, theorem 1.

This holds for any q under two conditions. The decision may depend on the draft's noise only through
x, and the decision to verify x must be made before x is drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from forge_kernels.sampling.noise import ACCEPTANCE, uniform


class Drafts(NamedTuple):
    """The tokens that rows verify, and the distribution q that each was drawn from."""

    token: jax.Array  # i32[R]
    verified: jax.Array  # bool[R], true for rows that verify
    token_ids: jax.Array  # i32[R, K], the tokens of q, each once; beyond the vocabulary: none
    probability: jax.Array  # f32[R, K], q of each token, with a sum of 1


def certain(token: jax.Array, verified: jax.Array) -> Drafts:
    """Return drafts that follow from the text: q is 1 for the token, `i32[R]`."""
    return Drafts(token, verified, token[:, None], jnp.ones((*token.shape, 1), jnp.float32))


@jax.named_scope("verify")
def verify(
    scaled: jax.Array,
    noisy: jax.Array,
    drafts: Drafts,
    seed: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """Return the draft if it is accepted, else another token; rows without a draft are sampled.

    Only the tokens of q change: Gumbel noise plus log p samples from p, and with log(1 - q / p)
    added, from p - q.

    Args:
      scaled: f32[R, V], logits over temperature.
      noisy: f32[R, V], the same with the position's Gumbel noise; -inf for filtered tokens.
      drafts: the drafts.
      seed: u32[R, 2].
      position: i32[R].

    Returns:
      i32[R].
    """
    ids, q = drafts.token_ids, drafts.probability
    row = jnp.arange(scaled.shape[0])[:, None]
    kept = jnp.where(noisy > -jnp.inf, scaled, -jnp.inf)
    log_z = jax.nn.logsumexp(kept, axis=1, keepdims=True)
    p = jnp.exp(kept.at[row, ids].get(mode="fill", fill_value=-jnp.inf) - log_z)  # [R, K]

    is_draft = ids == drafts.token[:, None]
    p_draft = jnp.where(is_draft, p, 0.0).sum(axis=1)
    q_draft = jnp.where(is_draft, q, 0.0).sum(axis=1)
    accepted = uniform(seed, position, ACCEPTANCE) * q_draft < p_draft

    change = jnp.where(drafts.verified[:, None], _log_part_left(p, q), 0.0)
    noisy = noisy.at[row, ids].add(change, mode="drop", unique_indices=True)
    # If p and q are equal except for rounding, nothing may be left.
    accepted |= ~(noisy.max(axis=1) > -jnp.inf)
    token = jnp.argmax(noisy, axis=1).astype(jnp.int32)
    return jnp.where(drafts.verified & accepted, drafts.token, token)


def _log_part_left(p: jax.Array, q: jax.Array) -> jax.Array:
    """Return log((p - q) / p), or -inf if nothing of p is left."""
    left = p > q
    return jnp.where(left, jnp.log1p(-q / jnp.where(left, p, 1.0)), -jnp.inf)
