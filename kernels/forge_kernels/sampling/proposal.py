"""Drawing drafts for rejection sampling, from a distribution that is small enough to be kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from forge_kernels.sampling.api import filter_threshold, likeliest, where_needed
from forge_kernels.sampling.noise import DRAFT, gumbel


class Proposal(NamedTuple):
    """One token per row, and what it was drawn from, see `Drafts`."""

    token: jax.Array  # i32[R]
    token_ids: jax.Array  # i32[R, K], the likeliest first
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
    """Samples from the `support` likeliest tokens alone, after the row's temperature and filters.

    The noise is independent of the target's, and of what was drafted when less of the sequence was
    known: how many drafts are verified may depend on all of that. A row whose logits are not finite
    is as if its token had been certain, which is right for any token.

    Args:
      logits: f32[R, V].
      temperature, top_p, min_p: f32[R]; top_k: i32[R].
      seed: u32[R, 2].
      known: i32[R], position of the last known token of the row's sequence.
      ahead: i32[], drafts between it and this one.
      any_filter: bool[], false where no row filters.

    Returns:
      K is `support`, or the vocabulary where that is smaller.
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
    first = jnp.arange(ids.shape[1]) == 0
    only = jnp.where(first, token[:, None], vocab_size)
    return Proposal(
        token, jnp.where(sound, ids, only), jnp.where(sound, probability, first.astype(jnp.float32))
    )
