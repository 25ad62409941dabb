"""The KV cache on the device: its shape, its size in bytes, and how many blocks fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from forge_jax.errors import ConfigError
from forge_jax.models.kv import (
    EIGHT_BITS,
    KV,
    LayerLayout,
    PagedLayout,
    StateArray,
    StateLayout,
    has_state,
)
from forge_jax.models.plugins import find_architecture
from forge_kernels.attention import cpu_ffi, kv_shape_dtype, kv_storage_dtype

if TYPE_CHECKING:
    from forge_jax.models.spec import ModelSpec

GIB = 1 << 30
# Defaults on a CPU, whose memory is shared: capacity per sequence in tokens, and minimum and
# maximum bytes.
CPU_SEQUENCE_TOKENS = 1024
CPU_KV_BYTES = (GIB // 2, 2 * GIB)
CPU_MEMORY_PART = 0.25  # maximum fraction of the available memory


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """The cache of each layer: by default, dtype[N, 2, K, bs, D] with keys at 0 and values at 1.

    Attributes:
      layouts: one per layer.
      storage: the dtype of paged arrays: a float, uint16 for the bits of a 16-bit float, or an
        8-bit type. The 8-bit types have separate scales (see
        `forge_kernels.attention.kv_storage_dtype`).
      num_slots: sequences that have state at the same time.
      num_pending: W, the largest number of tokens of a verification step; 0 without drafts.
      without_empty: True if `()` replaces arrays of pending tokens that have no elements.
    """

    layouts: tuple[LayerLayout, ...]
    num_blocks: int
    block_size: int
    storage: np.dtype
    num_slots: int = 1
    num_pending: int = 0
    without_empty: bool = False

    @property
    def layers(self) -> tuple[Any, ...]:
        """The shapes of all layers' arrays, as in `KV`."""
        return tuple(map(self._layer, self.layouts))

    def _layer(self, layout: LayerLayout) -> Any:
        if isinstance(layout, StateLayout):
            return {each.name: self._state(each) for each in layout.arrays}
        if layout.shares is not None:
            return ()
        shape = (self.num_blocks, layout.planes, layout.heads, self.block_size, layout.dim)
        return kv_shape_dtype(shape, self.storage)

    def _state(self, array: StateArray) -> jax.ShapeDtypeStruct | tuple[()]:
        if self.without_empty and array.pending and not self.num_pending:
            return ()
        pending = (self.num_pending,) * array.pending
        return jax.ShapeDtypeStruct((self.num_slots + 1, *pending, *array.shape), array.dtype)

    @property
    def has_state(self) -> bool:
        return has_state(self.layouts)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, scales included."""
        return (self.total_bytes - self.state_bytes) // self.num_blocks

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of all slots, which is independent of the number of blocks."""
        return _num_bytes([layer for layer in self.layers if isinstance(layer, dict)])

    @property
    def layer_state_bytes(self) -> int:
        """Bytes of the state of all slots in the layer with the largest one; 0 without state."""
        states = (layer for layer in self.layers if isinstance(layer, dict))
        return max(map(_num_bytes, states), default=0)

    @property
    def total_bytes(self) -> int:
        return _num_bytes(self.layers)

    def empty(self, *, untouched: bool = False) -> KV:
        """Return a cache of zeros, or an uninitialized one.

        Args:
          untouched: do not initialize blocks, so that memory is taken on first use. Requires the
            C++ kernels.
        """
        new = cpu_ffi.untouched if untouched else _zeros
        return tuple(
            jax.tree.map(_zeros if isinstance(layer, dict) else new, layer) for layer in self.layers
        )


def _num_bytes(tree: Any) -> int:
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


def _zeros(array: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(array.shape, array.dtype)


def kv_shape(
    spec: ModelSpec,
    *,
    num_blocks: int,
    block_size: int,
    dtype: DTypeLike,
    platform: str,
    num_slots: int = 1,
    num_pending: int = 0,
) -> KVShape:
    """Return the cache shape of a model with elements of `dtype`, as stored on `platform`.

    `num_slots` and `num_pending` are those of `KVShape`.

    Raises:
      ConfigError: `dtype` has 8 bits, and the architecture does not cache keys and values.
    """
    layouts = find_architecture(spec.architecture).cache(spec)
    paged = [layout for layout in layouts if isinstance(layout, PagedLayout)]
    option = next((name for name, each in EIGHT_BITS.items() if each == jnp.dtype(dtype)), None)
    if option is not None and any(layout.planes != 2 for layout in paged):
        raise ConfigError(
            f"--kv-dtype {option} is not supported for {spec.architecture}, whose "
            "KV cache has its own layout: use --kv-dtype auto"
        )
    return KVShape(
        layouts=layouts,
        num_blocks=num_blocks,
        block_size=block_size,
        storage=kv_storage_dtype(dtype, platform),
        num_slots=num_slots,
        num_pending=num_pending,
    )


def keeps_state(spec: ModelSpec) -> bool:
    """Return True if a layer of the model has state per sequence."""
    return has_state(find_architecture(spec.architecture).cache(spec))


def state_bytes(spec: ModelSpec) -> int:
    """Return the bytes of state that a model keeps per sequence, without drafts."""
    shape = kv_shape(spec, num_blocks=1, block_size=1, dtype=spec.dtype, platform="cpu")
    return shape.state_bytes // (shape.num_slots + 1)


def fit_num_blocks(
    *,
    block_bytes: int,
    free_bytes: int,
    blocks_per_sequence: int,
    max_num_seqs: int,
) -> int:
    """Return how many blocks fit into `free_bytes`, rounded down coarsely.

    The coarse grid makes the compilation cache hit. The result never exceeds what all sequences can
    use at full length.

    Raises:
      ConfigError: if not even one sequence of full length fits.
    """
    wanted = blocks_per_sequence * max_num_seqs
    fitting = free_bytes // block_bytes
    num_blocks = min(wanted, coarse(fitting))
    if num_blocks < blocks_per_sequence:
        raise ConfigError(
            f"the KV cache of one sequence of full length needs "
            f"{blocks_per_sequence * block_bytes / GIB:.2f} GiB, but there is room for only "
            f"{num_blocks * block_bytes / GIB:.2f}: lower --max-model-len or set --num-blocks"
        )
    return num_blocks


def coarse(n: int) -> int:
    """Round down to three significant bits, so that similar memory sizes give the same shape."""
    if n < 8:
        return max(n, 0)
    shift = n.bit_length() - 3
    return (n >> shift) << shift


def cpu_kv_bytes(wanted_bytes: int, available_bytes: int) -> int:
    """Return the bytes of host memory that the KV cache takes by default.

    Args:
      wanted_bytes: bytes for `CPU_SEQUENCE_TOKENS` of each sequence.
    """
    least, most = CPU_KV_BYTES
    return min(max(least, min(wanted_bytes, most)), int(available_bytes * CPU_MEMORY_PART))
