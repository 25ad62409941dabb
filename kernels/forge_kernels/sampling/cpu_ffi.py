"""Sampling by the C++ kernels: `forge_kernels.sampling.sample` for the first `num_rows` rows."""

import jax
import jax.numpy as jnp

from forge_kernels.sampling.noise import row_keys


def cpu_sample(
    logits: jax.Array,  # f32[R, V]
    *,
    temperature: jax.Array,  # f32[R]
    top_k: jax.Array,  # i32[R]
    top_p: jax.Array,  # f32[R]
    min_p: jax.Array,  # f32[R]
    seed: jax.Array,  # u32[R, 2]
    position: jax.Array,  # i32[R]
    num_rows: jax.Array,  # i32[]
) -> jax.Array:  # i32[R], 0 from row num_rows on
    out = jax.ShapeDtypeStruct(logits.shape[:1], jnp.int32)
    return jax.ffi.ffi_call("forge_sample", out)(
        logits, temperature, top_k, top_p, min_p, row_keys(seed, position), num_rows.reshape(1)
    )
