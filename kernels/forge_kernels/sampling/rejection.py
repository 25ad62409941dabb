"""Rejection sampling of drafts: the output's distribution is the target's, whatever was drafted.

A draft x that was drawn from q is accepted with probability min(1, p(x) / q(x)); else the token is
sampled from what is left of the target's p, max(p - q, 0) over its sum (Leviathan, Kalman and
Matias 2023, arXiv:2211.17192, section 2.3; Chen et al. 2023, arXiv:2302.01318, theorem 1). That
holds for any q as long as nothing that decides here knows more of the draft's noise than x, and
whether to verify x was settled before x was drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from forge_kernels.sampling.noise import ACCEPTANCE, uniform


class Drafts(NamedTuple):
    """What rows verify: a token each, and the distribution q that it was drawn from."""

    token: jax.Array  # i32[R]
    verified: jax.Array  # bool[R]: which rows verify theirs
    token_ids: jax.Array  # i32[R, K]: those that q can give, each once; past the vocabulary: none
    probability: jax.Array  # f32[R, K]: q of each, adding up to 1


def certain(token: jax.Array, verified: jax.Array) -> Drafts:
    """Drafts that follow from the text: q is 1 for the token, `i32[R]`."""
    return Drafts(token, verified, token[:, None], jnp.ones((*token.shape, 1), jnp.float32))


@jax.named_scope("verify")
def verify(
    scaled: jax.Array,
    noisy: jax.Array,
    drafts: Drafts,
    seed: jax.Array,
    position: jax.Array,
) -> jax.Array:
    """The draft where it is accepted, another token where it is not; rows without one sample.

    Only the tokens that q can give are touched: Gumbel noise plus log p chooses from p, and with
    log(1 - q / p) added, from p - q.

    Args:
      scaled: f32[R, V], logits over temperature.
      noisy: f32[R, V], the same with the position's Gumbel noise; -inf where filters forbid.
      seed: u32[R, 2]; position: i32[R].

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
    noisy = noisy.at[row, ids].add(change, mode="drop")
    # Where p and q are the same but for rounding, nothing may be left.
    accepted |= ~(noisy.max(axis=1) > -jnp.inf)
    token = jnp.argmax(noisy, axis=1).astype(jnp.int32)
    return jnp.where(drafts.verified & accepted, drafts.token, token)


def _log_part_left(p: jax.Array, q: jax.Array) -> jax.Array:
    """log((p - q) / p), and -inf where nothing of p is left."""
    left = p > q
    return jnp.where(left, jnp.log1p(-q / jnp.where(left, p, 1.0)), -jnp.inf)
