"""Paged attention for NVIDIA GPUs other than Hopper: sm_80, sm_89, sm_100 and sm_120.

A CTA is one warpgroup that copies and computes. It starts the copies of the next KV tile, waits for
those of the current one, and continues the online softmax of 64 query rows. Its products are `mma`
instructions, which all these GPUs have. Their operands are in registers. Queries stay there for a
whole item, unless heads are wide. Keys and values are loaded a few rows at a time.

Copies are the hardware's from sm_90 on, and arrive at barriers. Before, they are `cp.async`, which
threads wait for.

The tiles of an 8-bit cache are converted to 16 bits in shared memory, without their scales. A key's
scale multiplies its scores, and a value's scale multiplies the weights after they are summed.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from forge_kernels.attention import mosaic_calls as gpu
from forge_kernels.attention.mosaic_kernel import PRODUCT_DTYPES, Item, Kernel
from forge_kernels.attention.plan import KV_TILE, SLICE, Plan
from forge_kernels.devices import Gpu

OUT_COLUMNS = 32  # columns of a result in shared memory at once
VALUE_ROWS, VALUE_COLUMNS = 16, 128  # part of a tile's values in registers at once
RESERVED_BYTES = 2048  # shared memory per CTA: barriers, alignment and CUDA's own


class _Shared(NamedTuple):
    """A CTA's shared memory and barriers."""

    k: Any  # [stages, KV_TILE, D], as in the cache
    v: Any
    out: Any  # f32[ROWS, OUT_COLUMNS]
    full: Any  # barriers: the copies in have arrived; None without barriers
    keys: Any  # [KV_TILE, D], of 8 bits in the cache, for the products; None for 16 bits
    values: Any  # as `keys`, or None if the same memory can be used
    k_scale: Any  # f32[stages, KV_TILE], copied with the keys; None if tiles are in one block
    v_scale: Any


class _Inputs(NamedTuple):
    tiles: Any
    ctas: Any
    block_tables: Any
    q: Any  # [rows of all slices, D]
    kv: Any  # [pieces of blocks x keys or values x heads, tokens, D]
    scale: Any = None  # f32 of the same shape without D
    sinks: Any = None  # f32[K, 1, ROWS]


def mma_unsupported(
    head_dim: int, block_size: int, dtype: Any, kv_dtype: Any, device: Gpu
) -> str | None:
    """Return why this kernel does not support such a cache, or None if it does."""
    needed, limit = shared_bytes(head_dim, kv_dtype, dtype), device.shared_bytes
    if needed > limit:
        return (
            f"heads of {head_dim} with queries of {dtype} and a cache of {kv_dtype} need {needed} "
            f"bytes of shared memory, and this GPU has {limit}"
        )
    piece, row = math.gcd(block_size, KV_TILE), head_dim * jnp.dtype(kv_dtype).itemsize
    if kv_dtype in PRODUCT_DTYPES and piece < KV_TILE:  # the copy of its scales would be too short
        return (
            f"on this GPU an 8-bit cache needs a block size that is a multiple of {KV_TILE}, not "
            f"{block_size}"
        )
    if device.copies_to_barriers or kv_dtype in PRODUCT_DTYPES:
        return None
    if gpu.copy_width(piece, row, 128) is None:
        return (
            f"before sm_90 heads of {head_dim} need a block size that is a multiple of 32, not "
            f"{block_size}"
        )
    return None


