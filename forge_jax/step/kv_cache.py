"""The KV cache on the device: its shape, its size in bytes, and how many blocks fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from forge_jax.errors import ConfigError
from forge_jax.models.kv import KV
from forge_jax.models.plugins import find_architecture
from forge_kernels.attention import QuantizedKV, cpu_ffi, kv_shape_dtype, kv_storage_dtype

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
    """`kv[l]: dtype[N, 2, K, bs, D]` for each of L layers; keys at index 0, values at 1.

    If the decoder has its own layout (`forge_jax.models.KVLayout`), `planes` replaces the 2.
    `storage` is the dtype of the arrays: a float, uint16 for the bits of a 16-bit float, or an
    8-bit type. The 8-bit types have separate scales (see
    `forge_kernels.attention.kv_storage_dtype`).
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    storage: np.dtype
    planes: int = 2

    @property
    def layer(self) -> jax.ShapeDtypeStruct | QuantizedKV:
        """The shape of one layer's array. In 8 bits, a QuantizedKV of two shapes."""
        shape = (
            *(self.num_blocks, self.planes, self.num_kv_heads),
            *(self.block_size, self.head_dim),
        )
        return kv_shape_dtype(shape, self.storage)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, scales included."""
        return self.total_bytes // self.num_blocks

    @property
    def total_bytes(self) -> int:
        arrays = jax.tree.leaves(self.layer)
        return self.num_layers * sum(array.size * array.dtype.itemsize for array in arrays)

    def empty(self, *, untouched: bool = False) -> KV:
        """Return a cache of zeros, or an uninitialized one.

        Args:
          untouched: do not initialize, so that memory is taken on first use. Requires the C++
            kernels.
        """
        layer, new = self.layer, cpu_ffi.untouched if untouched else _zeros
        return tuple(jax.tree.map(new, layer) for _ in range(self.num_layers))


def _zeros(array: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(array.shape, array.dtype)


def kv_shape(
    spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: DTypeLike, platform: str
) -> KVShape:
    """Return the cache shape of a model with elements of `dtype`, as stored on `platform`.

    Raises:
      ConfigError: `dtype` has 8 bits, and the architecture does not cache keys and values.
    """
    layout = find_architecture(spec.architecture).cache(spec)
    if layout.planes != 2 and jnp.dtype(dtype).itemsize == 1:
        raise ConfigError(
            f"--kv-dtype {jnp.dtype(dtype).name} is not supported for {spec.architecture}, whose "
            "KV cache has its own layout: use --kv-dtype auto"
        )
    return KVShape(
        num_layers=layout.layers,
        num_blocks=num_blocks,
        num_kv_heads=layout.heads,
        block_size=block_size,
        head_dim=layout.dim,
        storage=kv_storage_dtype(dtype, platform),
        planes=layout.planes,
    )


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
      wanted_bytes: for `CPU_SEQUENCE_TOKENS` of each sequence.
    """
    least, most = CPU_KV_BYTES
    return min(max(least, min(wanted_bytes, most)), int(available_bytes * CPU_MEMORY_PART))
