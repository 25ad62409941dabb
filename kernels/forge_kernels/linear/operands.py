"""The parts of a product that do not depend on how its matrix is stored.

Every weight type has one method, `matmul(x, **options)`. `MatmulOptions` lists the options, and
`Operands` has their defaults. `check` rejects operands that do not match. `around` computes norm,
SwiGLU and residual in plain XLA for the types whose product XLA computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from forge_kernels.norm import rms_norm


class MatmulOptions(TypedDict, total=False):
    """The options of `matmul`, documented at `linear`."""

    norm: tuple[jax.Array, float] | None
    residual: jax.Array | None
    swiglu: bool
    num_rows: jax.Array | None
    out_dtype: DTypeLike | None


class Operands(NamedTuple):
    """The options of one call."""

    norm: tuple[jax.Array, float] | None = None
    residual: jax.Array | None = None
    swiglu: bool = False
    num_rows: jax.Array | None = None
    out_dtype: DTypeLike | None = None


class MatrixWeight(Protocol):
    """A matrix [N_out, K_in] in some storage format, a pytree of its arrays."""

    def matmul(self, x: jax.Array, **options: Unpack[MatmulOptions]) -> jax.Array:
        """Return x times the transpose of the matrix; see `linear`."""
        ...


def check(
    x: jax.Array, given: Operands, *, kind: str, dtype: DTypeLike, shape: tuple[int, int]
) -> None:
    """Raise TypeError or ValueError unless the operands fit a matrix of this kind and shape.

    Args:
      x: the activations.
      given: the options.
      kind: name of the matrix's storage, for messages.
      dtype: the type that x must have.
      shape: (N_out, K_in).
    """
    (outputs, inputs), norm, residual = shape, given.norm, given.residual
    if x.dtype != dtype:
        raise TypeError(f"{kind} weights do not support activations of {x.dtype}")
    for name, array in (("norm", norm and norm[0]), ("residual", residual)):
        if array is not None and array.dtype != x.dtype:
            raise TypeError(f"{name} must be {x.dtype} like the activations, got {array.dtype}")
    if x.ndim != 2 or x.shape[1] != inputs:
        raise ValueError(f"x {x.shape} does not fit a weight [{outputs}, {inputs}]")
    if norm is not None and norm[0].shape != (inputs,):
        raise ValueError(f"norm {norm[0].shape} does not fit rows of {inputs}")
    if given.swiglu and residual is not None:
        raise ValueError("linear accepts swiglu or a residual, not both")
    if residual is not None and residual.shape != (x.shape[0], outputs):
        raise ValueError(
            f"residual {residual.shape} does not fit a result [{x.shape[0]}, {outputs}]"
        )


def around(x: jax.Array, product: Callable[[jax.Array], jax.Array], given: Operands) -> jax.Array:
    """Return `residual + swiglu(product(norm(x)))` in plain XLA."""
    if given.norm is not None:
        with jax.named_scope("norm"):
            x = rms_norm(x, *given.norm)
    with jax.named_scope("product"):
        y = product(x)
    if given.swiglu:
        with jax.named_scope("swiglu"):
            gate, up = jnp.split(y, 2, axis=-1)
            return jax.nn.silu(gate) * up
    if given.residual is None:
        return y
    with jax.named_scope("residual"):
        return given.residual + y
