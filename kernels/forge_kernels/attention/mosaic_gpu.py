"""Paged attention for NVIDIA Hopper: two Pallas kernels, by the Mosaic GPU back end.

The first has one thread block (CTA) per multiprocessor, and each walks its part of the plan (see
`plan`). One warpgroup, the producer, does nothing but start the hardware's copies: query rows, and
the blocks of keys and values by way of the block table, several KV tiles ahead and across the
borders of items. The others, one or two, compute: 64 query rows each, with the online softmax of
FlashAttention (Dao et al. 2022, section 3.1), on tiles that they share. The tokens' query heads of
one key/value head stand in the rows one after the other, so a decode, the verification of drafts
and a chunk of a prompt differ in numbers of the plan only.

The second adds up the results of units that were cut (FlashDecoding's last step), in order.

What lies beyond a sequence may be NaN: such scores are selected away, and such values are replaced
by zero in shared memory before they are multiplied by the zeros of the softmax.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from forge_kernels.attention import mosaic_calls as gpu
from forge_kernels.attention.plan import KV_TILE, SLICE, Cta, Geometry, Plan, Sum, Tile, make_plan

HEAD_DIMS = (64, 80, 96, 128, 256)
MULTIPROCESSORS = 132  # of an H100 or H200 (SXM)
NO_SCORE = -1e30  # the running maximum before any score: finite, so that exp2(-inf - it) is 0
LOG2_E = math.log2(math.e)
VALUE_COLUMNS = 64  # of a tile's values that are in registers at once
OUT_COLUMNS = 64  # of a wide head's result that are in shared memory at once


def unsupported(
    heads: int, kv_heads: int, head_dim: int, block_size: int, q_dtype: Any, kv_dtype: Any
) -> str | None:
    """Why this attention cannot be used for such a cache; None if it can."""
    if kv_dtype not in (jnp.bfloat16, jnp.float16) or q_dtype != kv_dtype:
        return f"it is for bfloat16 or float16, not {q_dtype} with a cache of {kv_dtype}"
    if head_dim not in HEAD_DIMS:
        return f"a head size of {head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    if block_size % 8:
        return f"a block size of {block_size} is no multiple of 8"
    if heads // kv_heads > gpu.ROWS:
        return f"{heads // kv_heads} query heads to one are more than {gpu.ROWS}"
    return None


def mosaic_attention(
    q: jax.Array,  # bf16 or f16[T, H, D]
    kv: jax.Array,  # the same type[N, 2, K, bs, D]
    block_tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
    *,
    sm_scale: float,
    max_q_len: int,
    uniform: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> jax.Array:  # q.dtype[T, H, D]; rows of no sequence are zero
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = kv.shape[2:4]
    warpgroups = 1 if max_q_len * (heads // kv_heads) <= gpu.ROWS or head_dim > 128 else 2
    geometry = Geometry(
        tokens=tokens,
        seqs=kv_lens.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        max_context=block_tables.shape[1] * block_size,
        max_q_len=max_q_len,
        query_rows=warpgroups * gpu.ROWS,
        ctas=multiprocessors or _multiprocessors(),
        window=window,
        uniform=uniform,
    )
    kernel = _Kernel(
        geometry=geometry,
        head_dim=head_dim,
        dtype=q.dtype,
        block_size=block_size,
        warpgroups=warpgroups,
        stages=2 if head_dim > 128 else 3,
        q_buffers=1 if warpgroups == 2 or head_dim > 128 else 2,
        sm_scale=sm_scale,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    plan = make_plan(geometry, kv_lens, cu_q_lens, num_seqs)
    rows = q.reshape(tokens * heads, head_dim)
    packed = rows.at[plan.pack].get(mode="fill", fill_value=0)
    parts, lse = kernel.attend(plan, packed, kv, block_tables)
    summed = kernel.add_up(plan, parts, lse)
    return summed.reshape(-1, head_dim).at[plan.unpack].get(mode="fill", fill_value=0)


# Traced and lowered once for all the layers of a model; XLA makes one plan of their equal plans.
jitted_attention = jax.jit(
    mosaic_attention,
    static_argnames=(
        "sm_scale",
        "max_q_len",
        "uniform",
        "window",
        "soft_cap",
        "multiprocessors",
        "interpret",
    ),
)


def _multiprocessors() -> int:
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else MULTIPROCESSORS


class _Item(NamedTuple):
    """What a CTA does for one unit: scalars."""

    seq: jax.Array
    head: jax.Array
    position: jax.Array  # of the first token
    kv_len: jax.Array
    low: jax.Array  # KV tile
    size: jax.Array  # KV tiles
    q_slice: jax.Array
    slices: jax.Array
    target: jax.Array  # slice of the results
    partial: jax.Array  # which of the partial items; -1: it is a whole unit


class _Shared(NamedTuple):
    """A CTA's shared memory and barriers."""

    q: Any  # [q_buffers, warpgroups, ROWS, D]
    k: Any  # [stages, KV_TILE, D]
    v: Any
    out: Any  # f32[warpgroups, ROWS, OUT_COLUMNS or D]
    lse: Any  # f32[warpgroups, ROWS]
    q_full: Any  # barriers: the copies in have arrived
    k_full: Any
    v_full: Any
    q_free: Any  # barriers: all warpgroups have read it
    k_free: Any
    v_free: Any
    v_clean: Any  # barriers: warpgroup 0 has put zeros where no token is


