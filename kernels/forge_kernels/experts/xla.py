"""Mixtures of experts in plain XLA.

There are three forms: tiles of rows with one expert, one product per row and expert, and all
experts for all rows. Matrices in 8 or 4 bits are converted to floats where they are multiplied. For
many rows, the last form converts a few experts at a time.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.experts.activations import swiglu
from forge_kernels.linear.quantized import (
    QuantizedWeight,
    expert_product,
    products_by_expert,
    products_by_pair,
)

Matrices = jax.Array | QuantizedWeight  # [E, N, K]
Biases = tuple[jax.Array, jax.Array]  # gates and ups: float[E, 2 I], down: float[E, d]
Activation = Callable[[jax.Array], jax.Array]  # [..., 2 I] -> [..., I]
PAIRS_PER_EXPERT = 0.25  # few pairs of a token and an expert
CHUNK_BYTES = 256 * 2**20  # floats made from 8 or 4 bits at once, or one expert's if larger
FUSED_BYTES = 128 * 2**20  # float32 results of all experts, for products of 8 or 4 bits


def tile_rows(rows: int, experts: int) -> int:
    """Return the rows per tile: few if experts have few; at least 2, because 1 is slow on CPUs."""
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
    biases: Biases | None = None,
    *,
    activation: Activation = swiglu,
    total: int | None = None,
) -> jax.Array:  # [T, d] of x's type
    """Compute rows sorted by expert, in tiles of one expert each, in a loop over existing tiles.

    Every tile is a product of the same shape, so a row's bits do not depend on its place.
    """
    (T, k), count = experts.shape, num_experts(gate_up)
    rows, size = T * k, tile_rows(T * k, total or count)
    exists = jnp.arange(T)[:, None] < num_rows
    chosen = jnp.where(exists, experts, count).reshape(-1)  # rows without an expert sort last
    # One sort of single integers, with the expert in the high part and the place in the low part.
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
        both = _of_expert(taken, gate_up, expert)
        if biases is not None:
            both = both + biases[0][expert][None]
        out = _of_expert(activation(both).astype(x.dtype), down, expert)
        if biases is not None:
            out = out + biases[1][expert][None]
        out = out * flat_weights[place][:, None]
        to = jnp.where(of_expert < counts[expert], tokens, T)
        return y.at[to].add(out, mode="drop", unique_indices=True)

    y = lax.fori_loop(0, tiles_end[-1], add_tile, jnp.zeros(x.shape, jnp.float32))
    return y.astype(x.dtype)


def few_pairs(pairs: int, w: Matrices) -> bool:
    """Return True if few pairs have the same expert.

    Tokens that choose experts at random choose at least 7/8 as many different experts as pairs.
    """
    return pairs <= PAIRS_PER_EXPERT * num_experts(w)


def experts_by_pair(
    x: jax.Array,  # float[T, d]
    gate_up: Matrices,  # [E, 2 I, d]
    down: Matrices,  # [E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array,  # i32[]
    order: jax.Array | None = None,  # i32[E, d]
    biases: Biases | None = None,
    *,
    activation: Activation = swiglu,
    shared: bool = False,  # True if other devices have the experts from E on
) -> jax.Array:  # [T, d] of x's type
    """Multiply each token by the matrices of its experts, for GPUs and at most E pairs.

    XLA:GPU compiles each product to one reduction that reads these matrices and no others. Unless
    there are few pairs, pairs of the same expert are consecutive. The first pair reads the matrices
    from memory, and the other pairs should find them in the L2 cache.
    """
    tokens, k = experts.shape
    # Rows that the caller ignores read the matrices of the first row again.
    exists = jnp.arange(tokens)[:, None] < num_rows
    chosen = jnp.where(exists, experts, experts[:1]).reshape(-1)
    own = (chosen < num_experts(gate_up)).reshape(tokens, k, 1)
    if shared:  # pairs of other devices read matrices that this step reads anyway
        least = jnp.minimum(jnp.min(chosen), num_experts(gate_up) - 1)
        chosen = jnp.where(own.reshape(-1), chosen, least)
    place = None
    if few_pairs(tokens * k, gate_up):
        rows = jnp.repeat(x, k, axis=0)
    else:
        chosen, place, pair = _by_expert_number(chosen)
        rows = x.at[pair // k].get(mode="clip")
    if order is not None:
        rows = jnp.take_along_axis(rows, order[chosen], axis=1)
    both = _by_pair(rows, gate_up, chosen)
    if biases is not None:
        both = both + biases[0][chosen]
    out = _by_pair(activation(both).astype(x.dtype), down, chosen)
    if biases is not None:
        out = out + biases[1][chosen]
    out = out if place is None else out.at[place].get(mode="clip")
    out = out.reshape(tokens, k, -1) * weights[:, :, None]
    if shared:
        out = jnp.where(own, out, 0.0)
    return jnp.sum(out, axis=1).astype(x.dtype)


def _by_expert_number(chosen: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort pairs by their experts, i32[R], without a sort or a loop, for GPUs.

    Returns:
      (the sorted experts i32[R], place u32[R] of each pair, pair u32[R] at each place).
    """
    number = jnp.arange(len(chosen), dtype=jnp.uint32)  # without a sign, because XLA wraps negative
    other, its_number = chosen[None], number[None]
    is_before = (other < chosen[:, None]) | (
        (other == chosen[:, None]) & (its_number < number[:, None])
    )
    place = jnp.sum(is_before, axis=1, dtype=jnp.uint32)
    pair = jnp.zeros_like(place).at[place].set(number, mode="drop", unique_indices=True)
    # Without the barrier, XLA sorts again in each kernel that uses the result.
    return lax.optimization_barrier((chosen.at[pair].get(mode="clip"), place, pair))


