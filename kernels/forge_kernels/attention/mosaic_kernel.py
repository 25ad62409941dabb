"""The base of the attention kernels for GPUs: their items, the softmax and the sum.

A kernel has one thread block (CTA) per place of the plan's line (see `plan`), and each processes
its items. The query heads of one key/value head are consecutive rows, so decodes, draft
verification and prefill chunks differ only in the numbers of the plan. The softmax is
FlashAttention's online one (Dao et al. 2022, section 3.1).

A second kernel adds the results of split units in order (FlashDecoding's last step).

Entries beyond a sequence may be NaN. Their scores are masked by selection, and their values and
scales are replaced by zero before they are multiplied by the zeros of the softmax.
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
from forge_kernels.attention.plan import KV_TILE, SLICE, Cta, Geometry, Plan, Sum, Tile
from forge_kernels.devices import Gpu

NO_SCORE = -1e30  # the initial maximum: finite, so that exp2(-inf - NO_SCORE) is 0
LOG2_E = math.log2(math.e)

# The types of keys and values in the products of an 8-bit cache. They represent all 8-bit values
# exactly, and queries are rounded to the first. Weights that have been multiplied by values' scales
# need bfloat16's range. Hopper converts float8_e4m3fn to float16 in fewer instructions.
PRODUCT_DTYPES = {
    jnp.dtype(jnp.int8): (jnp.bfloat16, jnp.bfloat16),
    jnp.dtype(jnp.float8_e4m3fn): (jnp.float16, jnp.bfloat16),
}


class Item(NamedTuple):
    """The work of a CTA for one unit, as scalars."""

    seq: jax.Array
    head: jax.Array
    position: jax.Array  # first token's position
    kv_len: jax.Array
    low: jax.Array  # KV tile
    size: jax.Array  # KV tiles
    q_slice: jax.Array
    slices: jax.Array
    target: jax.Array  # slice of the results
    partial: jax.Array  # the number of the partial item; -1 for a whole unit
    has_sink: jax.Array  # True for the first item of a unit


@dataclass(frozen=True, kw_only=True)
class Kernel:
    geometry: Geometry
    head_dim: int
    dtype: Any  # type of queries and results
    kv_dtype: Any
    block_size: int
    sm_scale: float
    soft_cap: float | None
    has_sinks: bool
    device: Gpu
    interpret: Any

    @classmethod
    def query_rows(cls, rows: int, head_dim: int, kv_dtype: Any) -> int:
        """Return the query rows of a tile, if a sequence has up to `rows` of them."""
        raise NotImplementedError

    @classmethod
    def ctas_per_core(cls, device: Gpu, head_dim: int, kv_dtype: Any, dtype: Any) -> int:
        """Return the CTAs per multiprocessor."""
        raise NotImplementedError

    def attend(
        self,
        plan: Plan,
        packed: jax.Array,  # [slices * SLICE, D]
        kv: jax.Array,  # [N, 2, K, bs, D]
        scale: jax.Array | None,  # f32[N, 2, K, bs]
        block_tables: jax.Array,
        sinks: jax.Array | None,  # f32[K, groups of rows, ROWS], see `sink_rows`
    ) -> tuple[jax.Array, jax.Array]:
        """Return f32[num_parts, SLICE, D] and log2 of sums, f32[partial_items, query rows]."""
        raise NotImplementedError

    @property
    def quantized(self) -> bool:
        return self.kv_dtype in PRODUCT_DTYPES

    @property
    def key_dtype(self) -> Any:
        """The type in which queries and keys are multiplied."""
        return PRODUCT_DTYPES[self.kv_dtype][0] if self.quantized else self.dtype

    @property
    def value_dtype(self) -> Any:
        return PRODUCT_DTYPES[self.kv_dtype][1] if self.quantized else self.dtype

    @property
    def wide(self) -> bool:
        return self.head_dim > 128

    @property
    def piece(self) -> int:
        """The tokens of one copy: a block, or the part of it in one KV tile."""
        return math.gcd(self.block_size, KV_TILE)

    @property
    def num_parts(self) -> int:
        """The slices of results: whole ones, then partial ones."""
        return self.geometry.kv_heads * self.geometry.num_slices + self.geometry.partial_slices

    def _part(self, item: Item, turn):
        """Return the first of an item's KV tiles that a turn takes, and how many: all."""
        del turn
        return jnp.int32(0), item.size

    def _walk(self, cta, tiles, ctas, step, turns):
        """Call `step(item, index, KV tiles before it)`, where `item()` reads the item's scalars.

        Return how many items there were, and how many KV tiles for each of `turns`.
        """
        kv_heads = self.geometry.kv_heads

        def over_items(i, state):
            tile, head, offset, left, done = state
            read = functools.partial(self._item, cta, tiles, tile, head, offset, left)
            item = read()
            step(read, i, done)
            parts = [self._part(item, turn) for turn in turns]
            done = tuple(n + count for n, (_, count) in zip(done, parts, strict=True))
            offset, left = offset + item.size, left - item.size
            ended = offset == tiles[tile, Tile.COUNT]
            head = jnp.where(ended, head + 1, head)
            offset = jnp.where(ended, 0, offset)
            tile = jnp.where(head == kv_heads, tile + 1, tile)
            head = jnp.where(head == kv_heads, 0, head)
            return tile, head, offset, left, done

        columns = (Cta.TILE, Cta.HEAD, Cta.OFFSET, Cta.LEFT)
        start = (*(ctas[cta, column] for column in columns), (jnp.int32(0),) * len(turns))
        items = ctas[cta, Cta.ITEMS]
        *_, done = lax.fori_loop(0, items, over_items, start)
        return items, done

    def _item(self, cta, tiles, tile, head, offset, left) -> Item:
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
        return Item(
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
            has_sink=offset == 0,
        )

    def _source(self, item: Item, block_tables, position, j):
        """Return the place in the cache of piece j of the keys of the KV tile at `position`."""
        g, piece, block_size = self.geometry, self.piece, self.block_size
        # Table entries beyond the sequence are undefined, so an existing block is read.
        at = position + j * piece
        at = jnp.where(at < item.kv_len, at, position)
        block = block_tables[item.seq, lax.div(at, jnp.int32(block_size))]
        first = (block * (2 * g.kv_heads) + item.head) * (block_size // piece)
        return first + lax.div(lax.rem(at, jnp.int32(block_size)), jnp.int32(piece))

    @property
    def _to_values(self) -> int:
        """The places from a piece of the keys to that of the values."""
        return self.geometry.kv_heads * (self.block_size // self.piece)

    def _unmasked(self, item: Item):
        """Return how many of an item's KV tiles have only keys that all rows see."""
        if self.geometry.window is not None:
            return jnp.int32(0)
        tiles = lax.div(item.position + 1, jnp.int32(KV_TILE)) - item.low
        return jnp.clip(tiles, 0, item.size)

    def _start(self):
        """Return the state of the softmax before the first key."""
        return (
            gpu.full((gpu.ROWS, self.head_dim), 0.0),
            gpu.full((gpu.ROWS,), NO_SCORE),
            gpu.full((gpu.ROWS,), 0.0),
        )

    @property
    def _score_factor(self) -> float:
        """The factor on scores: to base 2 logarithms, or to multiples of the cap."""
        if self.soft_cap is None:
            return self.sm_scale * LOG2_E
        return self.sm_scale / self.soft_cap

    def _softmax(self, row_group, item: Item, masked, first_key, scores, state):
        """Return weights f32[ROWS, n] of n keys, and the state before their values are added."""
        acc, top, total = state
        if self.soft_cap is not None:
            scores = jnp.tanh(scores) * (self.soft_cap * LOG2_E)
        if masked:
            scores = self._masked(scores, row_group, item, first_key)
        new_top = jnp.maximum(top, scores.max(axis=1))
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - gpu.columns(new_top, scores.shape[1]))
        total = total * decay + weights.sum(axis=1)
        acc = jax.tree.map(lambda part: part * gpu.columns(decay, part.shape[1]), acc)
        return weights, (acc, new_top, total)

    def _masked(self, scores, row_group, item: Item, first_key):
        """Mask scores f32[ROWS, n] with -inf for keys after the query or before its window."""
        row = gpu.row_index() + row_group * gpu.ROWS
        query = item.position + lax.div(row, jnp.int32(self.geometry.group))
        column = gpu.index(scores.shape, 1)
        behind = gpu.columns(query - first_key, scores.shape[1]) - column
        # Unsigned, a key after the query is far behind it, so one comparison is enough.
        window = self.geometry.window or 2**31
        return jnp.where(behind.astype(jnp.uint32) < jnp.uint32(window), scores, -jnp.inf)

    def sink_rows(self, sinks: jax.Array) -> jax.Array:
        """Return the sinks f32[H] of a tile's query rows as base 2 logits, f32[K, groups, ROWS]."""
        g = self.geometry
        row = jnp.arange(g.query_rows).reshape(-1, gpu.ROWS) % g.group
        return jnp.maximum(sinks * LOG2_E, NO_SCORE).reshape(g.kv_heads, g.group)[:, row]

    def _sums(self, sinks, row_group, item: Item, top, total):
        """Return the factor on the rows' sums of values, and log2 of the sums of their weights.

        The first item of a unit adds the sinks. A unit's results are merged by these sums.
        """
        total = jnp.where(total > 0.0, total, 1.0)
        if sinks is None:
            return 1.0 / total, top + jnp.log2(total)
        sink = gpu.load_rows(sinks.at[item.head, row_group], device_memory=True)
        sink = sink + jnp.where(item.has_sink, 0.0, NO_SCORE)  # selects a scalar, not a vector
        new_top = jnp.maximum(top, sink)
        decay = jnp.exp2(top - new_top)
        total = total * decay + jnp.exp2(sink - new_top)
        return decay / total, new_top + jnp.log2(total)

    def add_up(self, plan: Plan, parts: jax.Array, lse: jax.Array) -> jax.Array:
        """Add the partial results, weighted by their sums, in order: q.dtype[T, H, D].

        If no sequence has several tokens, rows are stored in their places. Otherwise they are
        stored by slice, and XLA moves them.
        """
        g, slices = self.geometry, plan.sums.shape[0]
        used = min(g.group, SLICE)  # rows of a slice, if a tile is one token
        in_place = g.decodes and g.group % used == 0 and gpu.is_even((used, self.head_dim))
        shape = (used if in_place else SLICE, self.head_dim)

        def place(cta):
            if not in_place:
                return cta
            head, slice_of_head = _divided(cta, g.num_slices)
            token, slice_of_token = _divided(slice_of_head, g.tile_slices)
            return (token * g.kv_heads + head) * g.tile_slices + slice_of_token

        def body(cta, warpgroup, inputs, outputs, shared):
            del warpgroup, shared
            sums, parts, lse = inputs
            (out,) = outputs
            first, stride, count, item, row = (sums[cta, i] for i in range(Sum.COLUMNS))

            def part(i):
                return gpu.load_slice(parts.at[first + i * stride, pl.ds(0, shape[0])])

            def weight(i):
                scalars = [lse[(item + i) * g.query_rows + row + j] for j in range(shape[0])]
                return gpu.rows_of(scalars, shape)

            def add(i, state):
                acc, top, total = state
                new = weight(i)
                new_top = jnp.maximum(top, new)
                decay, factor = jnp.exp2(top - new_top), jnp.exp2(new - new_top)
                return acc * decay + part(i) * factor, new_top, total * decay + factor

            @pl.when(count > 0)
            def _():
                start = (part(0), weight(0), gpu.rows_of([jnp.float32(1.0)] * shape[0], shape))
                acc, _, total = lax.fori_loop(1, count, add, start)
                gpu.store_slice(out.at[place(cta)], (acc / total).astype(self.dtype))

            if in_place:

                @pl.when(count == 0)
                def _():
                    gpu.store_slice(out.at[place(cta)], gpu.zero_slice(shape, self.dtype))

        (out,) = gpu.launch(
            body,
            (plan.sums, parts, lse.reshape(-1)),
            (jax.ShapeDtypeStruct((slices, *shape), self.dtype),),
            name="forge_attention_sum",
            grid=slices,
            warpgroups=1,
            interpret=self.interpret,
        )
        if in_place:
            return out.reshape(g.tokens, g.heads, self.head_dim)
        return out.reshape(-1, self.head_dim).at[plan.unpack].get(mode="fill", fill_value=0)


def _divided(number: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Return the quotient and the remainder."""
    return lax.div(number, jnp.int32(by)), lax.rem(number, jnp.int32(by))