@dataclass(frozen=True, kw_only=True)
class _Kernel:
    geometry: Geometry
    head_dim: int
    dtype: Any
    block_size: int
    warpgroups: int  # that compute
    stages: int  # KV tiles in shared memory
    q_buffers: int
    sm_scale: float
    soft_cap: float | None
    interpret: Any

    @property
    def piece(self) -> int:
        """Tokens of one copy: a block, or what of it is in one KV tile."""
        return math.gcd(self.block_size, KV_TILE)

    @property
    def num_parts(self) -> int:
        """Slices of results: those that are whole, then the partial ones."""
        return self.geometry.kv_heads * self.geometry.num_slices + self.geometry.partial_slices

    def attend(
        self,
        plan: Plan,
        packed: jax.Array,  # [slices * SLICE, D]
        kv: jax.Array,  # [N, 2, K, bs, D]
        block_tables: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """f32[num_parts, SLICE, D] and log2 of the sums, f32[partial_items, query rows]."""
        g, D = self.geometry, self.head_dim
        pieces = KV_TILE // self.piece
        room = g.tile_slices - 1  # a tile is copied whole, the last one too
        packed = jnp.pad(packed.reshape(-1, SLICE, D), ((0, room), (0, 0), (0, 0)))
        out_columns = D if D <= 128 else OUT_COLUMNS
        shared = _Shared(
            q=gpu.matrix((self.q_buffers, self.warpgroups, gpu.ROWS, D), self.dtype),
            k=gpu.matrix((self.stages, KV_TILE, D), self.dtype),
            v=gpu.matrix((self.stages, KV_TILE, D), self.dtype),
            out=gpu.matrix((self.warpgroups, gpu.ROWS, out_columns), jnp.float32),
            lse=gpu.vector((self.warpgroups, gpu.ROWS), jnp.float32),
            q_full=gpu.barriers(self.q_buffers, g.tile_slices),
            k_full=gpu.barriers(self.stages, pieces),
            v_full=gpu.barriers(self.stages, pieces),
            q_free=gpu.barriers(self.q_buffers, self.warpgroups),
            k_free=gpu.barriers(self.stages, self.warpgroups),
            v_free=gpu.barriers(self.stages, self.warpgroups),
            v_clean=gpu.barriers(self.stages, 1),
        )
        lse_shape = (max(g.partial_items, 1), self.warpgroups, gpu.ROWS)
        parts, lse = gpu.launch(
            self._attend,
            (
                plan.tiles,
                plan.ctas,
                block_tables,
                packed,
                kv.reshape(-1, self.piece, D),  # pieces of all blocks, keys or values, heads
            ),
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

    def _attend(self, cta, warpgroup, inputs, outputs, allocated):
        tiles, ctas, block_tables, q, kv = inputs
        shared = _Shared(*allocated)

        @pl.when(warpgroup < self.warpgroups)
        def _():
            if self.warpgroups > 1:
                gpu.set_max_registers(232, action="increase")
            step = functools.partial(self._compute, warpgroup, shared, outputs)
            self._walk(cta, tiles, ctas, step)
            gpu.wait_copied_out()

        @pl.when(warpgroup == self.warpgroups)
        def _():
            if self.warpgroups > 1:
                gpu.set_max_registers(40, action="decrease")
            step = functools.partial(self._produce, shared, block_tables, q, kv)
            items, kv_tiles = self._walk(cta, tiles, ctas, step)

            # Until all has been read: barriers must not be given up while somebody will arrive.
            def drain(barriers, count, i):
                gpu.wait(barriers.at[lax.rem(i, jnp.int32(count))])

            oldest = jnp.maximum(kv_tiles - self.stages, 0)
            gpu.loop(oldest, kv_tiles, functools.partial(drain, shared.k_free, self.stages))
            gpu.loop(oldest, kv_tiles, functools.partial(drain, shared.v_free, self.stages))
            oldest = jnp.maximum(items - self.q_buffers, 0)
            gpu.loop(oldest, items, functools.partial(drain, shared.q_free, self.q_buffers))

    def _walk(self, cta, tiles, ctas, step):
        """Calls `step(item, index, KV tiles before it)`, where `item()` reads the item's scalars.

        Returns how many items and KV tiles there were.
        """
        kv_heads = self.geometry.kv_heads

        def over_items(i, state):
            tile, head, offset, left, done = state
            read = functools.partial(self._item, cta, tiles, tile, head, offset, left)
            item = read()
            step(read, i, done)
            offset, left, done = offset + item.size, left - item.size, done + item.size
            ended = offset == tiles[tile, Tile.COUNT]
            head = jnp.where(ended, head + 1, head)
            offset = jnp.where(ended, 0, offset)
            tile = jnp.where(head == kv_heads, tile + 1, tile)
            head = jnp.where(head == kv_heads, 0, head)
            return tile, head, offset, left, done

        columns = (Cta.TILE, Cta.HEAD, Cta.OFFSET, Cta.LEFT)
        start = (*(ctas[cta, column] for column in columns), jnp.int32(0))
        items = ctas[cta, Cta.ITEMS]
        *_, done = lax.fori_loop(0, items, over_items, start)
        return items, done

    def _item(self, cta, tiles, tile, head, offset, left) -> _Item:
        g = self.geometry

        def column(name):
            return tiles[tile, name]

        first, count, slices = column(Tile.FIRST), column(Tile.COUNT), column(Tile.SLICES)
        size = jnp.minimum(count - offset, left)
        low = first + offset
        q_slice = head * g.num_slices + column(Tile.SLICE)
        if g.uniform:
            split = jnp.int32(g.split)
            first_split = lax.div(first, split)
            size = jnp.minimum(size, (lax.div(low, split) + 1) * split - low)
            splits = lax.div(first + count - 1, split) - first_split + 1
            partial = head * splits + lax.div(low, split) - first_split
            target = column(Tile.PARTIAL) + partial * slices
            partial = column(Tile.PARTIAL_ITEM) + partial
            whole = splits == 1
        else:
            unit = column(Tile.START) + head * count
            partial = lax.div(unit, column(Tile.PER_CTA)) + cta + 1
            target = g.kv_heads * g.num_slices + partial * g.tile_slices
            whole = size == count
        return _Item(
            seq=column(Tile.SEQ),
            head=head,
            position=column(Tile.POSITION),
            kv_len=column(Tile.KV_LEN),
            low=low,
            size=size,
            q_slice=q_slice,
            slices=slices,
            target=jnp.where(whole, q_slice, target),
            partial=jnp.where(whole, -1, partial),
        )

    def _produce(self, shared: _Shared, block_tables, q, kv, read, index, kv_tiles):
        g, piece, block_size, item = self.geometry, self.piece, self.block_size, read()
        buffer = lax.rem(index, jnp.int32(self.q_buffers))

        @pl.when(index >= self.q_buffers)
        def _():
            gpu.wait(shared.q_free.at[buffer])

        per_warpgroup = gpu.ROWS // SLICE
        for j in range(g.tile_slices):
            rows = shared.q.at[buffer, j // per_warpgroup, pl.ds(j % per_warpgroup * SLICE, SLICE)]
            gpu.copy_in(q.at[item.q_slice + j], rows, shared.q_full.at[buffer])

        def over_kv_tiles(i):
            slot = lax.rem(kv_tiles + i, jnp.int32(self.stages))
            position = (item.low + i) * KV_TILE

            def piece_of(position):
                block = block_tables[item.seq, lax.div(position, jnp.int32(block_size))]
                first = (block * (2 * g.kv_heads) + item.head) * (block_size // piece)
                return first + lax.div(lax.rem(position, jnp.int32(block_size)), jnp.int32(piece))

            @pl.when(kv_tiles + i >= self.stages)
            def _():
                gpu.wait(shared.k_free.at[slot])
                gpu.wait(shared.v_free.at[slot])

            pieces = []
            for j in range(KV_TILE // piece):
                # Table entries beyond the sequence may hold anything: something that exists.
                inside = position + j * piece < item.kv_len
                pieces.append(piece_of(jnp.where(inside, position + j * piece, position)))
            to_values = g.kv_heads * (block_size // piece)
            for buffers, full, distance in (
                (shared.k, shared.k_full, 0),
                (shared.v, shared.v_full, to_values),
            ):
                for j, source in enumerate(pieces):
                    rows = buffers.at[slot, pl.ds(j * piece, piece)]
                    gpu.copy_in(kv.at[source + distance], rows, full.at[slot])

        gpu.loop(0, item.size, over_kv_tiles)

    def _compute(self, warpgroup, shared: _Shared, outputs, read, index, kv_tiles):
        (parts, lse), item = outputs, read()
        buffer = lax.rem(index, jnp.int32(self.q_buffers))
        gpu.wait(shared.q_full.at[buffer])
        q = shared.q.at[buffer, warpgroup]
        step = functools.partial(self._kv_tile, warpgroup, shared, q, item, kv_tiles)
        # Tiles whose keys are all visible to all rows need no mask.
        plain = jnp.int32(0)
        if self.geometry.window is None:
            plain = lax.div(item.position + 1, jnp.int32(KV_TILE)) - item.low
            plain = jnp.clip(plain, 0, item.size)
        state = (
            gpu.full((gpu.ROWS, self.head_dim), 0.0),
            gpu.full((gpu.ROWS,), NO_SCORE),
            gpu.full((gpu.ROWS,), 0.0),
        )
        if self.geometry.window is None:
            state = lax.fori_loop(0, plain, functools.partial(step, masked=False), state)
        state = lax.fori_loop(plain, item.size, functools.partial(step, masked=True), state)
        acc, top, total = state
        gpu.arrive(shared.q_free.at[buffer])

        item = read()  # again: in the loops every register counts
        total = jnp.where(total > 0.0, total, 1.0)
        factor = 1.0 / total
        out = shared.out.at[warpgroup]
        first = warpgroup * (gpu.ROWS // SLICE)
        width = out.shape[1]
        for column in range(0, self.head_dim, width):
            gpu.wait_copied_out(read_only=True)
            out[...] = acc[:, column : column + width] * gpu.columns(factor, width)
            if column == 0:
                shared.lse[warpgroup] = top + jnp.log2(total)
            gpu.commit()

            def copy_slice(j, column=column):
                rows = out.at[pl.ds(pl.multiple_of(j * SLICE, SLICE), SLICE)]
                target = parts.at[item.target + first + j, :, pl.ds(column, width)]
                gpu.copy_out(rows, target)

            gpu.loop(0, jnp.clip(item.slices - first, 0, gpu.ROWS // SLICE), copy_slice)

        @pl.when(item.partial >= 0)
        def _():
            gpu.copy_out(shared.lse.at[warpgroup], lse.at[item.partial, warpgroup])

    def _kv_tile(self, warpgroup, shared: _Shared, q, item: _Item, kv_tiles, i, state, *, masked):
        acc, top, total = state
        slot = lax.rem(kv_tiles + i, jnp.int32(self.stages))
        first_key = (item.low + i) * KV_TILE
        if masked:
            # Here, where few registers are in use.
            gpu.wait(shared.v_full.at[slot])
            self._clean_values(warpgroup, shared, slot, item.kv_len - first_key)
        gpu.wait(shared.k_full.at[slot])
        scores = gpu.times_transposed(q, shared.k.at[slot])
        gpu.arrive(shared.k_free.at[slot])
        if self.soft_cap is None:
            scores = scores * (self.sm_scale * LOG2_E)
        else:
            capped = jnp.tanh(scores * (self.sm_scale / self.soft_cap))
            scores = capped * (self.soft_cap * LOG2_E)
        if masked:
            scores = self._masked(scores, warpgroup, item, first_key)
        new_top = jnp.maximum(top, scores.max(axis=1))
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - gpu.columns(new_top, KV_TILE))
        total = total * decay + weights.sum(axis=1)
        acc = acc * gpu.columns(decay, self.head_dim)
        if not masked:
            gpu.wait(shared.v_full.at[slot])
        acc = gpu.add_product(acc, weights.astype(self.dtype), shared.v.at[slot], self.interpret)
        gpu.arrive(shared.v_free.at[slot])
        return acc, new_top, total

    def _masked(self, scores, warpgroup, item: _Item, first_key):
        """f32[ROWS, KV_TILE]: -inf for keys after the query, or before its window."""
        row = gpu.row_index() + warpgroup * gpu.ROWS
        query = item.position + lax.div(row, jnp.int32(self.geometry.group))
        column = gpu.index((gpu.ROWS, KV_TILE), 1)
        behind = gpu.columns(query - first_key, KV_TILE) - column
        # After the query is behind it by a lot, if the number has no sign: one comparison.
        window = self.geometry.window or 2**31
        return jnp.where(behind.astype(jnp.uint32) < jnp.uint32(window), scores, -jnp.inf)

    def _clean_values(self, warpgroup, shared: _Shared, slot, num_tokens):
        """Zeros in place of what lies beyond the sequence: it may be NaN, and 0 * NaN is NaN."""

        @pl.when((num_tokens < KV_TILE) & (warpgroup == 0))
        def _():
            for column in range(0, self.head_dim, VALUE_COLUMNS):
                size = min(VALUE_COLUMNS, self.head_dim - column)
                values = shared.v.at[slot, :, pl.ds(column, size)]
                exists = gpu.index((KV_TILE, size), 0) < num_tokens
                values[...] = jnp.where(exists, values[...], jnp.zeros((), self.dtype))
            gpu.commit()
            if self.warpgroups > 1:
                gpu.arrive(shared.v_clean.at[slot])

        if self.warpgroups > 1:

            @pl.when((num_tokens < KV_TILE) & (warpgroup != 0))
            def _():
                gpu.wait(shared.v_clean.at[slot])

    def add_up(self, plan: Plan, parts: jax.Array, lse: jax.Array) -> jax.Array:
        """[slices, SLICE, D] of q's type: partial results weighed by their sums, in order."""
        slices, shape = plan.sums.shape[0], (SLICE, self.head_dim)
        query_rows = self.geometry.query_rows

        def body(cta, warpgroup, inputs, outputs, shared):
            del warpgroup, shared
            sums, parts, lse = inputs
            (out,) = outputs
            first, stride, count, item, row = (sums[cta, i] for i in range(Sum.COLUMNS))

            def part(i):
                return gpu.load_slice(parts.at[first + i * stride])

            def weight(i):
                scalars = [lse[(item + i) * query_rows + row + j] for j in range(SLICE)]
                return gpu.rows_of(scalars, shape)

            def add(i, state):
                acc, top, total = state
                new = weight(i)
                new_top = jnp.maximum(top, new)
                decay, factor = jnp.exp2(top - new_top), jnp.exp2(new - new_top)
                return acc * decay + part(i) * factor, new_top, total * decay + factor

            @pl.when(count > 0)
            def _():
                start = (part(0), weight(0), gpu.rows_of([jnp.float32(1.0)] * SLICE, shape))
                acc, _, total = lax.fori_loop(1, count, add, start)
                gpu.store_slice(out.at[cta], (acc / total).astype(self.dtype))

        (out,) = gpu.launch(
            body,
            (plan.sums, parts, lse.reshape(-1)),
            (jax.ShapeDtypeStruct((slices, *shape), self.dtype),),
            name="forge_attention_sum",
            grid=slices,
            warpgroups=1,
            interpret=self.interpret,
        )
        return out
