"""Counter-based Gumbel noise: a function of (seed, position, token) and of nothing else.

Neither the row of the batch nor the number of the step enters, so a sample does not depend on the
company it keeps, and a token that is verified draws the same noise as one that is decoded.

One Threefry block (Salmon et al., SC'11) makes a 64-bit key of each row's seed and position; a
32-bit finaliser (Wellons' `lowbias32`) applied twice with the key mixed in spreads it over the
vocabulary. Threefry over the whole vocabulary would cost about four times as much.
"""

import jax
import jax.numpy as jnp


def row_keys(seed: jax.Array, position: jax.Array) -> jax.Array:
    """`seed: u32[R, 2]`, `position: i32[R]` -> `u32[R, 2]`."""
    keys = jax.random.wrap_key_data(seed, impl="threefry2x32")
    folded = jax.vmap(jax.random.fold_in)(keys, position)
    return jax.random.key_data(folded)


def gumbel(seed: jax.Array, position: jax.Array, vocab_size: int) -> jax.Array:
    """Standard Gumbel noise.

    Args:
      seed: u32[R, 2], each row's 64-bit seed.
      position: i32[R], the absolute position of the token to be sampled.

    Returns:
      f32[R, V], finite, between about -2.8 and 16.6.
    """
    key = row_keys(seed, position)
    token = jnp.arange(vocab_size, dtype=jnp.uint32)[None, :]
    bits = _mix(token * jnp.uint32(0x9E3779B9) + key[:, :1])
    bits = _mix(bits ^ key[:, 1:])
    # 23 bits and a half: exact in float32, so never 0 and never 1.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return -jnp.log(-jnp.log(uniform))


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
