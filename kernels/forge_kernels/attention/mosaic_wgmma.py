"""Paged attention for NVIDIA Hopper (sm_90), by its asynchronous tensor cores and copies.

One warpgroup of a CTA, the producer, only starts the hardware's copies. It copies query rows, and
keys and values through the block table, several KV tiles ahead and across items. The other one or
two warpgroups compute. Each has 64 query rows and runs the online softmax on the tiles that they
share.

For a cache of 8 bits, two warpgroups compute the same 64 query rows and take alternate KV tiles.
One warpgroup could not keep up with the memory. Each converts its tiles to 16 bits in shared memory
while the other's tiles are multiplied. At the end of an item, the second hands its result to the
first. Scales are never multiplied into keys or values, so they may have any size. A key's scale
multiplies its scores, and a value's scale multiplies the softmax weights after they are summed.
Heads of 256 leave no registers for this, so one warpgroup does everything.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from forge_kernels.attention import mosaic_calls as gpu
from forge_kernels.attention.mosaic_kernel import PRODUCT_DTYPES, Item, Kernel
from forge_kernels.attention.plan import KV_TILE, SLICE, Plan
from forge_kernels.devices import Gpu

VALUE_COLUMNS = 64  # columns of a tile's keys or values in registers at once
OUT_COLUMNS = 64  # columns of a wide head's result in shared memory at once

# The width in bytes of the parts of an 8-bit cache's matrices in shared memory. With this width, a
# thread's place is the same in all parts and needs no register for each.
PRODUCT_WIDTH = 32


class _Shared(NamedTuple):
    """A CTA's shared memory and barriers."""

    q: Any  # [q_buffers, row_groups, ROWS, D]
    k: Any  # [turns * stages, KV_TILE, D], as in the cache
    v: Any
    out: Any  # f32[row_groups, ROWS, OUT_COLUMNS or D]
    lse: Any  # f32[row_groups, ROWS]
    q_full: Any  # barriers: the copies in have arrived
    k_full: Any
    v_full: Any
    q_free: Any  # barriers: all warpgroups have read the buffer
    k_free: Any
    v_free: Any
    v_clean: Any  # barriers: warpgroup 0 has zeroed the values beyond the sequence
    quantized: _SharedQuantized | None


class _SharedQuantized(NamedTuple):
    """The additional shared memory for a cache of 8 bits."""

    k_scale: Any  # f32[turns * stages, KV_TILE], copied with the keys
    v_scale: Any
    keys: Any  # [warpgroups, KV_TILE, D], for the tensor cores
    values: Any
    sums: Any  # f32[2, ROWS]: warpgroup 1's maximum and total
    out_free: Any  # barrier: warpgroup 1 may write its result to `out`
    out_full: Any  # barrier: warpgroup 1 has written it


