"""The gradient of paged attention, in plain XLA for every implementation.

The scores are computed again, a tile of keys at a time (FlashAttention-2, Dao 2023,
arXiv:2307.08691, section 3.1.2). It needs memory for the results and one tile. All sums are in
float32. Products of float32 queries have float32 precision on every device. With queries of 16
bits, a GPU may round the other operands to TF32.

Work items are as in `xla.py`: each is a tile of query rows of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.attention.quantized import QuantizedKV, dequantize_rows

Q_TILE = 16  # query rows per item
KV_TILE = 128  # tokens, or one block if it is larger
ITEMS = 8  # per iteration

NO_SCORE = -1e30  # the initial maximum: finite, so that exp(-inf - NO_SCORE) is 0


class Gradients(NamedTuple):
    """The gradients with respect to the arguments of attention, all float32.

    Attributes:
      q: f32[T, H, D], zero for rows that belong to no sequence.
      kv: f32[N, planes, K, bs, D], with respect to the numbers in the cache.
      sinks: f32[H], or None without sinks.
    """

    q: jax.Array
    kv: jax.Array
    sinks: jax.Array | None


def attention_backward(  # noqa: PLR0913
    slope: jax.Array,  # float[T, H, D], the gradient with respect to the result
    q: jax.Array,  # float[T, H, D]
    kv: jax.Array | QuantizedKV,  # dtype[N, 2 or 1, K, bs, D]
    block_tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
    *,
    sm_scale: float,
    kv_dtype: jnp.dtype,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[H]
) -> Gradients:
    """Return the gradients of `ragged_paged_attention`, whose arguments these are."""
    tokens, heads, head_dim = q.shape
    grouped = (tokens, kv.shape[2], heads // kv.shape[2], head_dim)
    flat_q, flat_slope = (x.astype(jnp.float32).reshape(grouped) for x in (q, slope))
    pool = _Pool(kv, block_tables, kv_dtype)
    scoring = _Scoring(sm_scale, window, soft_cap, _dot_for(q.dtype))
    by_head = None if sinks is None else sinks.reshape(grouped[1:3])
    items, count = _items(kv_lens, cu_q_lens, num_seqs)

    def over_items(index: jax.Array, found: Gradients) -> Gradients:
        seq, row, visible = items(index * ITEMS + jnp.arange(ITEMS))
        row = jnp.where(visible > 0, row, tokens)
        rows, slopes = (
            _rows_first(x.at[row].get(mode="fill", fill_value=0)) for x in (flat_q, flat_slope)
        )
        tiles = _Tiles.of(visible, scoring, pool, seq, grouped[2])
        softmax = _softmax(rows, slopes, tiles, by_head)
        by_rows, by_pool = _tile_gradients(rows, slopes, tiles, softmax, found.kv)
        by_q = found.q.at[row].set(_rows_last(by_rows, Q_TILE), mode="drop", unique_indices=True)
        if by_head is None or found.sinks is None:
            return Gradients(by_q, by_pool, None)
        of_rows = _of_rows(by_head)
        by_sink = -jnp.exp(of_rows - softmax.log_total) * softmax.mean
        by_sink = jnp.where(tiles.exists, by_sink, 0.0)
        by_sink = by_sink.reshape(*by_sink.shape[:2], -1, Q_TILE).sum(axis=(0, 3))
        return Gradients(by_q, by_pool, found.sinks + by_sink)

    start = Gradients(
        jnp.zeros(grouped, jnp.float32),
        jnp.zeros(kv.shape, jnp.float32),
        None if by_head is None else jnp.zeros(by_head.shape, jnp.float32),
    )
    found = lax.fori_loop(0, -(-count // ITEMS), over_items, start)
    by_sinks = None if found.sinks is None else found.sinks.reshape(heads)
    return Gradients(found.q.reshape(q.shape), found.kv, by_sinks)


Items = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


def _items(
    kv_lens: jax.Array, cu_q_lens: jax.Array, num_seqs: jax.Array
) -> tuple[Items, jax.Array]:
    """Return the work items by number, and how many there are.

    For i32[B] numbers, the function returns the sequences i32[B] and the rows i32[B, Q_TILE]. The
    third result, i32[B, Q_TILE], is the number of visible keys, 0 for rows that do not exist.
    """
    seqs = len(kv_lens)
    q_lens = jnp.where(jnp.arange(seqs) < num_seqs, jnp.diff(cu_q_lens), 0)
    tiles = -(-q_lens // Q_TILE)
    tiles_end = jnp.cumsum(tiles)

    def items(number: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        seq = jnp.sum(tiles_end[None] <= number[:, None], axis=1, dtype=jnp.int32)
        live = (seq < seqs)[:, None]
        seq = jnp.minimum(seq, seqs - 1)
        first = (number - (tiles_end[seq] - tiles[seq])) * Q_TILE
        offset = first[:, None] + jnp.arange(Q_TILE)[None]
        q_len = q_lens[seq][:, None]
        visible = kv_lens[seq][:, None] - q_len + offset + 1
        visible = jnp.where(live & (offset < q_len), visible, 0)
        return seq, cu_q_lens[seq][:, None] + offset, visible

    return items, tiles_end[-1]


class _Scoring(NamedTuple):
    sm_scale: float
    window: int | None
    soft_cap: float | None
    dot: Callable[[jax.Array, jax.Array, str], jax.Array]


class _Pool:
    """The cache of one layer, readable and extensible in tiles of whole blocks."""

    def __init__(self, kv: jax.Array | QuantizedKV, block_tables: jax.Array, kv_dtype: jnp.dtype):
        self.kv, self.kv_dtype, self.block_tables = kv, kv_dtype, block_tables
        self.num_blocks, self.planes, self.kv_heads, self.block_size, self.head_dim = kv.shape
        self.tile_blocks = max(1, KV_TILE // self.block_size)
        self.tile = self.tile_blocks * self.block_size  # tokens

    def blocks(self, seq: jax.Array, tile: jax.Array) -> jax.Array:
        """Return i32[B, tile_blocks], the blocks of tile `tile[b]` of sequence `seq[b]`."""
        at = tile[:, None] * self.tile_blocks + jnp.arange(self.tile_blocks)[None]
        return self.block_tables.at[seq[:, None], at].get(mode="clip")

    def read(self, blocks: jax.Array, used: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values f32[B, K, tile, D], zero where not `used`: bool[B, tile]."""
        kv = self.kv
        if isinstance(kv, QuantizedKV):
            data, scale = (each.at[blocks].get(mode="clip") for each in kv)
            floats = dequantize_rows(data, scale)
        else:
            data = kv.at[blocks].get(mode="clip")
            if kv.dtype == jnp.uint16:
                data = lax.bitcast_convert_type(data, self.kv_dtype)
            floats = data.astype(jnp.float32)
        # [B, blocks, planes, K, bs, D] -> [planes, B, K, blocks, bs, D]
        planes = floats.transpose(2, 0, 3, 1, 4, 5)
        planes = planes.reshape(self.planes, len(blocks), self.kv_heads, self.tile, self.head_dim)
        # Selected rather than multiplied, because unused entries may be NaN.
        planes = jnp.where(used[None, :, None, :, None], planes, 0.0)
        return planes[0], planes[-1]

    def add(
        self,
        total: jax.Array,
        blocks: jax.Array,
        used: jax.Array,
        keys: jax.Array,
        values: jax.Array,
    ) -> jax.Array:
        """Add the gradients of keys and values, f32[B, K, tile, D], to those of the pool."""
        both = jnp.stack([keys, values] if self.planes == 2 else [keys + values])
        shape = (self.planes, len(blocks), self.kv_heads, self.tile_blocks, self.block_size, -1)
        by_block = both.reshape(shape).transpose(1, 3, 0, 2, 4, 5)
        in_use = used.reshape(*blocks.shape, self.block_size).any(axis=2)
        return total.at[jnp.where(in_use, blocks, self.num_blocks)].add(by_block, mode="drop")


