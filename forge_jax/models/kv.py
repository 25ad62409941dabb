"""Types of the paged KV cache that a model reads and writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from forge_kernels.attention import QuantizedKV

LayerKV = jax.Array | QuantizedKV  # dtype[N, 2, K, bs, D], or the same in 8 bits with scales
KV = tuple[LayerKV, ...]  # one per layer

EIGHT_BITS: dict[str, np.dtype] = {  # by `--kv-dtype`
    "fp8": np.dtype(jnp.float8_e4m3fn),
    "int8": np.dtype(np.int8),
}


def element_dtype(kv_dtype: str, model_dtype: DTypeLike) -> np.dtype:
    """Return the element type of keys and values for a `--kv-dtype` and a model."""
    return jnp.dtype(model_dtype) if kv_dtype == "auto" else EIGHT_BITS[kv_dtype]


def bits_of(storage: np.dtype, model_dtype: np.dtype) -> np.dtype | None:
    """Return the type whose bits are stored as `storage`; None if numbers are stored directly."""
    return {"uint16": model_dtype, "uint8": EIGHT_BITS["fp8"]}.get(storage.name)
