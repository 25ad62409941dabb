"""Counter-based Gumbel noise, a function of (seed, position, token) only.

It depends neither on the row nor on the step. A sample is therefore the same in every batch
composition, and verifying a token draws the same noise as decoding it.

One Threefry block (Salmon et al., SC'11) makes a 64-bit key from each row's seed and position. A
32-bit finalizer (Wellons' `lowbias32`), applied twice with the key mixed in, spreads it over the
vocabulary. Threefry over the whole vocabulary would cost about four times as much.

Other uses of noise have a purpose, whose noise is independent of the samples' and of every other
purpose's. Positions are below 2**31 and purposes are not, so their keys never coincide.
"""

import jax
import jax.numpy as jnp

ACCEPTANCE = 1 << 31  # purpose: accepting a draft
DRAFT = ACCEPTANCE + 1  # purpose: drafting; one more for each place in the draft


def row_keys(
    seed: jax.Array, position: jax.Array, purpose: int | jax.Array | None = None
) -> jax.Array:
    """Return keys u32[R, 2] for `seed: u32[R, 2]` and `position: i32[R]`; by default of samples."""
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
    """Return standard Gumbel noise.

    Args:
      seed: u32[R, 2], each row's 64-bit seed.
      position: i32[R], the absolute position of the token to be sampled.
      vocab_size: V.
      purpose: see the module's docstring.

    Returns:
      f32[R, V], finite, between about -2.8 and 16.6.
    """
    key = row_keys(seed, position, purpose)
    token = jnp.arange(vocab_size, dtype=jnp.uint32)[None, :]
    bits = _mix(token * jnp.uint32(0x9E3779B9) + key[:, :1])
    bits = _mix(bits ^ key[:, 1:])
    return -jnp.log(-jnp.log(_uniform(bits)))


def uniform(seed: jax.Array, position: jax.Array, purpose: int) -> jax.Array:
    """Return f32[R] between 0 and 1, exclusive; the arguments are those of `gumbel`."""
    return _uniform(row_keys(seed, position, purpose)[:, 0])


def _uniform(bits: jax.Array) -> jax.Array:
    # 23 bits plus a half are exact in float32, so the result is never 0 or 1.
    return ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
