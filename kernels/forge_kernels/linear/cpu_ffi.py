"""Packed weights: the linear layer and the embedding by the C++ kernels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import numpy as np

from forge_kernels.derivatives import with_derivative_of, zero_from
from forge_kernels.linear.blocks import BlockPacking
from forge_kernels.linear.operands import MatmulOptions, Operands, check
from forge_kernels.linear.packed import FORMATS, Packing
from forge_kernels.linear.reference import reference_linear
from forge_kernels.linear.unpacked import unpacked

_STORE, _RESIDUAL, _SWIGLU = range(3)
_IN_BLOCKS = ("int8", "int6", "int4", "iq4")  # in the order of `Format` in `formats.h`


@dataclass(frozen=True)
class PackedWeight:
    """A matrix in the kernels' layout, a pytree of the leaves `weight` and `scale`.

    Gradients pass through to the activations, and to the arrays that are floats: a scale, and a
    `weight` of bfloat16 instead of its bits. They are those of the stored numbers in float32.
    """

    weight: jax.Array  # see Packing.weight; also bfloat16 instead of uint16
    scale: jax.Array | None  # see Packing.scale
    packing: Packing | BlockPacking

    @classmethod
    def abstract(cls, packing: Packing | BlockPacking) -> PackedWeight:
        """Return the weight with shapes and types for arrays."""
        return cls(cast(Any, packing.weight), cast(Any, packing.scale), packing)

    def matmul(self, x: jax.Array, **options: Unpack[MatmulOptions]) -> jax.Array:
        """Return x (bfloat16) times the transpose of the matrix in one pass; see `linear`."""
        packing, given = self.packing, Operands(**options)
        norm, residual, swiglu = given.norm, given.residual, given.swiglu
        dtype = jnp.dtype(given.out_dtype or x.dtype)
        shape = packing.outputs, packing.inputs
        check(x, given, kind=f"packed ({packing.format})", dtype=jnp.bfloat16, shape=shape)
        if dtype not in (jnp.bfloat16, jnp.float32):
            raise TypeError(
                f"the result of a packed weight must be bfloat16 or float32, got {dtype}"
            )
        if swiglu != packing.paired:
            raise ValueError("swiglu must be set if and only if the weight was packed as paired")
        static = {"eps": 0.0 if norm is None else norm[1], "swiglu": swiglu, "dtype": dtype}
        multiply = with_derivative_of(
            partial(_multiply_unpacked, **static), partial(_multiply, **static), clean=_clean
        )
        return multiply(x, self, None if norm is None else norm[0], residual, given.num_rows)


jax.tree_util.register_dataclass(
    PackedWeight, data_fields=["weight", "scale"], meta_fields=["packing"]
)


def _multiply(
    x: jax.Array,
    w: PackedWeight,
    norm: jax.Array | None,
    residual: jax.Array | None,
    num_rows: jax.Array | None,
    *,
    eps: float,
    swiglu: bool,
    dtype: jnp.dtype,
) -> jax.Array:
    """Compute `PackedWeight.matmul` by the kernel."""
    packing, nothing = w.packing, jnp.zeros(0, jnp.bfloat16)
    columns = packing.outputs // 2 if swiglu else packing.outputs
    call = jax.ffi.ffi_call("forge_linear", jax.ShapeDtypeStruct((x.shape[0], columns), dtype))
    return call(
        x,
        nothing if norm is None else norm,
        w.weight,
        jnp.zeros(0) if w.scale is None else w.scale,
        nothing if residual is None else residual,
        _rows(x, num_rows),
        epilogue=np.int64(_SWIGLU if swiglu else _STORE if residual is None else _RESIDUAL),
        columns=np.int64(packing.outputs),
        eps=np.float32(eps),
        **format_attributes(packing, rounds_rows=True),
    )


def _multiply_unpacked(
    x: jax.Array,
    w: PackedWeight,
    norm: jax.Array | None,
    residual: jax.Array | None,
    num_rows: jax.Array | None,
    *,
    eps: float,
    swiglu: bool,
    dtype: jnp.dtype,
) -> jax.Array:
    """Compute the same with a matrix of floats, for derivatives."""
    y = reference_linear(
        zero_from(x, num_rows),
        unpacked(w.weight, w.scale, w.packing),
        norm=None if norm is None else (norm, eps),
        residual=residual,
        swiglu=swiglu,
        out_dtype=dtype,
    )
    return zero_from(y, num_rows)


def _clean(y: jax.Array, *arrays: Any) -> jax.Array:
    *_, num_rows = arrays
    return zero_from(y, num_rows)


def packed_embed(w: PackedWeight, tokens: jax.Array) -> jax.Array:
    """Return rows of a packed matrix, bf16[T, K_in], for i32[T]; tokens are clipped."""
    packing = w.packing

    def kernel(w: PackedWeight, tokens: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct((tokens.shape[0], packing.inputs), jnp.bfloat16)
        return jax.ffi.ffi_call("forge_embed", out)(
            w.weight,
            jnp.zeros(0) if w.scale is None else w.scale,
            tokens,
            columns=np.int64(packing.outputs),
            **format_attributes(packing),
        )

    def smooth(w: PackedWeight, tokens: jax.Array) -> jax.Array:
        matrix = unpacked(w.weight, w.scale, packing)
        return matrix.at[tokens].get(mode="clip").astype(jnp.bfloat16)

    return with_derivative_of(smooth, kernel)(w, tokens)


def format_attributes(
    packing: Packing | BlockPacking, *, rounds_rows: bool = False
) -> dict[str, np.int64]:
    """Return the kernels' format of a weight: `Format` and `Blocks` of `cpu/src/formats.h`.

    `rounds_rows` is true for operations with activations, which some blocks require rounded.
    """
    if isinstance(packing, Packing):
        return _attributes(FORMATS.index(packing.format), 0, 0, False)
    blocks = packing.blocks
    number = len(FORMATS) + _IN_BLOCKS.index(blocks.values)
    if rounds_rows and packing.activations is not None:
        number += len(_IN_BLOCKS)
    return _attributes(number, blocks.size, blocks.group, blocks.minima)


def _attributes(number: int, block: int, group: int, minima: bool) -> dict[str, np.int64]:
    values = {"format": number, "block": block, "group": group, "minima": minima}
    return {name: np.int64(value) for name, value in values.items()}


def _rows(x: jax.Array, num_rows: jax.Array | None) -> jax.Array:
    if num_rows is None:
        return jnp.full(1, x.shape[0], jnp.int32)
    return num_rows.reshape(1)
