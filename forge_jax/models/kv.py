"""The cache that a model reads and writes: paged keys and values, and per-sequence state."""

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

PagedKV = jax.Array | QuantizedKV  # dtype[N, 2, K, bs, D], or the same in 8 bits with scales
StateArrays = dict[str, jax.Array]  # by name: dtype[slots + 1, ...] (see `StateArray`)
# A layer that shares another layer's cache has `()`.
LayerKV = PagedKV | StateArrays | tuple[()]
KV = tuple[LayerKV, ...]  # one per layer


@dataclass(frozen=True, kw_only=True)
class PagedLayout:
    """The vectors that a layer caches per token: `planes` x `heads` vectors of `dim` numbers.

    The layer's array is dtype[N, planes, heads, bs, dim]. With two planes, keys are at index 0 and
    values at 1, as `forge_jax.models.attend` requires. A decoder with its own attention may cache
    something else, such as one latent vector per token.

    Attributes:
      shares: the index of an earlier layer whose array this layer reads. The layer then has no
        array: its element of `KV` is `()`.
    """

    planes: int = 2
    heads: int
    dim: int
    shares: int | None = None


@dataclass(frozen=True, kw_only=True)
class StateArray:
    """One array of a layer's per-sequence state, dtype[slots + 1, ...].

    The last slot is for rows without a sequence.

    Attributes:
      name: the key in the layer's element of `KV`.
      shape: the shape for one sequence, on one shard.
      dtype: the name of the element type, independent of `--dtype` and `--kv-dtype`.
      pending: True for inputs of tokens that may still be rejected. The array is then
        dtype[slots + 1, W, ...]. W is the largest number of tokens of a verification step. If
        drafts are off, it is 0.
      axis: the index in `shape` that tensor parallelism divides. None: every shard has all of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    pending: bool = False
    axis: int | None = None


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """The state that a layer keeps per sequence, whose size is independent of its length.

    A sequence's state is in its slot (`Ragged.state_slots`), which it keeps while it runs. A slot
    is not cleared between two sequences. A decoder must start from zeros at position 0 by a
    select, because the old content may not be finite.

    If drafts are rejected, the next step starts at an earlier position than the last one ended at.
    A state cannot go back. A decoder therefore keeps the state at a `base` position, and the inputs
    of up to W tokens after it in arrays with `StateArray.pending`. It replays the inputs before the
    step's first position.
    """

    arrays: tuple[StateArray, ...]


LayerLayout = PagedLayout | StateLayout


def keys_and_values(spec: ModelSpec) -> tuple[LayerLayout, ...]:
    """Return the layouts of a decoder whose layers cache keys and values: dtype[N, 2, K, bs, D]."""
    layer = PagedLayout(heads=spec.num_key_value_heads, dim=spec.head_dim)
    return (layer,) * spec.num_hidden_layers


def has_state(layouts: tuple[LayerLayout, ...]) -> bool:
    """Return True if a layer has per-sequence state."""
    return any(isinstance(layout, StateLayout) for layout in layouts)


def first_paged(kv: KV) -> PagedKV:
    """Return the first paged layer's cache. All of them have the same blocks and element type."""
    return next(
        layer
        for layer in kv
        if isinstance(layer, QuantizedKV) or not isinstance(layer, dict | tuple)
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
