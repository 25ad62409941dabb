"""The KV cache on the device: one array per layer, and how many blocks of it fit."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from forge_jax.errors import ConfigError

GIB = 1 << 30
CPU_KV_BYTES = GIB // 2  # default on the CPU, where the device reports nothing
CPU_MEMORY_PART = 0.25  # and never more than this part of what is available


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """`kv[l]: dtype[N, 2, K, bs, D]` for each of L layers; keys at index 0, values at 1.

    `storage` is what the arrays hold: a float, or uint16 for the bits of a 16-bit float (see
    `forge_kernels.attention.kv_storage_dtype`).
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    storage: np.dtype

    @property
    def layer(self) -> jax.ShapeDtypeStruct:
        shape = (self.num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return jax.ShapeDtypeStruct(shape, self.storage)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        per_layer = 2 * self.num_kv_heads * self.block_size * self.head_dim
        return self.num_layers * per_layer * self.storage.itemsize

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


def fit_num_blocks(
    *,
    block_bytes: int,
    free_bytes: int,
    blocks_per_sequence: int,
    max_num_seqs: int,
) -> int:
    """Blocks that fit into `free_bytes`, on a coarse grid so that the compilation cache hits.

    Never more than all sequences can use at full length.

    Raises:
      ConfigError: not even one sequence of full length fits.
    """
    wanted = blocks_per_sequence * max_num_seqs
    fitting = free_bytes // block_bytes
    num_blocks = min(wanted, coarse(fitting))
    if num_blocks < blocks_per_sequence:
        raise ConfigError(
            f"the KV cache of one sequence of full length needs "
            f"{blocks_per_sequence * block_bytes / GIB:.2f} GiB, and there is room for "
            f"{num_blocks * block_bytes / GIB:.2f}: lower --max-model-len or set --num-blocks"
        )
    return num_blocks


def coarse(n: int) -> int:
    """Rounds down to three significant bits: the same memory, give or take, is the same shape."""
    if n < 8:
        return max(n, 0)
    shift = n.bit_length() - 3
    return (n >> shift) << shift


def cpu_kv_bytes(available_bytes: int) -> int:
    """How much host memory the KV cache takes by default."""
    return min(CPU_KV_BYTES, int(available_bytes * CPU_MEMORY_PART))
