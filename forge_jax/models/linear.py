"""Linear layers and norms of a decoder as Flax NNX modules.

A linear layer multiplies by a weight of any type (`forge_kernels.linear`), which `MatrixBuilder`
selects when the model is built. Adapters and tensor parallelism are arguments of the call.

Letters: T tokens in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from forge_jax.models.spec import ModelSpec
from forge_jax.weights.formats import MatrixShape, MatrixSpec, WeightFormats
from forge_kernels.collectives import ordered_sum
from forge_kernels.linear import MatmulOptions, MatrixWeight, OrderedWeight
from forge_kernels.norm import layer_norm, rms_norm


class MatrixBuilder:
    """Allocates the matrices of a model in their formats, and lists them in `matrices`."""

    def __init__(self, formats: WeightFormats, dtype: Any):
        self.formats, self.dtype = formats, dtype
        self.matrices: dict[str, MatrixSpec] = {}

    def __call__(
        self,
        leaf: str,
        outputs: int,
        inputs: int,
        *,
        paired: bool = False,
        experts: int | None = None,
    ) -> MatrixWeight:
        """Return the weight of `leaf` (such as "layers.0.mlp.down.weight"), filled with zeros.

        If `paired`, its halves are gate and up, and the product includes SwiGLU.
        """
        matrix = MatrixSpec(self.formats.of(leaf), MatrixShape(outputs, inputs, paired, experts))
        self.matrices[leaf] = matrix
        abstract = matrix.format.weight(matrix.shape, self.dtype)
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), abstract)


class RMSNorm(nnx.Module):
    def __init__(self, size: int | tuple[int, ...], spec: ModelSpec, dtype: Any):
        self.weight = nnx.Param(jnp.zeros(size, dtype))
        self.eps = spec.norm_eps
        self.offset, self.in_float32 = spec.norm_offset, spec.norm_in_float32

    @property
    def is_plain(self) -> bool:
        """True if this is Llama's norm, which `forge_kernels.linear` can fuse."""
        return not self.offset and not self.in_float32

    def __call__(self, x: jax.Array, axis: str | None = None) -> jax.Array:
        """Normalize the last axis of float[..., *size].

        `axis`: each device of the mesh has a part of every row.
        """
        return rms_norm(
            x,
            self.weight[...],
            self.eps,
            offset=self.offset,
            in_float32=self.in_float32,
            axis_name=axis,
        )


class LayerNorm(nnx.Module):
    def __init__(self, size: int | tuple[int, ...], spec: ModelSpec, dtype: Any):
        self.weight = nnx.Param(jnp.zeros(size, dtype))
        self.bias = nnx.Param(jnp.zeros(size, dtype)) if spec.norm_bias else None
        self.eps = spec.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalize the last axis of float[..., *size]."""
        bias = None if self.bias is None else self.bias[...]
        return layer_norm(x, self.weight[...], bias, self.eps)


Norm = RMSNorm | LayerNorm


def new_norm(size: int | tuple[int, ...], spec: ModelSpec, dtype: Any) -> Norm:
    """Return a norm of the type that the spec selects, with weights of shape `size`, zeros."""
    return (RMSNorm if spec.norm_type == "rms" else LayerNorm)(size, spec, dtype)


Delta = Callable[[jax.Array], jax.Array]  # dtype[T, K_in] -> the term to add to its product


class Linear(nnx.Module):
    """A weight of any type, with a bias if the model has one."""

    def __init__(self, matrix: MatrixWeight, bias: jax.Array | None = None):
        self.matrix = nnx.Param(matrix)
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(
        self,
        x: jax.Array,
        *,
        norm: Norm | None = None,
        residual: jax.Array | None = None,
        delta: Delta | None = None,
        axis: str | None = None,
        swiglu: bool = False,
        num_rows: jax.Array | None = None,
        out_dtype: DTypeLike | None = None,
    ) -> jax.Array:
        """Return `residual + (norm(x) W^T + delta(norm(x)) + bias)`.

        See `forge_kernels.linear.linear` for the other arguments.

        Args:
          x: dtype[T, K_in].
          norm: applied to x; fused into the product if possible.
          residual: added to the result.
          delta: returns the adapters' term, in plain XLA for every weight type. Excludes `swiglu`.
          axis: each device of this mesh axis has some of the inputs, and products are summed.
          swiglu: apply SwiGLU to the product.
          num_rows: i32[], the rows in use.
          out_dtype: the type of the product.
        """
        assert delta is None or not swiglu, "a model that was not built for adapters"
        options: MatmulOptions = {"swiglu": swiglu, "num_rows": num_rows, "out_dtype": out_dtype}
        weight = self.matrix.get_value()
        ordered = isinstance(weight, OrderedWeight)
        if isinstance(norm, RMSNorm) and norm.is_plain and delta is None and not ordered:
            options["norm"] = (norm.weight[...], norm.eps)
        elif norm is not None:
            with jax.named_scope("norm"):
                x = norm(x)
        inputs = x
        if ordered and axis is not None:
            with jax.named_scope("gather"):
                inputs = lax.all_gather(x, axis, axis=1, tiled=True)
        if delta is None and axis is None and self.bias is None:
            options["residual"] = residual
            return weight.matmul(inputs, **options)
        y = weight.matmul(inputs, **options)
        if delta is not None:
            y = y + delta(x)
        if axis is not None:
            y = add_up(y, axis)
        if self.bias is not None:
            y = y + self.bias[...][None].astype(y.dtype)
        return y if residual is None else residual + y


def add_up(x: jax.Array, axis: str) -> jax.Array:
    """Return the sum over the devices of a mesh axis, on each of them."""
    with jax.named_scope("add_up"):
        return ordered_sum(x, axis)


def new_bias(size: int, dtype: Any, *, exists: bool) -> jax.Array | None:
    return jnp.zeros(size, dtype) if exists else None