class _Tiles(NamedTuple):
    """The tiles of keys that a group of items attends to."""

    pool: _Pool
    scoring: _Scoring
    seq: jax.Array  # i32[B]
    visible: jax.Array  # i32[B, R], R rows for each key/value head
    first: jax.Array  # i32[B], the first tile
    count: jax.Array  # i32[], of tiles, at most

    @classmethod
    def of(
        cls, visible: jax.Array, scoring: _Scoring, pool: _Pool, seq: jax.Array, group: int
    ) -> _Tiles:
        longest = visible.max(axis=1)
        first = jnp.zeros_like(longest)
        if scoring.window is not None:
            shortest = jnp.where(visible > 0, visible, longest[:, None]).min(axis=1)
            first = jnp.maximum(shortest - scoring.window, 0) // pool.tile
        count = (-(-longest // pool.tile) - first).max()
        return cls(pool, scoring, seq, jnp.tile(visible, group), first, count)

    @property
    def exists(self) -> jax.Array:
        """True for rows that exist, bool[B, 1, R]."""
        return (self.visible > 0)[:, None]

    def read(self, index: jax.Array, rows: jax.Array) -> _Tile:
        """Return tile `index` of each item, and its scores for rows f32[B, K, R, D]."""
        tile, visible = self.first + index, self.visible[:, :, None]
        position = (tile[:, None] * self.pool.tile + jnp.arange(self.pool.tile)[None])[:, None]
        seen = position < visible  # [B, R, tile]
        if self.scoring.window is not None:
            seen &= position >= visible - self.scoring.window
        blocks, used = self.pool.blocks(self.seq, tile), seen.any(axis=1)
        keys, values = self.pool.read(blocks, used)
        scores = self.scoring.sm_scale * self.scoring.dot(rows, keys, "bkrd,bktd->bkrt")
        slope = jnp.full((), self.scoring.sm_scale, jnp.float32)
        if (cap := self.scoring.soft_cap) is not None:
            capped = jnp.tanh(scores / cap)
            scores, slope = cap * capped, self.scoring.sm_scale * (1.0 - capped * capped)
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        return _Tile(blocks, used, keys, values, scores, slope)


class _Tile(NamedTuple):
    blocks: jax.Array  # i32[B, blocks]
    used: jax.Array  # bool[B, tile]
    keys: jax.Array  # f32[B, K, tile, D]
    values: jax.Array  # the same
    scores: jax.Array  # f32[B, K, R, tile], -inf where unseen
    slope: jax.Array  # derivative of the scores by the dot products, f32[] or f32[B, K, R, tile]


class _Softmax(NamedTuple):
    """The sums of a row over all of its tiles."""

    log_total: jax.Array  # f32[B, K, R], the logarithm of the sum of exponentials
    mean: jax.Array  # f32[B, K, R], the product of a row's result and its gradient


def _softmax(
    rows: jax.Array, slopes: jax.Array, tiles: _Tiles, sinks: jax.Array | None
) -> _Softmax:
    """Compute the online softmax of rows f32[B, K, R, D], as the reference does."""

    def over_tile(index, carry):
        top, total, mean = carry
        tile = tiles.read(index, rows)
        new_top = jnp.maximum(top, tile.scores.max(axis=-1))
        weights, decay = jnp.exp(tile.scores - new_top[..., None]), jnp.exp(top - new_top)
        by_weight = tiles.scoring.dot(slopes, tile.values, "bkrd,bktd->bkrt")
        total = total * decay + weights.sum(axis=-1)
        return new_top, total, mean * decay + (weights * by_weight).sum(axis=-1)

    shape = rows.shape[:3]
    top, total = jnp.full(shape, NO_SCORE, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks is not None:  # a sink of -inf must not become the maximum
        top, total = jnp.maximum(top, _of_rows(sinks)), total + 1.0
    top, total, mean = lax.fori_loop(0, tiles.count, over_tile, (top, total, jnp.zeros_like(total)))
    total = jnp.where(total == 0.0, 1.0, total)
    return _Softmax(top + jnp.log(total), mean / total)


def _tile_gradients(
    rows: jax.Array, slopes: jax.Array, tiles: _Tiles, softmax: _Softmax, by_pool: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradient of rows, f32[B, K, R, D], and that of the pool with these rows' part."""

    def over_tile(index, carry):
        by_rows, by_pool = carry
        tile = tiles.read(index, rows)
        weights = jnp.exp(tile.scores - softmax.log_total[..., None])
        by_values = tiles.scoring.dot(weights, slopes, "bkrt,bkrd->bktd")
        by_weight = tiles.scoring.dot(slopes, tile.values, "bkrd,bktd->bkrt")
        by_score = weights * (by_weight - softmax.mean[..., None]) * tile.slope
        by_rows = by_rows + tiles.scoring.dot(by_score, tile.keys, "bkrt,bktd->bkrd")
        by_keys = tiles.scoring.dot(by_score, rows, "bkrt,bkrd->bktd")
        return by_rows, tiles.pool.add(by_pool, tile.blocks, tile.used, by_keys, by_values)

    return lax.fori_loop(0, tiles.count, over_tile, (jnp.zeros_like(rows), by_pool))


def _dot_for(dtype: jnp.dtype) -> Callable[[jax.Array, jax.Array, str], jax.Array]:
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def dot(x: jax.Array, y: jax.Array, indices: str) -> jax.Array:
        return jnp.einsum(indices, x, y, precision=precision)

    return dot


def _of_rows(by_head: jax.Array) -> jax.Array:
    """Repeat f32[K, G] for the rows of each head, f32[1, K, G * Q_TILE]."""
    return jnp.repeat(by_head, Q_TILE, axis=1)[None]


def _rows_first(rows: jax.Array) -> jax.Array:
    """Transpose [B, R, K, G, D] to [B, K, G * R, D]: one matrix of the rows that share keys."""
    B, R, K, G, D = rows.shape
    return rows.transpose(0, 2, 3, 1, 4).reshape(B, K, G * R, D)


def _rows_last(rows: jax.Array, R: int) -> jax.Array:
    """Invert `_rows_first`."""
    B, K, GR, D = rows.shape
    return rows.reshape(B, K, GR // R, R, D).transpose(0, 3, 1, 2, 4)
