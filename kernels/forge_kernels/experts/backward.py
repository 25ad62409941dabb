"""The gradient of a mixture of experts, in plain XLA for every storage of the matrices.

One expert at a time computes all rows again. So memory is that of one expert's activations and, if
its matrices are quantized or packed, of their floats. All sums are in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.experts.xla import Activation, Biases
from forge_kernels.linear import MatrixWeight
from forge_kernels.linear.smooth import float_product


class Mixture(NamedTuple):
    """The arrays of `mix_experts`; any of the floats can have a gradient."""

    x: jax.Array  # float[T, d]
    gate_up: jax.Array | MatrixWeight  # matrices of E experts
    down: jax.Array | MatrixWeight
    weights: jax.Array  # f32[T, k]
    biases: Biases | None  # float[E, 2 I], float[E, d]
    experts: jax.Array  # i32[T, k]
    order: jax.Array | None  # i32[E, d]
    num_rows: jax.Array | None  # i32[]


def experts_backward(slope: jax.Array, mixture: Mixture, activation: Activation) -> Mixture:
    """Return the gradients with respect to the arrays, None for those that are not floats.

    Args:
      slope: float[T, d], the gradient with respect to the result.
      mixture: the arrays.
      activation: the function of a row's products.
    """
    x, gate_up, down, weights, biases, experts, order, num_rows = mixture
    exists = jnp.arange(len(x)) < (len(x) if num_rows is None else num_rows)
    x32, slope = x.astype(jnp.float32), slope.astype(jnp.float32)
    floats, integers, join = _split((gate_up, down, biases))
    count = len(jax.tree.leaves((gate_up, down))[0])
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT

    def one_expert(carry, of_expert):
        by_x, by_weights = carry
        expert, floats, integers, order = of_expert
        is_chosen = (experts == expert) & exists[:, None]
        chosen = is_chosen.any(axis=1, keepdims=True)

        def output(x: jax.Array, weights: jax.Array, floats: list[jax.Array]) -> jax.Array:
            gate_up, down, biases = join(floats, integers)
            x = jnp.where(chosen, x, 0.0)  # other rows may not be finite
            both = float_product(x if order is None else x[:, order], gate_up, precision)
            both = both if biases is None else both + biases[0].astype(jnp.float32)[None]
            out = float_product(activation(both), down, precision)
            out = out if biases is None else out + biases[1].astype(jnp.float32)[None]
            return out * jnp.where(is_chosen, weights, 0.0).sum(axis=1, keepdims=True)

        _, pull = jax.vjp(output, x32, weights, floats)
        more_x, more_weights, by_floats = pull(jnp.where(chosen, slope, 0.0))
        return (by_x + more_x, by_weights + more_weights), by_floats

    start = jnp.zeros_like(x32), jnp.zeros_like(weights)
    stacked = jnp.arange(count, dtype=jnp.int32), floats, integers, order
    (by_x, by_weights), by_floats = lax.scan(one_expert, start, stacked)
    by_gate_up, by_down, by_biases = join(by_floats, [None] * len(integers))
    by_all: Any = (by_x.astype(x.dtype), by_gate_up, by_down, by_weights, by_biases)
    return Mixture(*by_all, *cast(Any, (None, None, None)))


def _split(tree: Any) -> tuple[list[jax.Array], list[jax.Array], Any]:
    """Return the arrays of floats, all other arrays, and the function that joins them again."""
    leaves, treedef = jax.tree.flatten(tree)
    is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def join(floats: list[Any], integers: list[Any]) -> Any:
        some, others = iter(floats), iter(integers)
        return jax.tree.unflatten(treedef, [next(some if each else others) for each in is_float])

    floats = [leaf for leaf, each in zip(leaves, is_float, strict=True) if each]
    return floats, [leaf for leaf, each in zip(leaves, is_float, strict=True) if not each], join
