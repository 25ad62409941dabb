"""Copies of KV cache blocks in host memory, which the device makes and loads while steps run.

Two executables of fixed shape copy `BATCH` blocks between the cache and arrays of bytes, one per
block. JAX moves these arrays between the device and pinned host memory in the background. The bytes
are those of the cache, so a loaded block has the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import batched
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from forge_jax.models.kv import KV
from forge_jax.schedule.host_tier import Finished, Transfers

if TYPE_CHECKING:
    from forge_jax.step.state import StepState

BATCH = 8  # blocks per call. The rest of a smaller batch is padding.
SAVING = 8  # batches on their way to the host at most. Two prompt steps of a GPU evict as many.
LOADING = 4  # batches on their way to the device at most.
STAGED_BLOCKS = BATCH * (SAVING + LOADING)  # on the device, in addition to the cache


def save_blocks(kv: KV, blocks: jax.Array) -> tuple[jax.Array, ...]:
    """Return the bytes of `blocks`, i32[BATCH]: for each, u8[1, block bytes] of all layers."""
    parts = []
    for layer in jax.tree.leaves(kv):
        taken = layer.at[blocks].get(mode="clip")  # dtype[BATCH, ...]
        parts.append(jax.lax.bitcast_convert_type(taken, jnp.uint8).reshape(BATCH, -1))
    rows = jnp.concatenate(parts, axis=1)
    return tuple(rows[index : index + 1] for index in range(BATCH))


def load_blocks(kv: KV, blocks: jax.Array, *rows: jax.Array) -> KV:
    """Return the cache with the bytes of `save_blocks` in `blocks`. Indices past the end drop."""
    layers, tree = jax.tree.flatten(kv)
    data = jnp.concatenate(rows, axis=0)  # u8[BATCH, block bytes]
    sizes = [layer.nbytes // len(layer) for layer in layers]
    parts = jnp.split(data, np.cumsum(sizes)[:-1], axis=1)
    loaded = []
    for layer, part in zip(layers, parts, strict=True):
        size = layer.dtype.itemsize
        shape = (BATCH, *layer.shape[1:], *((size,) if size > 1 else ()))
        values = jax.lax.bitcast_convert_type(part.reshape(shape), layer.dtype)
        loaded.append(layer.at[blocks].set(values, mode="drop", unique_indices=True))
    return jax.tree.unflatten(tree, loaded)


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Up to `BATCH` blocks of one load.

    Attributes:
      load: the load that this batch completes; None if others follow.
      copies: in host memory.
      rows: the same, on their way to the device.
    """

    load: int | None
    blocks: tuple[int, ...]
    copies: list[jax.Array]
    rows: list[jax.Array]


class HostBlocks:
    """A `HostMemory` of pinned arrays. It belongs to the thread that dispatches steps.

    The device runs executables in the order of their calls. A copy is therefore taken before a
    later step overwrites the block, and a later step reads what a load has written.

    Args:
      state: has the cache, and the executables `save_blocks` and `load_blocks` once they are ready.
      sharding: the sharding of a block's bytes, u8[shards, bytes].
      num_blocks: blocks of the cache.
      block_bytes: bytes of one block, over all shards.
    """

    def __init__(
        self,
        state: StepState,
        sharding: jax.sharding.Sharding,
        *,
        num_blocks: int,
        block_bytes: int,
    ):
        self.block_bytes = block_bytes
        self._state = state
        self._on_device = sharding
        self._on_host = sharding.with_memory_kind("pinned_host")
        self._num_blocks = num_blocks
        self._padding: list[jax.Array] = []  # rows that are dropped
        self.reset()

    def reset(self) -> None:
        self._copies: dict[int, jax.Array] = {}
        self._dropped: set[int] = set()  # before they had arrived
        self._saving: deque[tuple[list[int], list[jax.Array]]] = deque()
        self._queued: deque[_Batch] = deque()
        self._arriving: deque[_Batch] = deque()

    def warm_up(self) -> None:
        """Run both executables and both kinds of copy once, without an effect on the cache."""
        rows = self._save([])
        self._padding = [rows[0]] * BATCH
        copies = jax.device_put(list(rows), self._on_host)
        self._load([], jax.device_put(copies, self._on_device))
        jax.block_until_ready(self._state.kv)

    def start(self, transfers: Transfers) -> None:
        for saves in batched(transfers.saves, BATCH):
            rows = self._save([block for _, block in saves])
            copies = jax.device_put(list(rows[: len(saves)]), self._on_host)
            self._saving.append(([copy for copy, _ in saves], copies))
        for load, pairs in transfers.loads:
            for start in range(0, len(pairs), BATCH):
                batch = pairs[start : start + BATCH]
                self._queued.append(
                    _Batch(
                        load=load if start + BATCH >= len(pairs) else None,
                        blocks=tuple(block for _, block in batch),
                        copies=[self._copies[copy] for copy, _ in batch],
                        rows=[],
                    )
                )
        self._upload()
        for copy in transfers.drops:
            if self._copies.pop(copy, None) is None:
                self._dropped.add(copy)

    def finished(self) -> Finished:
        saves, loads = [], []
        while self._saving and _arrived(self._saving[0][1]):
            numbers, copies = self._saving.popleft()
            saves += numbers
            for number, copy in zip(numbers, copies, strict=True):
                if number in self._dropped:
                    self._dropped.remove(number)
                else:
                    self._copies[number] = copy
        while self._arriving and _arrived(self._arriving[0].rows):
            batch = self._arriving.popleft()
            self._load(batch.blocks, batch.rows)
            if batch.load is not None:
                loads.append(batch.load)
        self._upload()
        return Finished(saves=saves, loads=loads)

    def wait(self) -> None:
        if self._arriving:
            jax.block_until_ready(self._arriving[0].rows)

    def _upload(self) -> None:
        while self._queued and len(self._arriving) < LOADING:
            batch = self._queued.popleft()
            batch.rows = jax.device_put(batch.copies, self._on_device)
            self._arriving.append(batch)

    def _save(self, blocks: Sequence[int]) -> tuple[jax.Array, ...]:
        return self._state.compiled["save_blocks"](self._state.kv, self._padded(blocks))

    def _load(self, blocks: Sequence[int], rows: list[jax.Array]) -> None:
        rows = [*rows, *self._padding[len(rows) :]]
        load: Any = self._state.compiled["load_blocks"]
        self._state.kv = load(self._state.kv, self._padded(blocks), *rows)

    def _padded(self, blocks: Sequence[int]) -> np.ndarray:
        """Return i32[BATCH] of `blocks`, then of indices past the end."""
        padded = np.full(BATCH, self._num_blocks, np.int32)
        padded[: len(blocks)] = blocks
        return padded


def _arrived(arrays: list[Any]) -> bool:
    return all(array.is_ready() for array in arrays)