class MmaKernel(Kernel):
    @classmethod
    def query_rows(cls, rows: int, head_dim: int, kv_dtype: Any) -> int:
        del rows, head_dim, kv_dtype
        return gpu.ROWS

    @classmethod
    def ctas_per_core(cls, device: Gpu, head_dim: int, kv_dtype: Any, dtype: Any) -> int:
        """Return 2 if shared memory suffices, so that one computes while the other waits."""
        stages = _stages(device, head_dim, kv_dtype, dtype)
        needed = shared_bytes(head_dim, kv_dtype, dtype, stages)
        return 2 if head_dim <= 128 and 2 * needed <= device.shared_bytes else 1

    @property
    def barriers(self) -> bool:
        """True if copies arrive at barriers, as they always do in the interpreter."""
        return self.device.copies_to_barriers or self.interpret is not None

    @property
    def key_dtype(self) -> Any:
        return self.dtype

    @property
    def value_dtype(self) -> Any:
        return jnp.bfloat16 if self.quantized else self.dtype  # weights with scales need its range

    @property
    def stages(self) -> int:
        return _stages(self.device, self.head_dim, self.kv_dtype, self.dtype)

    @property
    def key_columns(self) -> int:
        """The columns of a tile's keys in registers at once: fewer if others need registers."""
        return 64 >> (self.wide + self.quantized)

    @property
    def pieces(self) -> int:
        """The copies of a tile's keys, or of its values."""
        return KV_TILE // self.piece

    def attend(
        self,
        plan: Plan,
        packed: jax.Array,
        kv: jax.Array,
        scale: jax.Array | None,
        block_tables: jax.Array,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        g, D = self.geometry, self.head_dim
        packed = jnp.pad(packed, ((0, gpu.ROWS - SLICE), (0, 0)))  # tiles are loaded whole
        inputs = _Inputs(plan.tiles, plan.ctas, block_tables, packed, kv.reshape(-1, self.piece, D))
        if scale is not None:
            inputs = inputs._replace(scale=scale.reshape(-1, self.piece))
        inputs = inputs._replace(sinks=sinks)
        parts, lse = gpu.launch(
            self._attend,
            [each for each in inputs if each is not None],
            (
                jax.ShapeDtypeStruct((self.num_parts, SLICE, D), jnp.float32),
                jax.ShapeDtypeStruct((max(g.partial_items, 1), gpu.ROWS), jnp.float32),
            ),
            name="forge_attention",
            grid=g.ctas,
            warpgroups=1,
            shared=[each for each in self._shared if each is not None],
            interpret=self.interpret,
            by_lane=True,
        )
        return parts, lse

    @property
    def _shared(self) -> _Shared:
        """The description of a CTA's shared memory."""
        row = self.head_dim * jnp.dtype(self.kv_dtype).itemsize
        columns = 64 >> self.wide if self.quantized else self.key_columns
        width = math.gcd(columns * jnp.dtype(self.kv_dtype).itemsize, row)
        if not self.barriers:
            width = gpu.copy_width(self.piece, row, width) or width
        tile = gpu.matrix((self.stages, KV_TILE, self.head_dim), self.kv_dtype, width=width)
        scale = None
        if self.quantized and self.pieces > 1:
            scale = gpu.vector((self.stages, KV_TILE), jnp.float32)
        arrivals = (2 if scale is None else 4) * self.pieces
        return _Shared(
            k=tile,
            v=tile,
            out=gpu.vector((gpu.ROWS, OUT_COLUMNS), jnp.float32),
            full=gpu.barriers(self.stages, arrivals) if self.barriers else None,
            keys=self._products(self.key_dtype) if self.quantized else None,
            values=self._products(self.value_dtype) if self.key_dtype != self.value_dtype else None,
            k_scale=scale,
            v_scale=scale,
        )

    def _products(self, dtype: Any) -> Any:
        return gpu.matrix((KV_TILE, self.head_dim), dtype, width=2 * self.key_columns)

    def _attend(self, cta, warpgroup, inputs, outputs, allocated):
        del warpgroup
        *inputs, sinks = inputs if self.has_sinks else (*inputs, None)
        inputs, remaining = _Inputs(*inputs)._replace(sinks=sinks), iter(allocated)
        described = self._shared
        shared = _Shared(*(None if each is None else next(remaining) for each in described))
        step = functools.partial(self._compute, inputs, shared, outputs)
        self._walk(cta, inputs.tiles, inputs.ctas, step, (0,))

    def _compute(self, inputs: _Inputs, shared: _Shared, outputs, read, index, kv_tiles):
        del index
        item = read()
        copy = functools.partial(self._copy, inputs, shared, item, kv_tiles[0])
        if self.stages > 1:
            copy(jnp.int32(0))

        def query(column, size, i):
            q_slice = item.q_slice + gpu.varying_zero(i)
            rows = pl.ds(pl.multiple_of(q_slice * SLICE, SLICE), gpu.ROWS)
            return gpu.load_left(inputs.q.at[rows, pl.ds(column, size)])

        if not (self.wide or self.quantized):
            loaded = {c: query(c, size, jnp.int32(0)) for c, size in self._key_columns}

            def query(column, size, i):
                del size, i
                return loaded[column]

        step = functools.partial(self._kv_tile, inputs, shared, query, item, kv_tiles[0], copy)
        acc, *sums = self._start()
        state = (self._column_parts(acc), *sums)
        # A second loop would need registers for its addresses, which heads of 256 do not have.
        plain = jnp.int32(0) if self.wide else self._unmasked(item)
        if self.geometry.window is None and not self.wide:
            state = lax.fori_loop(0, plain, functools.partial(step, masked=False), state)
        state = lax.fori_loop(plain, item.size, functools.partial(step, masked=True), state)
        self._finish(inputs.sinks, shared, outputs, read(), state)

    def _column_parts(self, x):
        """Split [ROWS, D] into parts of VALUE_COLUMNS columns, to load values for one at a time."""
        return tuple(x[:, c : c + VALUE_COLUMNS] for c in range(0, self.head_dim, VALUE_COLUMNS))

    @property
    def _key_columns(self) -> list[tuple[int, int]]:
        """The first column and the number of each part of the keys that is multiplied at once."""
        size = self.key_columns
        return [
            (column, min(size, self.head_dim - column)) for column in range(0, self.head_dim, size)
        ]

    def _copy(self, inputs: _Inputs, shared: _Shared, item: Item, first_slot, i):
        """Start the copies of the item's KV tile number i."""
        slot = self._slot(first_slot + i)
        full = shared.full.at[slot] if self.barriers else None
        for j in range(self.pieces):
            keys = self._source(item, inputs.block_tables, (item.low + i) * KV_TILE, j)
            values, tokens = keys + self._to_values, pl.ds(j * self.piece, self.piece)
            gpu.copy_in(inputs.kv.at[keys], shared.k.at[slot, tokens], full)
            gpu.copy_in(inputs.kv.at[values], shared.v.at[slot, tokens], full)
            if shared.k_scale is not None:
                gpu.copy_in(inputs.scale.at[keys], shared.k_scale.at[slot, tokens], full)
                gpu.copy_in(inputs.scale.at[values], shared.v_scale.at[slot, tokens], full)

    def _slot(self, i):
        """Return the place in shared memory of the CTA's KV tile number i."""
        return lax.rem(i, jnp.int32(self.stages)) if self.stages > 1 else gpu.varying_zero(i)

    def _wait(self, shared: _Shared, item: Item, slot, copy, i):
        """Wait for the copies of the item's KV tile number i, and start those of the next."""
        self._synchronize()  # all have read the slot that is filled next
        ahead = self.stages - 1
        more = i + ahead < item.size

        @pl.when(more)
        def _():
            copy(i + ahead)
            if not self.barriers:
                gpu.wait_copied_in(2 * self.pieces * ahead)

        if self.barriers:
            gpu.wait(shared.full.at[slot])
        elif ahead:

            @pl.when(jnp.logical_not(more))
            def _():
                gpu.wait_copied_in(0)

    def _synchronize(self):
        """Wait until all threads' reads and writes of shared memory are done."""
        if self.barriers:
            gpu.commit()
        else:
            gpu.synchronize()

    def _scale(self, inputs: _Inputs, shared, item: Item, slot, i, from_keys):
        """Return scales of the item's KV tile number i: f32[KV_TILE].

        Args:
          shared: the scales of the keys or values in shared memory, or None.
          from_keys: the places from the keys' scales to these in device memory.
        """
        if shared is not None:
            return gpu.load_columns(shared.at[slot])
        keys = self._source(item, inputs.block_tables, (item.low + i) * KV_TILE, 0)
        return gpu.load_columns(inputs.scale.at[keys + from_keys], device_memory=True)

    def _kv_tile(
        self, inputs: _Inputs, shared: _Shared, query, item, first_slot, copy, i, state, *, masked
    ):
        """Continue the softmax over the item's KV tile number i."""
        slot = self._slot(first_slot + i)
        self._wait(shared, item, slot, copy, i)
        query = functools.partial(query, i=i)
        first_key = (item.low + i) * KV_TILE
        keys, values = shared.k.at[slot], shared.v.at[slot]
        exists = item.kv_len - first_key if masked else None
        if not self.quantized:
            scores = self._scores(keys, query) * self._score_factor
            weights, (acc, *sums) = self._softmax(0, item, masked, first_key, scores, state)
            return self._add_values(acc, weights.astype(self.dtype), values, exists), *sums
        scale = functools.partial(self._scale, inputs, item=item, slot=slot, i=i)
        scores = self._scores(self._converted(keys, shared.keys), query)
        k_scale = scale(shared=shared.k_scale, from_keys=0) * self._score_factor
        scores = scores * gpu.rows(k_scale)
        weights, (acc, *sums) = self._softmax(0, item, masked, first_key, scores, state)
        v_scale = scale(shared=shared.v_scale, from_keys=self._to_values)
        if exists is not None:
            v_scale = jnp.where(gpu.column_index(KV_TILE) < exists, v_scale, 0.0)
        weights = (weights * gpu.rows(v_scale)).astype(self.value_dtype)
        target = shared.keys if shared.values is None else shared.values
        values = self._converted(values, target)
        return self._add_values(acc, weights, values, exists), *sums

    def _scores(self, keys, query):
        """Multiply the queries by the keys of a tile: f32[ROWS, KV_TILE]."""
        scores = gpu.full((gpu.ROWS, KV_TILE), 0.0)
        for column, size in self._key_columns:
            part = gpu.load_right_transposed(keys.at[:, pl.ds(column, size)])
            scores = gpu.multiply_add(scores, query(column, size), part, self.interpret)
        return scores

    def _converted(self, tile, target):
        """Convert keys or values of 8 bits to the type of `target`, and return it."""
        self._synchronize()  # all have read the last ones
        gpu.convert_8_bits(tile, target, self.device.capability)
        self._synchronize()
        return target

    def _add_values(self, acc, weights, values, exists):
        """Add weights [ROWS, KV_TILE] times values; those from number `exists` on may be NaN."""
        acc = list(acc)
        for row in range(0, KV_TILE, VALUE_ROWS):
            left = gpu.as_left(weights[:, row : row + VALUE_ROWS], self.interpret)
            for i, sum_of_part in enumerate(acc):
                columns = pl.ds(i * VALUE_COLUMNS, sum_of_part.shape[1])
                right = gpu.load_right(values.at[pl.ds(row, VALUE_ROWS), columns])
                if exists is not None:  # 0 * NaN is NaN
                    index = gpu.right_row_index(right.shape, right.dtype)
                    right = jnp.where(index < exists - row, right, jnp.zeros((), right.dtype))
                acc[i] = gpu.multiply_add(sum_of_part, left, right, self.interpret)
        return tuple(acc)

    def _finish(self, sinks, shared: _Shared, outputs, item: Item, state):
        """Store an item's slices through shared memory, because a tile may have fewer."""
        (parts, lse), (acc, top, total) = outputs, state
        factor, log_sum = self._sums(sinks, 0, item, top, total)
        out = shared.out
        for column in range(0, self.head_dim, OUT_COLUMNS):
            part, first = acc[column // VALUE_COLUMNS], column % VALUE_COLUMNS
            size = min(OUT_COLUMNS, self.head_dim - column)
            self._synchronize()  # all have stored the columns before
            part = part[:, first : first + size]
            out.at[:, pl.ds(0, size)][...] = part * gpu.columns(factor, size)
            self._synchronize()

            def store_slice(j, column=column, size=size):
                rows = out.at[pl.ds(pl.multiple_of(j * SLICE, SLICE), SLICE), pl.ds(0, size)]
                target = parts.at[item.target + j, :, pl.ds(column, size)]
                gpu.store_slice(target, gpu.load_slice(rows))

            gpu.loop(0, item.slices, store_slice)

        @pl.when(item.partial >= 0)
        def _():
            lse.at[item.partial][...] = log_sum


def _stages(device: Gpu, head_dim: int, kv_dtype: Any, dtype: Any) -> int:
    """Return the KV tiles in shared memory at once: 2, or 1 if no more fit."""
    return 2 if shared_bytes(head_dim, kv_dtype, dtype, 2) <= device.shared_bytes else 1


def shared_bytes(head_dim: int, kv_dtype: Any, dtype: Any, stages: int = 1) -> int:
    """Return the shared memory of a CTA, with a margin, for queries of `dtype`."""
    values = KV_TILE * head_dim
    tiles = 2 * stages * values * jnp.dtype(kv_dtype).itemsize
    extra = 0
    if kv_dtype in PRODUCT_DTYPES:
        extra = 2 * values * (1 if dtype == jnp.bfloat16 else 2) + 8 * stages * KV_TILE
    return tiles + extra + 4 * gpu.ROWS * OUT_COLUMNS + RESERVED_BYTES
