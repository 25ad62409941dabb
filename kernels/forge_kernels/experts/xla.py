"""Mixtures of experts in plain XLA: in tiles of rows that have one expert, or all by all.

Matrices in 8 or 4 bits become floats where they are multiplied: of one expert, or of some.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.linear.quantized import (
    QuantizedWeight,
    expert_product,
    products_by_expert,
)

Matrices = jax.Array | QuantizedWeight  # [E, N, K]
CHUNK_BYTES = 256 * 2**20  # of floats that are made of 8 or 4 bits at a time, or one expert's


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: few, where experts have few; at least two, for XLA:CPU is slow at one."""
    if rows >= 32 * experts:
        return 64
    return min(16, max(2, rows))


def tiled_experts(
    x: jax.Array,  # float[T, d]
    gate_up: Matrices,  # float[E, 2 I, d]
    down: Matrices,  # float[E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array,  # i32[]
    order: jax.Array | None = None,  # i32[E, d]
) -> jax.Array:  # [T, d] of x's type
    """Rows sorted by expert and cut into tiles of one expert each; a loop over those there are.

    Every tile is a product of the same shape, so a row's bits do not depend on where it lies.
    """
    (T, k), count = experts.shape, num_experts(gate_up)
    rows, size = T * k, tile_rows(T * k, count)
    exists = jnp.arange(T)[:, None] < num_rows
    chosen = jnp.where(exists, experts, count).reshape(-1)  # those of no expert come last
    # One sort of single integers: the expert, and below it the place.
    by_expert = jnp.sort(chosen * rows + jnp.arange(rows, dtype=jnp.int32)) % rows
    counts = jnp.sum(chosen[:, None] == jnp.arange(count)[None], axis=0, dtype=jnp.int32)
    begin, tiles = jnp.cumsum(counts) - counts, -(-counts // size)
    tiles_end = jnp.cumsum(tiles)
    flat_weights = weights.reshape(-1)

    def add_tile(tile: jax.Array, y: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(tiles_end, tile, side="right")
        of_expert = (tile - (tiles_end[expert] - tiles[expert])) * size + jnp.arange(size)
        place = by_expert[jnp.minimum(begin[expert] + of_expert, rows - 1)]
        tokens = place // k
        taken = _at(x, tokens)
        if order is not None:
            taken = _at(taken, (slice(None), order[expert]))
        inner = _swiglu(_of_expert(taken, gate_up, expert)).astype(x.dtype)
        out = _of_expert(inner, down, expert)
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
    is_chosen = experts[:, :, None] == jnp.arange(count)[None, None]  # [T, k, E]
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


def experts_by_chunks(
    x: jax.Array,  # float[T, d]
    gate_up: Matrices,  # [E, 2 I, d]
    down: Matrices,  # [E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array | None,  # i32[]
    order: jax.Array | None = None,  # i32[E, d]
) -> jax.Array:  # [T, d] of x's type
    """The same with matrices in 8 or 4 bits: floats are made of as many experts at a time.

    Without a loop, which would divide the step of a GPU into several command buffers.
    """
    del num_rows
    count = num_experts(gate_up)
    largest = max(math.prod(_shape(each)[1:]) for each in (gate_up, down)) * x.dtype.itemsize
    step = chunk_of(count, largest)
    y = jnp.zeros(x.shape, jnp.float32)
    for first in range(0, count, step):
        if first:  # the floats of one chunk are gone before those of the next are made
            gate_up, down, y = lax.optimization_barrier((gate_up, down, y))
        up, then = (_some(each, first, step) for each in (gate_up, down))
        rows = x
        if order is not None:
            rows = x[:, order[first : first + step]].swapaxes(0, 1)
        inner = _swiglu(_by_expert(rows, up)).astype(x.dtype)  # [C, T, I]
        out = _by_expert(inner, then)  # f32[C, T, d]
        number = first + jnp.arange(step)[:, None, None]
        is_chosen = experts[None] == number  # [C, T, k]
        weight = jnp.sum(jnp.where(is_chosen, weights[None], 0.0), axis=-1)  # [C, T]
        chosen = jnp.any(is_chosen, axis=-1)
        y = y + jnp.sum(jnp.where(chosen[..., None], weight[..., None] * out, 0.0), axis=0)
    return y.astype(x.dtype)


def chunk_of(count: int, one_bytes: int) -> int:
    """Experts of a chunk: as many as divide all of them, and fit into CHUNK_BYTES."""
    most = max(1, CHUNK_BYTES // one_bytes)
    return next(n for n in range(min(most, count), 0, -1) if count % n == 0)


def num_experts(w: Matrices) -> int:
    return _shape(w)[0]


def _shape(w: Matrices) -> tuple[int, int, int]:
    if not isinstance(w, QuantizedWeight):
        count, outputs, inputs = w.shape
        return count, outputs, inputs
    quantization = w.quantization
    assert quantization.experts is not None
    return quantization.experts, quantization.outputs, quantization.inputs


def _of_expert(x: jax.Array, w: Matrices, expert: jax.Array) -> jax.Array:
    """float[T, K] -> f32[T, N]."""
    if isinstance(w, QuantizedWeight):
        return expert_product(x, w, expert)
    return _product(x, lax.dynamic_index_in_dim(w, expert, keepdims=False))


def _by_expert(x: jax.Array, w: Matrices) -> jax.Array:
    """float[T, K], or of each float[C, T, K] -> f32[C, T, N]."""
    if isinstance(w, QuantizedWeight):
        return products_by_expert(x, w)
    return jax.vmap(_product, in_axes=(None if x.ndim == 2 else 0, 0))(x, w)


def _some(w: Matrices, first: int, count: int) -> Matrices:
    """`count` experts from the number `first` on."""
    if not isinstance(w, QuantizedWeight):
        return w[first : first + count]
    some = jax.tree.map(lambda array: array[first : first + count], w)
    quantization = dataclasses.replace(w.quantization, experts=count)
    return dataclasses.replace(some, quantization=quantization)


def _at(x: jax.Array, index: Any) -> jax.Array:
    """x[index]; 16-bit floats as their bits, for XLA:CPU would convert all of x."""
    if x.dtype.itemsize != 2:
        return x[index]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16)[index], x.dtype)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """float[T, K], float[N, K] -> f32[T, N]: the form that XLA:CPU is fast at."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _swiglu(both: jax.Array) -> jax.Array:
    gate, up = jnp.split(both, 2, axis=-1)
    return jax.nn.silu(gate) * up
