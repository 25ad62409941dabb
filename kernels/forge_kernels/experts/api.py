"""Mixtures of experts with SwiGLU: the choice by a router's logits, and the sum of what they give.

What a token gets is a function of that token alone: every expert that it chose computes it,
whatever the others chose, and its sum goes by the experts' numbers.
"""

from typing import Literal, cast

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.experts.cpu_ffi import packed_experts
from forge_kernels.experts.reference import reference_experts
from forge_kernels.experts.xla import all_experts, experts_by_chunks, tiled_experts
from forge_kernels.linear import (
    MatrixWeight,
    MixedMatrix,
    OrderedWeight,
    PackedWeight,
    PlainWeight,
    QuantizedWeight,
)

IN_BLOCKS = {"int8 blocks", "int4 blocks"}  # formats of which the kernels take any two
Implementation = Literal["auto", "reference"]


def choose_experts(
    logits: jax.Array, per_token: int, *, normalised: bool
) -> tuple[jax.Array, jax.Array]:
    """The likeliest experts of each token; of equal ones the first.

    Args:
      logits: f32[T, E], of the router.
      per_token: k.
      normalised: the weights of a token's experts are made to sum to one.

    Returns:
      (experts i32[T, k], weights f32[T, k]): the softmax over all experts at those chosen.
    """
    weights, experts = lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), per_token)
    if normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts.astype(jnp.int32), weights


def mix_experts(
    x: jax.Array,
    gate_up: jax.Array | MatrixWeight,
    down: jax.Array | MatrixWeight,
    experts: jax.Array,
    weights: jax.Array,
    *,
    order: jax.Array | None = None,
    num_rows: jax.Array | None = None,
    implementation: Implementation = "auto",
) -> jax.Array:
    """The weighted sum of down(silu(gate(x)) * up(x)) over each token's experts, in float32.

    On a CPU the rows are sorted by expert and multiplied in tiles, packed ones by the C++ kernels:
    experts that nobody chose are not read. Elsewhere every expert computes every row; where their
    matrices are quantised, floats of some experts are made at a time.

    Args:
      x: float[T, d].
      gate_up: float[E, 2 I, d] of x's type, gates above ups; or packed as `paired` (then x is
        bfloat16); or quantised.
      down: float[E, d, I], or packed, or quantised.
      experts: i32[T, k], in [0, E), different ones in a row.
      weights: f32[T, k].
      order: i32[E, d], the columns of x that those of each expert's quantised gate_up multiply; an
        `OrderedWeight` has its own.
      num_rows: i32[], a promise that rows from there on are not needed: they may hold anything.
      implementation: "reference" is differentiable.

    Returns:
      [T, d] of x's type.

    Raises:
      TypeError, ValueError: types or shapes that do not go together.
    """
    if isinstance(gate_up, OrderedWeight):
        gate_up, order = gate_up.matrix, gate_up.order
    gate_up, down = _of_experts(gate_up), _of_experts(down)
    _check(x, gate_up, down, experts, weights)
    if order is not None and not isinstance(gate_up, QuantizedWeight | PackedWeight):
        raise TypeError("an order of the columns of experts that are not quantised")
    if isinstance(gate_up, PackedWeight) or isinstance(down, PackedWeight):
        assert isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight)
        return packed_experts(x, gate_up, down, experts, weights, order, num_rows)
    if isinstance(gate_up, QuantizedWeight) or isinstance(down, QuantizedWeight):
        if implementation == "reference":
            return experts_by_chunks(x, gate_up, down, experts, weights, None, order)
        default = experts_by_chunks
    else:
        if implementation == "reference":
            return reference_experts(x, gate_up, down, experts, weights)
        default = all_experts
    rows = jnp.int32(len(x)) if num_rows is None else num_rows
    arrays = (x, gate_up, down, experts, weights, rows)
    arrays += () if order is None else (order,)
    return lax.platform_dependent(*arrays, cpu=tiled_experts, default=default)


Matrices = jax.Array | PackedWeight | QuantizedWeight  # of all experts


def _of_experts(w: jax.Array | MatrixWeight) -> Matrices:
    if isinstance(w, PlainWeight):
        return w.weight
    if isinstance(w, OrderedWeight | MixedMatrix):
        raise TypeError(f"matrices of experts as a {type(w).__name__}")
    return cast(Matrices, w)


def _check(
    x: jax.Array, gate_up: Matrices, down: Matrices, experts: jax.Array, weights: jax.Array
) -> None:
    if isinstance(gate_up, PackedWeight) != isinstance(down, PackedWeight):
        raise TypeError("experts with one packed matrix and one that is not")
    shapes = []
    for name, w in (("gate_up", gate_up), ("down", down)):
        if isinstance(w, QuantizedWeight):
            of = w.quantization
            shapes.append((of.experts, of.outputs, of.inputs))
        elif isinstance(w, PackedWeight):
            packing = w.packing
            if x.dtype != jnp.bfloat16:
                raise TypeError(f"packed experts with activations of {x.dtype}")
            if packing.paired != (name == "gate_up"):
                raise ValueError("experts need gate_up packed as paired, and only it")
            shapes.append((packing.experts, packing.outputs, packing.inputs))
        else:
            if w.dtype != x.dtype:
                raise TypeError(f"experts of {w.dtype} with activations of {x.dtype}")
            shapes.append(w.shape)
    formats = {w.packing.format for w in (gate_up, down) if isinstance(w, PackedWeight)}
    if len(formats) > 1 and not formats <= IN_BLOCKS:
        raise TypeError(f"experts packed in {' and '.join(sorted(formats))}")
    count, width = shapes[0][0], x.shape[-1]
    if x.ndim != 2 or shapes != [
        (count, *shapes[0][1:2], width),
        (count, width, shapes[0][1] // 2),
    ]:
        raise ValueError(f"experts {shapes[0]} and {shapes[1]} with x {x.shape}")
    if experts.shape != weights.shape or experts.ndim != 2 or len(experts) != len(x):
        raise ValueError(f"experts {experts.shape}, weights {weights.shape}, x {x.shape}")
    if experts.shape[1] > (count or 0):
        raise ValueError(f"{experts.shape[1]} experts of {count}")
    if weights.dtype != jnp.float32 or experts.dtype != jnp.int32:
        raise TypeError(f"experts are int32, weights float32; not {experts.dtype}, {weights.dtype}")
