"""A search over the bits of floats instead of a sort, row by row.

Comparing a row with a threshold and summing takes one pass over it. The CPU form settles one bit
per pass in a loop, because arithmetic dominates there. The other form is unrolled, because a loop
would split a step's command buffer, and settles `DIGIT` bits per pass. It computes as many sums as
there are thresholds in one reduction, which reads the row once.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

DIGIT = 3  # bits; with more, a GPU's arithmetic takes longer than its reads


def order_key(x: jax.Array) -> jax.Array:
    """Return u32 that compare in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31, ~bits, bits | jnp.uint32(0x80000000))


def from_order_key(key: jax.Array) -> jax.Array:
    """Invert `order_key`; 0, which is below all floats, gives -inf."""
    bits = jnp.where(key >> 31, key & jnp.uint32(0x7FFFFFFF), ~key)
    x = lax.bitcast_convert_type(bits, jnp.float32)
    return jnp.where(key == 0, -jnp.inf, x)


def largest_key(key: jax.Array, weight: jax.Array, wanted: jax.Array) -> jax.Array:
    """Return the largest threshold at which enough of a row is left.

    Args:
      key: u32[R, V].
      weight: i32 or f32, [R, V] or [1, 1]; not negative.
      wanted: [R] of weight's type.

    Returns:
      u32[R], the largest t such that the `weight` of `key >= t` add up to `wanted`; 0 if none does.
    """
    return lax.platform_dependent(key, weight, wanted, cpu=by_bits, default=by_digits)


def by_bits(key: jax.Array, weight: jax.Array, wanted: jax.Array) -> jax.Array:
    """Compute `largest_key` in a loop of 32 passes."""

    def settle(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        kept = jnp.where(key >= candidate[:, None], weight, jnp.zeros((), weight.dtype))
        return jnp.where(kept.sum(axis=1, dtype=weight.dtype) >= wanted, candidate, found)

    return lax.fori_loop(0, 32, settle, jnp.zeros(key.shape[:1], jnp.uint32))


def by_digits(key: jax.Array, weight: jax.Array, wanted: jax.Array) -> jax.Array:
    """Compute `largest_key` without a loop, `DIGIT` bits per pass."""
    # lax rather than jnp, because this is traced for every executable and costs as much as ten
    # layers.
    weight = jnp.broadcast_to(weight, key.shape)
    zero, zeros = weight.dtype.type(0), jnp.zeros(key.shape, weight.dtype)
    found = jnp.zeros(key.shape[:1], jnp.uint32)
    low = 32
    while low > 0:
        width = min(DIGIT, low)
        low -= width
        kept = []
        for digit in range(1, 1 << width):
            candidate = lax.bitwise_or(found, lax.full_like(found, digit << low))
            above = lax.ge(key, lax.broadcast_in_dim(candidate, key.shape, (0,)))
            kept.append(lax.select(above, weight, zeros))
        sums = lax.reduce(tuple(kept), (zero,) * len(kept), _add, (1,))
        # If a threshold holds, all lower ones do, so the number that hold is the digit.
        held = [lax.convert_element_type(lax.ge(s, wanted), jnp.uint32) for s in sums]
        digit = functools.reduce(lax.add, held)
        found = lax.bitwise_or(found, lax.shift_left(digit, lax.full_like(digit, low)))
    return found


def _add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(map(lax.add, a, b))