@dataclass(frozen=True, kw_only=True)
class WgmmaKernel(Kernel):
    @classmethod
    def query_rows(cls, rows: int, head_dim: int, kv_dtype: Any) -> int:
        one_group = rows <= gpu.ROWS or head_dim > 128 or kv_dtype in PRODUCT_DTYPES
        return gpu.ROWS if one_group else 2 * gpu.ROWS

    @classmethod
    def ctas_per_core(cls, device: Gpu, head_dim: int, kv_dtype: Any, dtype: Any) -> int:
        del device, head_dim, kv_dtype, dtype
        return 1

    @property
    def row_groups(self) -> int:
        """The number of groups of ROWS query rows."""
        return self.geometry.query_rows // gpu.ROWS

    @property
    def stages(self) -> int:
        """The KV tiles in shared memory per turn: as many as fit and hide memory latency."""
        if self.quantized:
            return {128: 2, 256: 3}.get(self.head_dim, 4)
        return 2 if self.wide else 3

    @property
    def q_buffers(self) -> int:
        return 1 if self.row_groups == 2 or self.wide else 2

    @property
    def turns(self) -> int:
        """The number of warpgroups that take the KV tiles of the same rows in turn: 1 or 2."""
        return 2 if self.quantized and not self.wide else 1

    @property
    def warpgroups(self) -> int:
        """The number of warpgroups that compute."""
        return self.row_groups * self.turns

    def attend(
        self,
        plan: Plan,
        packed: jax.Array,  # [slices * SLICE, D]
        kv: jax.Array,  # [N, 2, K, bs, D]
        scale: jax.Array | None,  # f32[N, 2, K, bs]
        block_tables: jax.Array,
        sinks: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return f32[num_parts, SLICE, D] and log2 of sums, f32[partial_items, query rows]."""
        g, D = self.geometry, self.head_dim
        pieces = KV_TILE // self.piece
        room = g.tile_slices - 1  # every tile is copied whole, even the last one
        packed = jnp.pad(packed.reshape(-1, SLICE, D), ((0, room), (0, 0), (0, 0)))
        out_columns = OUT_COLUMNS if self.wide else D
        slots = self.turns * self.stages
        kv_width = VALUE_COLUMNS if self.quantized else 128
        arrivals = 2 * pieces if self.quantized else pieces
        shared = _Shared(
            q=gpu.matrix(
                (self.q_buffers, self.row_groups, gpu.ROWS, D),
                self.key_dtype,
                width=PRODUCT_WIDTH if self.quantized else 128,
            ),
            k=gpu.matrix((slots, KV_TILE, D), self.kv_dtype, width=kv_width),
            v=gpu.matrix((slots, KV_TILE, D), self.kv_dtype, width=kv_width),
            out=gpu.matrix((self.row_groups, gpu.ROWS, out_columns), jnp.float32),
            lse=gpu.vector((self.row_groups, gpu.ROWS), jnp.float32),
            q_full=gpu.barriers(self.q_buffers, g.tile_slices),
            k_full=gpu.barriers(slots, arrivals),
            v_full=gpu.barriers(slots, arrivals),
            q_free=gpu.barriers(self.q_buffers, self.warpgroups),
            k_free=gpu.barriers(slots, self.row_groups),
            v_free=gpu.barriers(slots, self.row_groups),
            v_clean=gpu.barriers(slots, 1),
            quantized=self._shared_quantized(slots) if self.quantized else None,
        )
        lse_shape = (max(g.partial_items, 1), self.row_groups, gpu.ROWS)
        # [pieces of all blocks, keys or values, heads]
        cache = [kv.reshape(-1, self.piece, D)]
        if scale is not None:
            cache.append(scale.reshape(-1, self.piece))
        extra = () if sinks is None else (sinks,)
        parts, lse = gpu.launch(
            self._attend,
            (plan.tiles, plan.ctas, block_tables, packed, *cache, *extra),
            (
                jax.ShapeDtypeStruct((self.num_parts, SLICE, D), jnp.float32),
                jax.ShapeDtypeStruct(lse_shape, jnp.float32),
            ),
            name="forge_attention",
            grid=g.ctas,
            warpgroups=self.warpgroups + 1,
            shared=shared,
            interpret=self.interpret,
        )
        return parts, lse

    def _shared_quantized(self, slots: int) -> _SharedQuantized:
        shape = (self.warpgroups, KV_TILE, self.head_dim)
        return _SharedQuantized(
            k_scale=gpu.vector((slots, KV_TILE), jnp.float32),
            v_scale=gpu.vector((slots, KV_TILE), jnp.float32),
            keys=gpu.matrix(shape, self.key_dtype, width=PRODUCT_WIDTH),
            values=gpu.matrix(shape, self.value_dtype, width=PRODUCT_WIDTH),
            sums=gpu.vector((2, gpu.ROWS), jnp.float32),
            out_free=gpu.barriers(1, 1),
            out_full=gpu.barriers(1, 1),
        )

    def _attend(self, cta, warpgroup, inputs, outputs, allocated):
        tiles, ctas, block_tables, q, *cache = inputs
        sinks = cache.pop() if self.has_sinks else None
        shared = _Shared(*allocated)

        @pl.when(warpgroup < self.warpgroups)
        def _():
            if self.warpgroups > 1:
                gpu.set_max_registers(232, action="increase")
            step = functools.partial(self._compute, warpgroup, shared, sinks, outputs)
            turn = 0 if self.turns == 1 else warpgroup
            self._walk(cta, tiles, ctas, step, (turn,))
            gpu.wait_copied_out()

        @pl.when(warpgroup == self.warpgroups)
        def _():
            if self.warpgroups > 1:
                gpu.set_max_registers(40, action="decrease")
            step = functools.partial(self._produce, shared, block_tables, q, cache)
            items, kv_tiles = self._walk(cta, tiles, ctas, step, tuple(range(self.turns)))

            # Wait until everything is read, because barriers must outlive all arrivals.
            for turn, count in enumerate(kv_tiles):
                for barriers in (shared.k_free, shared.v_free):

                    def drain(i, barriers=barriers, turn=turn):
                        gpu.wait(barriers.at[self._slot(turn, i)])

                    gpu.loop(jnp.maximum(count - self.stages, 0), count, drain)

            def drain_q(i):
                gpu.wait(shared.q_free.at[lax.rem(i, jnp.int32(self.q_buffers))])

            gpu.loop(jnp.maximum(items - self.q_buffers, 0), items, drain_q)

    def _slot(self, turn, count):
        """Return the slot in shared memory of a turn's KV tile number `count`."""
        slot = lax.rem(count, jnp.int32(self.stages))
        return slot if self.turns == 1 else turn * self.stages + slot

    def _part(self, item: Item, turn):
        """Return the first of an item's KV tiles that a turn takes, and how many it takes.

        A turn takes all tiles or every other one. The choice depends on positions and the head
        only, and so do a row's sums.
        """
        if self.turns == 1:
            return jnp.int32(0), item.size
        first = (item.low + item.head + turn) & 1
        return first, (item.size - first + 1) >> 1

    def _produce(self, shared: _Shared, block_tables, q, cache, read, index, kv_tiles):
        g, piece, item = self.geometry, self.piece, read()
        buffer = lax.rem(index, jnp.int32(self.q_buffers))

        @pl.when(index >= self.q_buffers)
        def _():
            gpu.wait(shared.q_free.at[buffer])

        per_warpgroup = gpu.ROWS // SLICE
        for j in range(g.tile_slices):
            rows = shared.q.at[buffer, j // per_warpgroup, pl.ds(j % per_warpgroup * SLICE, SLICE)]
            gpu.copy_in(q.at[item.q_slice + j], rows, shared.q_full.at[buffer])

        def over_kv_tiles(i):
            if self.turns == 1:
                turn, before = jnp.int32(0), kv_tiles[0] + i
            else:
                turn = (item.low + item.head + i) & 1
                before = jnp.where(turn == 0, *kv_tiles) + (i >> 1)
            slot = self._slot(turn, before)
            position = (item.low + i) * KV_TILE

            @pl.when(before >= self.stages)
            def _():
                gpu.wait(shared.k_free.at[slot])
                gpu.wait(shared.v_free.at[slot])

            source = functools.partial(self._source, item, block_tables, position)

            def copy(j, source, array, buffer, full):
                tokens = buffer.at[slot, pl.ds(j * piece, piece)]
                gpu.copy_in(array.at[source], tokens, full.at[slot])

            to_values = self._to_values
            if shared.quantized is None:
                sources = [source(j) for j in range(KV_TILE // piece)]
                for j, at in enumerate(sources):
                    copy(j, at, cache[0], shared.k, shared.k_full)
                for j, at in enumerate(sources):
                    copy(j, at + to_values, cache[0], shared.v, shared.v_full)
                return
            data, scale = cache
            for j in range(KV_TILE // piece):  # keeping all sources would take too many registers
                at = source(j)
                copy(j, at, data, shared.k, shared.k_full)
                copy(j, at, scale, shared.quantized.k_scale, shared.k_full)
                copy(j, at + to_values, data, shared.v, shared.v_full)
                copy(j, at + to_values, scale, shared.quantized.v_scale, shared.v_full)

        gpu.loop(0, item.size, over_kv_tiles)

    def _compute(self, warpgroup, shared: _Shared, sinks, outputs, read, index, kv_tiles):
        item = read()
        buffer = lax.rem(index, jnp.int32(self.q_buffers))
        gpu.wait(shared.q_full.at[buffer])
        turn, row_group = (0, warpgroup) if self.turns == 1 else (warpgroup, 0)
        q = shared.q.at[buffer, row_group]
        step = functools.partial(self._kv_tile, warpgroup, shared, q, item, kv_tiles)
        plain = self._unmasked(item)
        first, count = self._part(item, turn)
        if self.turns == 2:
            plain = (plain - first + 1) >> 1
        state = self._start()
        if self.geometry.window is None:
            state = lax.fori_loop(0, plain, functools.partial(step, masked=False), state)
        state = lax.fori_loop(plain, count, functools.partial(step, masked=True), state)
        gpu.arrive(shared.q_free.at[buffer])
        finish = functools.partial(self._finish, row_group, shared, sinks, outputs)
        if self.turns == 1:
            finish(read(), state)
            return

        @pl.when(warpgroup == 0)
        def _():
            finish(read(), self._take_over(shared, state))

        @pl.when(warpgroup == 1)
        def _():
            self._hand_over(shared, state)

    def _hand_over(self, shared: _Shared, state):
        """Hand warpgroup 1's result to warpgroup 0 through the buffer of the item's result."""
        assert shared.quantized is not None
        acc, top, total = state
        sums = shared.quantized.sums
        gpu.wait(shared.quantized.out_free.at[0])
        shared.out[0], sums[0], sums[1] = acc, top, total
        gpu.arrive(shared.quantized.out_full.at[0])

    def _take_over(self, shared: _Shared, state):
        """Merge warpgroup 0's state with warpgroup 1's."""
        assert shared.quantized is not None
        acc, top, total = state
        gpu.wait_copied_out(read_only=True)
        gpu.arrive(shared.quantized.out_free.at[0])
        gpu.wait(shared.quantized.out_full.at[0])
        their_top = gpu.load_rows(shared.quantized.sums.at[0])
        their_total = gpu.load_rows(shared.quantized.sums.at[1])
        new_top = jnp.maximum(top, their_top)
        mine, theirs = jnp.exp2(top - new_top), jnp.exp2(their_top - new_top)
        acc = acc * gpu.columns(mine, self.head_dim)
        acc = acc + gpu.load_matrix(shared.out.at[0]) * gpu.columns(theirs, self.head_dim)
        return acc, new_top, total * mine + their_total * theirs

    def _finish(self, row_group, shared: _Shared, sinks, outputs, item: Item, state):
        """Copy an item's result out. `item` is read again to save registers in the loops."""
        (parts, lse), (acc, top, total) = outputs, state
        factor, log_sum = self._sums(sinks, row_group, item, top, total)
        out = shared.out.at[row_group]
        first = row_group * (gpu.ROWS // SLICE)
        width = out.shape[1]
        for column in range(0, self.head_dim, width):
            gpu.wait_copied_out(read_only=True)
            out[...] = acc[:, column : column + width] * gpu.columns(factor, width)
            if column == 0:
                shared.lse[row_group] = log_sum
            gpu.commit()

            def copy_slice(j, column=column):
                rows = out.at[pl.ds(pl.multiple_of(j * SLICE, SLICE), SLICE)]
                target = parts.at[item.target + first + j, :, pl.ds(column, width)]
                gpu.copy_out(rows, target)

            gpu.loop(0, jnp.clip(item.slices - first, 0, gpu.ROWS // SLICE), copy_slice)

        @pl.when(item.partial >= 0)
        def _():
            gpu.copy_out(shared.lse.at[row_group], lse.at[item.partial, row_group])

    def _kv_tile(self, warpgroup, shared: _Shared, q, item: Item, kv_tiles, i, state, *, masked):
        """Continue the softmax over the warpgroup's KV tile number i of the item."""
        turn = 0 if self.turns == 1 else warpgroup
        slot = self._slot(turn, kv_tiles[0] + i)
        tile = i if self.turns == 1 else self._part(item, turn)[0] + 2 * i
        first_key = (item.low + tile) * KV_TILE
        row_group = warpgroup if self.turns == 1 else 0
        softmax = functools.partial(self._softmax, row_group, item, masked)
        if self.quantized:
            exists = item.kv_len - first_key if masked else None
            return self._kv_tile_8_bits(
                warpgroup, shared, q, slot, first_key, exists, softmax, state
            )
        if masked:
            # Waiting here is cheap, because few registers are in use.
            gpu.wait(shared.v_full.at[slot])
            self._clean_values(warpgroup, shared, slot, item.kv_len - first_key)
        gpu.wait(shared.k_full.at[slot])
        scores = gpu.times_transposed(q, shared.k.at[slot])
        gpu.arrive(shared.k_free.at[slot])
        weights, (acc, *sums) = softmax(first_key, scores * self._score_factor, state)
        if not masked:
            gpu.wait(shared.v_full.at[slot])
        values = shared.v.at[slot]
        acc = gpu.add_product(acc, weights.astype(self.dtype), values, self.interpret)
        gpu.arrive(shared.v_free.at[slot])
        return acc, *sums

    def _kv_tile_8_bits(
        self, warpgroup, shared: _Shared, q, slot, first_key, exists, softmax, state
    ):
        """Process a KV tile of 8 bits, converted to 16 bits without its scales.

        Scales may have any size. A key's scale multiplies its scores, and a value's scale
        multiplies its weights after they are summed. If `exists` is given, tokens from that number
        on do not exist and may be NaN.
        """
        extra = shared.quantized
        assert extra is not None
        keys, values = extra.keys.at[warpgroup], extra.values.at[warpgroup]
        gpu.wait(shared.k_full.at[slot])
        if not self.wide:
            # The commit at the end of a conversion orders these reads before the next copy.
            k_scale = gpu.load_columns(extra.k_scale.at[slot]) * self._score_factor
            gpu.convert(shared.k.at[slot], keys, VALUE_COLUMNS)
            gpu.arrive(shared.k_free.at[slot])

            def convert_values():
                gpu.wait(shared.v_full.at[slot])
                self._convert_values(shared.v.at[slot], values, exists)

            scores = gpu.times_transposed(q, keys, convert_values)
            weights, (acc, *sums) = softmax(first_key, scores * gpu.rows(k_scale), state)
            v_scale = self._value_scale(extra.v_scale.at[slot], exists)
            weights = (weights * gpu.rows(v_scale)).astype(self.value_dtype)
            gpu.commit()
            gpu.arrive(shared.v_free.at[slot])
            return gpu.add_product(acc, weights, values, self.interpret), *sums

        # The results of wide heads leave registers for only half as many scores.
        gpu.convert(shared.k.at[slot], keys, VALUE_COLUMNS)
        gpu.wait(shared.v_full.at[slot])
        self._convert_values(shared.v.at[slot], values, exists)

        def half(i, state):
            start = pl.multiple_of(i * (KV_TILE // 2), KV_TILE // 2)
            tokens = pl.ds(start, KV_TILE // 2)
            scores = gpu.times_transposed(q, keys.at[tokens])
            k_scale = gpu.load_columns(extra.k_scale.at[slot, tokens]) * self._score_factor
            weights, (acc, *sums) = softmax(first_key + start, scores * gpu.rows(k_scale), state)
            v_scale = self._value_scale(
                extra.v_scale.at[slot, tokens], None if exists is None else exists - start
            )
            weights = (weights * gpu.rows(v_scale)).astype(self.value_dtype)
            return gpu.add_product(acc, weights, values.at[tokens], self.interpret), *sums

        state = lax.fori_loop(0, 2, half, state)
        gpu.commit()
        gpu.arrive(shared.k_free.at[slot])
        gpu.arrive(shared.v_free.at[slot])
        return state

    def _value_scale(self, scale, exists):
        """Load the scales, f32[n], with 0 for tokens from number `exists` on if that is given."""
        scale = gpu.load_columns(scale)
        if exists is not None:
            scale = jnp.where(gpu.column_index(scale.shape[0]) < exists, scale, 0.0)
        return scale

    def _convert_values(self, source, values, exists):
        gpu.convert(source, values, VALUE_COLUMNS)
        if exists is not None and self.kv_dtype != jnp.int8:  # int8 has no NaN

            @pl.when(exists < KV_TILE)
            def _():
                self._clean(values, exists)

    def _clean_values(self, warpgroup, shared: _Shared, slot, num_tokens):
        """Clean values that the warpgroups share; warpgroup 0 does it for all."""

        @pl.when((num_tokens < KV_TILE) & (warpgroup == 0))
        def _():
            self._clean(shared.v.at[slot], num_tokens)
            if self.warpgroups > 1:
                gpu.arrive(shared.v_clean.at[slot])

        if self.warpgroups > 1:

            @pl.when((num_tokens < KV_TILE) & (warpgroup != 0))
            def _():
                gpu.wait(shared.v_clean.at[slot])

    def _clean(self, values, num_tokens):
        """Zero the values beyond the sequence, which may be NaN, because 0 * NaN is NaN."""
        for column in range(0, self.head_dim, VALUE_COLUMNS):
            size = min(VALUE_COLUMNS, self.head_dim - column)
            part = values.at[:, pl.ds(column, size)]
            exists = gpu.index((KV_TILE, size), 0) < num_tokens
            part[...] = jnp.where(exists, part[...], jnp.zeros((), self.value_dtype))
        gpu.commit()
