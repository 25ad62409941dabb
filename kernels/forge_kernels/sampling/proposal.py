"""Drafts for rejection sampling, drawn from a distribution small enough to be stored."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from forge_kernels.sampling.api import filter_threshold, likeliest, where_needed
from forge_kernels.sampling.noise import DRAFT, gumbel


class Proposal(NamedTuple):
    """One token per row, and the distribution that it was drawn from, see `Drafts`."""

    token: jax.Array  # i32[R]
    token_ids: jax.Array  # i32[R, K], the most likely first
    probability: jax.Array  # f32[R, K]


@jax.named_scope("propose")
def propose(
    logits: jax.Array,
    *,
    support: int,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    seed: jax.Array,
    known: jax.Array,
    ahead: jax.Array,
    any_filter: jax.Array | bool = True,
) -> Proposal:
    """Sample from the `support` most likely tokens, after the row's temperature and filters.

    The noise is independent of the target's and of earlier drafts of the same positions. The number
    of drafts to verify may depend on these. If a row's logits are not finite, its token counts as
    certain, which is correct for any token.

    Args:
      logits: f32[R, V].
      support: the number of tokens to sample from.
      temperature, top_p, min_p: f32[R]
      top_k: i32[R].
      seed: u32[R, 2].
      known: i32[R], position of the last known token of the row's sequence.
      ahead: i32[], drafts between it and this one.
      any_filter: bool[], false if no row filters.

    Returns:
      The drafts, with K the smaller of `support` and the vocabulary.
    """
    vocab_size = logits.shape[1]
    top, ids = likeliest(logits, min(support, vocab_size))
    random = (temperature > 0)[:, None]
    scaled = top / jnp.where(random, temperature[:, None], 1.0)

    def threshold() -> jax.Array:
        return filter_threshold(scaled, top_k=top_k, top_p=top_p, min_p=min_p)

    no_threshold = jnp.full(scaled.shape[:1], -jnp.inf, jnp.float32)
    lowest = where_needed(any_filter, threshold, no_threshold)
    scaled = jnp.where(scaled >= lowest[:, None], scaled, -jnp.inf)
    probability = jax.nn.softmax(scaled, axis=1)
    purpose = jnp.uint32(DRAFT) + ahead.astype(jnp.uint32)
    noise = gumbel(seed, known, scaled.shape[1], purpose)
    place = jnp.argmax(jnp.where(random, scaled + noise, scaled), axis=1)
    token = jnp.take_along_axis(ids, place[:, None], axis=1)[:, 0]

    sound = (jnp.isfinite(probability).all(axis=1) & (token < vocab_size))[:, None]
    token = jnp.clip(token, 0, vocab_size - 1)
    first = (jnp.arange(ids.shape[1]) == 0)[None]
    only = jnp.where(first, token[:, None], vocab_size)
    return Proposal(
        token, jnp.where(sound, ids, only), jnp.where(sound, probability, first.astype(jnp.float32))
    )
