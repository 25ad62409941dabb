"""Mixtures of experts in plain XLA: in tiles of rows that have one expert, or all by all."""

import jax
import jax.numpy as jnp
from jax import lax


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: few, where experts have few; at least two, for XLA:CPU is slow at one."""
    if rows >= 32 * experts:
        return 64
    return min(16, max(2, rows))


def tiled_experts(
    x: jax.Array,  # float[T, d]
    gate_up: jax.Array,  # float[E, 2 I, d]
    down: jax.Array,  # float[E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array,  # i32[]
) -> jax.Array:  # [T, d] of x's type
    """Rows sorted by expert and cut into tiles of one expert each; a loop over those there are.

    Every tile is a product of the same shape, so a row's bits do not depend on where it lies.
    """
    (T, k), count = experts.shape, len(gate_up)
    rows, size = T * k, tile_rows(T * k, count)
    exists = jnp.arange(T)[:, None] < num_rows
    chosen = jnp.where(exists, experts, count).reshape(-1)  # those of no expert come last
    # One sort of single integers: the expert, and below it the place.
    order = jnp.sort(chosen * rows + jnp.arange(rows, dtype=jnp.int32)) % rows
    counts = jnp.sum(chosen[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
    begin, tiles = jnp.cumsum(counts) - counts, -(-counts // size)
    tiles_end = jnp.cumsum(tiles)
    flat_weights = weights.reshape(-1)

    def add_tile(tile: jax.Array, y: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(tiles_end, tile, side="right")
        of_expert = (tile - (tiles_end[expert] - tiles[expert])) * size + jnp.arange(size)
        place = order[jnp.minimum(begin[expert] + of_expert, rows - 1)]
        tokens = place // k
        part = lax.dynamic_index_in_dim(gate_up, expert, keepdims=False)
        inner = _swiglu(_product(_rows(x, tokens), part)).astype(x.dtype)
        out = _product(inner, lax.dynamic_index_in_dim(down, expert, keepdims=False))
        out = out * flat_weights[place][:, None]
        return y.at[jnp.where(of_expert < counts[expert], tokens, T)].add(out, mode="drop")

    y = lax.fori_loop(0, tiles_end[-1], add_tile, jnp.zeros(x.shape, jnp.float32))
    return y.astype(x.dtype)


def all_experts(
    x: jax.Array,  # float[T, d]
    gate_up: jax.Array,  # float[E, 2 I, d]
    down: jax.Array,  # float[E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array,  # i32[]
) -> jax.Array:  # [T, d] of x's type
    """Every expert computes every row, in two products without a loop; the chosen are added up."""
    del num_rows
    count, width, d = gate_up.shape
    is_chosen = experts[:, :, None] == jnp.arange(count)  # [T, k, E]
    weight = jnp.sum(jnp.where(is_chosen, weights[:, :, None], 0.0), axis=1).T[:, :, None]
    chosen = jnp.any(is_chosen, axis=1).T[:, :, None]  # [E, T, 1]
    both = lax.dot_general(
        x, gate_up.reshape(-1, d), (((1,), (1,)), ((), ())), preferred_element_type=x.dtype
    )
    inner = _swiglu(both.reshape(len(x), count, width)).swapaxes(0, 1)  # [E, T, I]
    out = lax.dot_general(
        inner, down, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return jnp.sum(jnp.where(chosen, weight * out, 0.0), axis=0).astype(x.dtype)


def _rows(x: jax.Array, at: jax.Array) -> jax.Array:
    """x[at]; 16-bit floats as their bits, for XLA:CPU would convert all of x."""
    if x.dtype.itemsize != 2:
        return x[at]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16)[at], x.dtype)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """float[T, K], float[N, K] -> f32[T, N]: the form that XLA:CPU is fast at."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _swiglu(both: jax.Array) -> jax.Array:
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up
