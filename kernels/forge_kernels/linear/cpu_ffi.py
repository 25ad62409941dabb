"""The linear layer and the embedding on packed weights, by the C++ kernels."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from forge_kernels.linear.blocks import BlockPacking
from forge_kernels.linear.packed import FORMATS, PackedWeight, Packing

_STORE, _RESIDUAL, _SWIGLU = range(3)


def packed_linear(
    x: jax.Array,  # bf16[T, K_in]
    w: PackedWeight,
    *,
    norm: tuple[jax.Array, float] | None,
    residual: jax.Array | None,  # bf16[T, N_out]
    swiglu: bool,
    num_rows: jax.Array | None,  # i32[]
    out_dtype: DTypeLike,
) -> jax.Array:  # out_dtype[T, N_out, or N_out / 2 with swiglu]
    packing = w.packing
    nothing = jnp.zeros(0, jnp.bfloat16)
    columns = packing.outputs // 2 if swiglu else packing.outputs
    weight, eps = (nothing, 0.0) if norm is None else norm
    call = jax.ffi.ffi_call(
        "forge_linear", jax.ShapeDtypeStruct((x.shape[0], columns), jnp.dtype(out_dtype))
    )
    return call(
        x,
        weight,
        w.weight,
        jnp.zeros(0) if w.scale is None else w.scale,
        nothing if residual is None else residual,
        _rows(x, num_rows),
        epilogue=np.int64(_SWIGLU if swiglu else _STORE if residual is None else _RESIDUAL),
        columns=np.int64(packing.outputs),
        eps=np.float32(eps),
        **format_attributes(packing, rounds_rows=True),
    )


def packed_embed(w: PackedWeight, tokens: jax.Array) -> jax.Array:
    """Rows of a packed matrix: i32[T] -> bf16[T, K_in]; tokens are clipped into it."""
    packing = w.packing
    out = jax.ShapeDtypeStruct((tokens.shape[0], packing.inputs), jnp.bfloat16)
    return jax.ffi.ffi_call("forge_embed", out)(
        w.weight,
        jnp.zeros(0) if w.scale is None else w.scale,
        tokens,
        columns=np.int64(packing.outputs),
        **format_attributes(packing),
    )


def format_attributes(
    packing: Packing | BlockPacking, *, rounds_rows: bool = False
) -> dict[str, np.int64]:
    """What tells the kernels how to read a weight: `Format` and `Blocks` of `cpu/src/linear.h`.

    `rounds_rows`: the operation has rows of activations, which blocks may ask to be rounded.
    """
    if isinstance(packing, Packing):
        return _attributes(FORMATS.index(packing.format), 0, 0, False)
    blocks = packing.blocks
    number = len(FORMATS) + ("int8", "int4").index(blocks.values)
    if rounds_rows and packing.activations is not None:
        number += 2
    return _attributes(number, blocks.size, blocks.group, blocks.minima)


def _attributes(number: int, block: int, group: int, minima: bool) -> dict[str, np.int64]:
    values = {"format": number, "block": block, "group": group, "minima": minima}
    return {name: np.int64(value) for name, value in values.items()}


def _rows(x: jax.Array, num_rows: jax.Array | None) -> jax.Array:
    if num_rows is None:
        return jnp.full(1, x.shape[0], jnp.int32)
    return num_rows.reshape(1)
