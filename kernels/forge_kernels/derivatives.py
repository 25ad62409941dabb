"""The derivatives of kernels, which are those of a plain function of the same arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


def with_derivative_of(
    smooth: Callable[..., Any],
    kernel: Callable[..., Any],
    *,
    clean: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Return `kernel` with the derivative of `smooth`, in both modes and of any order.

    If no gradient is requested, the program is that of `kernel` alone. The backward pass computes
    `smooth` again, so that its intermediate arrays are not stored.

    Args:
      smooth: a function that JAX differentiates, close to `kernel`. Where the kernel rounds, it
        does not, so the rounding counts as the identity (a straight-through estimator).
      kernel: the function of the same arrays, or pytrees of them. No array may come from outside.
      clean: returns the kernel's results with zeros in undefined rows, for the same arguments after
        the result. Undefined rows could make a sum over all rows NaN, such as a weight's gradient.
    """
    differentiable = jax.custom_jvp(kernel)

    def rule(primals: Any, tangents: Any) -> Any:
        result = differentiable(*primals)
        values, treedef = jax.tree.flatten(primals)
        slopes = treedef.flatten_up_to(tangents)
        active = [i for i, slope in enumerate(slopes) if not isinstance(slope, SymbolicZero)]

        def of_active(*some: jax.Array) -> Any:
            given = dict(zip(active, some, strict=True))
            return smooth(*treedef.unflatten([given.get(i, x) for i, x in enumerate(values)]))

        some = tuple(values[i] for i in active)
        slope = jax.jvp(jax.checkpoint(of_active), some, tuple(slopes[i] for i in active))[1]
        return (result if clean is None else clean(result, *primals)), slope

    differentiable.defjvp(rule, symbolic_zeros=True)
    return differentiable


def zero_from(x: jax.Array, num_rows: jax.Array | None) -> jax.Array:
    """Return x, [T, ...], with zeros from row `num_rows` (i32[]) on."""
    if num_rows is None:
        return x
    exists = jnp.arange(len(x)) < num_rows
    return jnp.where(exists.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))
