"""Adapters in the layout of the CPU kernels, and their products by the C++ kernels.

The matrices of each adapter are packed as bfloat16 weights (`forge_kernels.linear.packed`). Rows
are gathered by adapter, so a row's cost does not depend on the number of places.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from forge_kernels.derivatives import with_derivative_of, zero_from
from forge_kernels.linear import Packing, pack
from forge_kernels.linear.unpacked import unpacked
from forge_kernels.lora.xla import all_places


def packings(inputs: int, outputs: int, rank: int) -> tuple[Packing, Packing]:
    """Return the packing of an adapter's a, [r, K_in], and b, [N_out, r].

    r is rounded up to an even number.
    """
    rank += rank % 2
    return Packing("bf16", rank, inputs), Packing("bf16", outputs, rank)


def pack_adapter(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack bf16[r, K_in] and bf16[N_out, r] of one adapter on the host."""
    rank, inputs = a.shape
    of_a, of_b = packings(inputs, len(b), rank)
    odd = rank % 2
    a, b = np.pad(a, ((0, odd), (0, 0))), np.pad(b, ((0, 0), (0, odd)))
    return pack(a, of_a)[0], pack(b, of_b)[0]


def packed_lora(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    place: jax.Array,
    *,
    layer: int,
    outputs: int,
    num_rows: jax.Array | None = None,
) -> jax.Array:
    """Return each row's adapter contribution, as `lora` does, with the C++ kernels.

    Args:
      x: bf16[T, K_in].
      a: u16[L, P, ...], packed a of each layer and place.
      b: u16[L, P, ...], the same of b.
      place: i32[T], the place of each row from 1 on; 0: none.
      layer: the index of the layer in a and b, which are not sliced, so that nothing is copied.
      outputs: N_out.
      num_rows: i32[], the number of rows in use; by default, all. Other rows are zero.

    Returns:
      bf16[T, N_out]; the product with a is rounded to bfloat16.

    Raises:
      TypeError: x is not bfloat16.
      ValueError: shapes do not match.
    """
    if x.dtype != jnp.bfloat16:
        raise TypeError(f"packed adapters multiply bfloat16, got {x.dtype}")
    rank = 2 * b.shape[3]
    of_a, of_b = packings(x.shape[1], outputs, rank)
    fits = a.shape[2:] == of_a.weight.shape and b.shape[2:] == of_b.weight.shape
    if not fits or a.shape[:2] != b.shape[:2] or place.shape != x.shape[:1]:
        raise ValueError(
            f"shapes do not match: x {x.shape}, a {a.shape}, b {b.shape}, place {place.shape}"
        )
    options = {"layer": layer, "outputs": outputs}
    kernel = partial(_multiply, rank=rank, **options)
    return with_derivative_of(partial(_unpacked, **options), kernel)(x, a, b, place, num_rows)


def _multiply(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    place: jax.Array,
    num_rows: jax.Array | None,
    *,
    layer: int,
    outputs: int,
    rank: int,
) -> jax.Array:
    out = jax.ShapeDtypeStruct((len(x), outputs), jnp.bfloat16)
    rows = jnp.full(1, len(x), jnp.int32) if num_rows is None else num_rows.reshape(1)
    return jax.ffi.ffi_call("forge_lora", out)(
        x, a, b, place, rows, layer=np.int64(layer), rank=np.int64(rank)
    )


def _unpacked(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    place: jax.Array,
    num_rows: jax.Array | None,
    *,
    layer: int,
    outputs: int,
) -> jax.Array:
    """Compute the same in plain JAX, for derivatives."""
    of_a, of_b = packings(x.shape[1], outputs, 2 * b.shape[3])
    plain_a = jnp.stack([unpacked(w, None, of_a) for w in a[layer]])
    plain_b = jnp.stack([unpacked(w, None, of_b) for w in b[layer]], axis=1)
    y = all_places(x, plain_a.astype(x.dtype), plain_b.astype(x.dtype), place)
    return zero_from(y, num_rows)
