"""Mixtures of experts on packed weights by the C++ kernels."""

import jax
import jax.numpy as jnp
import numpy as np

from forge_kernels.linear.cpu_ffi import PackedWeight, format_attributes


def packed_experts(
    x: jax.Array,  # bf16[T, d]
    gate_up: PackedWeight,
    down: PackedWeight,
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    order: jax.Array | None,  # i32[E, d]
    num_rows: jax.Array | None,  # i32[]
) -> jax.Array:  # bf16[T, d]
    rows = jnp.full(1, len(x), jnp.int32) if num_rows is None else num_rows.reshape(1)
    nothing = jnp.zeros(0)
    of_down = format_attributes(down.packing)
    return jax.ffi.ffi_call("forge_experts", jax.ShapeDtypeStruct(x.shape, x.dtype))(
        x,
        gate_up.weight,
        nothing if gate_up.scale is None else gate_up.scale,
        down.weight,
        nothing if down.scale is None else down.scale,
        experts,
        weights,
        jnp.zeros(0, jnp.int32) if order is None else order,
        rows,
        inner=np.int64(down.packing.inputs),
        **format_attributes(gate_up.packing),
        **{f"down_{name}": value for name, value in of_down.items()},
    )
