"""Counter-based Gumbel noise: a function of (seed, position, token) and of nothing else.

Neither the row of the batch nor the number of the step enters, so a sample does not depend on the
company it keeps, and a token that is verified draws the same noise as one that is decoded.

One Threefry block (Salmon et al., SC'11) makes a 64-bit key of each row's seed and position; a
32-bit finaliser (Wellons' `lowbias32`) applied twice with the key mixed in spreads it over the
vocabulary. Threefry over the whole vocabulary would cost about four times as much.

What else needs noise has a purpose, whose noise is independent of the samples' and of every other
purpose's. Positions are below 2**31 and purposes are not, so no two of them share a key.
"""

import jax
import jax.numpy as jnp

ACCEPTANCE = 1 << 31  # whether a draft is accepted
DRAFT = ACCEPTANCE + 1  # what is drafted; one more for each place in the draft


def row_keys(
    seed: jax.Array, position: jax.Array, purpose: int | jax.Array | None = None
) -> jax.Array:
    """`seed: u32[R, 2]`, `position: i32[R]` -> `u32[R, 2]`; without a purpose, of the samples."""
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    if purpose is not None:
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, jnp.uint32(purpose))
    folded = jax.vmap(jax.random.fold_in)(keys, position)
    return jax.random.key_data(folded)


def gumbel(
    seed: jax.Array,
    position: jax.Array,
    vocab_size: int,
    purpose: int | jax.Array | None = None,
) -> jax.Array:
    """Standard Gumbel noise.

    Args:
      seed: u32[R, 2], each row's 64-bit seed.
      position: i32[R], the absolute position of the token to be sampled.
      purpose: see above.

    Returns:
      f32[R, V], finite, between about -2.8 and 16.6.
    """
    key = row_keys(seed, position, purpose)
    token = jnp.arange(vocab_size, dtype=jnp.uint32)[None, :]
    bits = _mix(token * jnp.uint32(0x9E3779B9) + key[:, :1])
    bits = _mix(bits ^ key[:, 1:])
    return -jnp.log(-jnp.log(_uniform(bits)))


def uniform(seed: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """f32[R], above 0 and below 1; the arguments are those of `gumbel`."""
    return _uniform(row_keys(seed, position, purpose)[:, 0])


def _uniform(bits: jax.Array) -> jax.Array:
    # 23 bits and a half: exact in float32, so never 0 and never 1.
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