def all_experts(
    x: jax.Array,  # float[T, d]
    gate_up: jax.Array,  # float[E, 2 I, d]
    down: jax.Array,  # float[E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array,  # i32[]
    order: None = None,  # only quantized matrices have one
    biases: Biases | None = None,
    *,
    activation: Activation = swiglu,
) -> jax.Array:  # [T, d] of x's type
    """Compute every row with every expert, in two products without a loop, and add the chosen."""
    del num_rows, order
    count, width, d = gate_up.shape
    is_chosen = experts[:, :, None] == jnp.arange(count)[None, None]  # [T, k, E]
    weight = jnp.sum(jnp.where(is_chosen, weights[:, :, None], 0.0), axis=1).T[:, :, None]
    chosen = jnp.any(is_chosen, axis=1).T[:, :, None]  # [E, T, 1]
    both = lax.dot_general(
        x, gate_up.reshape(-1, d), (((1,), (1,)), ((), ())), preferred_element_type=x.dtype
    )
    both = both.reshape(len(x), count, width)
    if biases is not None:
        both = both + biases[0][None].astype(x.dtype)
    inner = activation(both).swapaxes(0, 1)  # [E, T, I]
    out = lax.dot_general(
        inner, down, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    if biases is not None:
        out = out + biases[1][:, None]
    return jnp.sum(jnp.where(chosen, weight * out, 0.0), axis=0).astype(x.dtype)


def experts_by_chunks(
    x: jax.Array,  # float[T, d]
    gate_up: Matrices,  # [E, 2 I, d]
    down: Matrices,  # [E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array | None,  # i32[]
    order: jax.Array | None = None,  # i32[E, d]
    biases: Biases | None = None,
    *,
    activation: Activation = swiglu,
) -> jax.Array:  # [T, d] of x's type
    """Compute as `all_experts` with matrices in 8 or 4 bits.

    A chunk of experts at a time is converted to floats, or nothing if `in_fusions`. There is no
    loop, because it would split a GPU's step into several command buffers.
    """
    del num_rows
    count = num_experts(gate_up)
    fused = in_fusions(len(x), gate_up, down)
    largest = max(math.prod(shape_of(each)[1:]) for each in (gate_up, down)) * x.dtype.itemsize
    step = count if fused else chunk_of(count, largest)
    y = jnp.zeros(x.shape, jnp.float32)
    for first in range(0, count, step):
        if first:  # the floats of a chunk are freed before those of the next are made
            gate_up, down, y = lax.optimization_barrier((gate_up, down, y))
        up, then = (some_experts(each, first, step) for each in (gate_up, down))
        rows = x
        if order is not None:
            rows = x[:, order[first : first + step]].swapaxes(0, 1)
        both = _by_expert(rows, up, fused)
        if biases is not None:
            both = both + biases[0][first : first + step, None]
        inner = activation(both).astype(x.dtype)  # [C, T, I]
        out = _by_expert(inner, then, fused)  # f32[C, T, d]
        if biases is not None:
            out = out + biases[1][first : first + step, None]
        number = first + jnp.arange(step)[:, None, None]
        is_chosen = experts[None] == number  # [C, T, k]
        weight = jnp.sum(jnp.where(is_chosen, weights[None], 0.0), axis=-1)  # [C, T]
        chosen = jnp.any(is_chosen, axis=-1)
        y = y + jnp.sum(jnp.where(chosen[..., None], weight[..., None] * out, 0.0), axis=0)
    return y.astype(x.dtype)


def in_fusions(rows: int, *matrices: Matrices) -> bool:
    """Return True if the products of all experts convert their matrices and fit into memory."""
    quantizations = [w.quantization for w in matrices if isinstance(w, QuantizedWeight)]
    widest = max(math.prod(shape_of(w)[:2]) for w in matrices)
    return all(q.fused for q in quantizations) and 4 * rows * widest <= FUSED_BYTES


def chunk_of(count: int, one_bytes: int) -> int:
    """Return the experts per chunk: the largest divisor of all that fits into CHUNK_BYTES."""
    most = max(1, CHUNK_BYTES // one_bytes)
    return next(n for n in range(min(most, count), 0, -1) if count % n == 0)


def num_experts(w: Matrices) -> int:
    return shape_of(w)[0]


def shape_of(w: Matrices) -> tuple[int, int, int]:
    if not isinstance(w, QuantizedWeight):
        count, outputs, inputs = w.shape
        return count, outputs, inputs
    quantization = w.quantization
    assert quantization.experts is not None
    return quantization.experts, quantization.outputs, quantization.inputs


def _of_expert(x: jax.Array, w: Matrices, expert: jax.Array) -> jax.Array:
    """Multiply float[T, K] by one expert's matrix to f32[T, N]."""
    if isinstance(w, QuantizedWeight):
        return expert_product(x, w, expert)
    return _product(x, lax.dynamic_index_in_dim(w, expert, keepdims=False))


def _by_expert(x: jax.Array, w: Matrices, fused: bool) -> jax.Array:
    """Multiply float[T, K], or float[C, T, K] per expert, by all matrices to f32[C, T, N]."""
    if isinstance(w, QuantizedWeight):
        return products_by_expert(x, w, in_fusions=fused)
    return jax.vmap(_product, in_axes=(None if x.ndim == 2 else 0, 0))(x, w)


def _by_pair(x: jax.Array, w: Matrices, experts: jax.Array) -> jax.Array:
    """Multiply each row of float[R, K] by its expert's matrix to f32[R, N]."""
    if isinstance(w, QuantizedWeight):
        return products_by_pair(x, w, experts)
    return jax.vmap(_product)(x[:, None], w.at[experts].get(mode="clip"))[:, 0]


def some_experts(w: Matrices, first: int, count: int) -> Matrices:
    """Return `count` experts from the number `first` on."""
    if not isinstance(w, QuantizedWeight):
        return w[first : first + count]
    some = jax.tree.map(lambda array: array[first : first + count], w)
    quantization = dataclasses.replace(w.quantization, experts=count)
    return dataclasses.replace(some, quantization=quantization)


def _at(x: jax.Array, index: Any) -> jax.Array:
    """Return x[index], with 16-bit floats as bits because XLA:CPU would convert all of x."""
    if x.dtype.itemsize != 2:
        return x[index]
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint16)[index], x.dtype)


def _product(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply float[T, K] by float[N, K] to f32[T, N], in the form that XLA:CPU is fast at."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
