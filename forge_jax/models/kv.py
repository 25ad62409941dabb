"""Types of the paged KV cache that a model reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from forge_kernels.attention import QuantizedKV

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec

LayerKV = jax.Array | QuantizedKV  # dtype[N, 2, K, bs, D], or the same in 8 bits with scales
KV = tuple[LayerKV, ...]  # one per layer


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The vectors that each layer caches per token: `planes` x `heads` vectors of `dim` numbers.

    A layer's array is dtype[N, planes, heads, bs, dim]. With two planes, keys are at index 0 and
    values at 1, as `forge_jax.models.attend` requires. A decoder with its own attention may cache
    something else, such as one latent vector per token.
    """

    layers: int
    planes: int = 2
    heads: int
    dim: int


def keys_and_values(spec: ModelSpec) -> KVLayout:
    """Return the layout of a decoder whose layers cache keys and values: dtype[N, 2, K, bs, D]."""
    return KVLayout(
        layers=spec.num_hidden_layers, heads=spec.num_key_value_heads, dim=spec.head_dim
    )


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
