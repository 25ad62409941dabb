"""Mixtures of experts on packed weights, by the C++ kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from forge_kernels.linear.packed import FORMATS, PackedWeight, Packing


def packed_experts(
    x: jax.Array,  # bf16[T, d]
    gate_up: PackedWeight,
    down: PackedWeight,
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array | None,  # i32[]
) -> jax.Array:  # bf16[T, d]
    rows = jnp.full(1, len(x), jnp.int32) if num_rows is None else num_rows.reshape(1)
    nothing = jnp.zeros(0)
    assert isinstance(gate_up.packing, Packing)
    return jax.ffi.ffi_call("forge_experts", jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x,
        gate_up.weight,
        nothing if gate_up.scale is None else gate_up.scale,
        down.weight,
        nothing if down.scale is None else down.scale,
        experts,
        weights,
        rows,
        format=np.int64(FORMATS.index(gate_up.packing.format)),
        inner=np.int64(down.packing.inputs),
    )
