"""Paged attention in plain XLA for CPUs, at a cost that follows the real contexts.

Three loops have bounds that are known only at run time. A batch therefore pays for its tiles and
not for S x max_blocks:

- Decode rows at the front of the batch, in groups of GROUP sequences, each group up to its longest
  context.
- Then sequences of at most SHORT rows (drafts to verify), grouped in the same way.
- All others as work items: one tile of Q_TILE query rows of one sequence, up to the last key that
  the tile attends to.

If `uniform`, one loop treats every row in the same way, whatever the batch composition: see
`_uniform_rows`.

A KV tile is always KV_TILE tokens at absolute positions 0, KV_TILE, 2 * KV_TILE, ... Within a loop,
the order in which a row's keys are summed therefore depends only on its own position. If there is a
sliding window, the loops start at the first tile that a sequence's rows attend to. Tiles outside a
row's range leave it unchanged: they multiply by exp(0) and add zeros.

A cache of 8 bits is never dequantized. The keys' scales multiply the scores, and the values' scales
multiply the weights.

A cache with one plane has vectors that are both keys and values. A tile of it is read once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from forge_kernels.attention.quantized import QuantizedKV
from forge_kernels.embed import embed

KV_TILE = 128  # tokens
GROUP = 16  # sequences
SHORT = 8  # query rows
Q_TILE = 64  # query rows
UNIFORM_ROWS = 4  # query rows per tile
UNIFORM_TILES = 8  # tiles of query rows per iteration

NO_SCORE = -1e30  # the initial maximum: finite, so that exp(-inf - NO_SCORE) is 0


def xla_attention(  # noqa: PLR0913
    q: jax.Array,  # float[T, H, D]
    kv: jax.Array | QuantizedKV,  # dtype[N, 2 or 1, K, bs, D]
    block_tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
    *,
    sm_scale: float,
    kv_dtype: jnp.dtype,
    max_q_len: int,
    uniform: bool = False,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[H]
) -> jax.Array:  # q.dtype[T, H, D]
    tokens, heads, head_dim = q.shape
    out_dtype, seqs, kv_heads = q.dtype, kv_lens.shape[0], kv.shape[2]
    # XLA:CPU has fast bfloat16 dots, which represent 8 bits exactly. It computes float16 dots in
    # float32 anyway.
    precise = q.dtype if isinstance(kv, QuantizedKV) else kv_dtype
    dot_dtype = jnp.bfloat16 if precise == jnp.bfloat16 else jnp.float32
    pool = _Pool(kv, block_tables, kv_dtype, dot_dtype)
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, heads // kv_heads)
    attend = partial(_attend, sm_scale=sm_scale, window=window, soft_cap=soft_cap, sinks=sinks)

    q_lens = jnp.where(jnp.arange(seqs) < num_seqs, jnp.diff(cu_q_lens), 0)
    q = q.astype(dot_dtype).reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    if uniform:
        out = _uniform_rows(q, pool, kv_lens, q_lens, cu_q_lens, attend)
        return out.reshape(tokens, heads, head_dim).astype(out_dtype)
    num_decodes = _leading(q_lens == 1)
    num_grouped = jnp.minimum(_leading(q_lens <= SHORT), num_seqs)
    # Padding for a group, or a tile of rows, that starts at the last sequence or row.
    kv_lens, cu_q_lens = jnp.pad(kv_lens, (0, GROUP)), jnp.pad(cu_q_lens, (0, GROUP))
    q = jnp.pad(q, ((0, Q_TILE), (0, 0), (0, 0), (0, 0)))
    batch = _Batch(q, kv_lens, cu_q_lens, pool, attend, min(GROUP, seqs, tokens))
    out = _decodes(batch, jnp.zeros(q.shape, jnp.float32), num_decodes, seqs)
    if max_q_len > 1:
        out = _short_sequences(batch, out, num_decodes, num_grouped)
    if max_q_len > SHORT:
        tiles = jnp.where(jnp.arange(seqs) < num_grouped, 0, -(-q_lens // Q_TILE))
        out = _work_items(batch, out, q_lens, tiles)
    return out[:tokens].reshape(tokens, heads, head_dim).astype(out_dtype)


class _Batch(NamedTuple):
    """The arguments that the loops share; q, kv_lens and cu_q_lens are padded at the end."""

    q: jax.Array  # float[T + Q_TILE, K, G, D]
    kv_lens: jax.Array  # i32[S + GROUP]
    cu_q_lens: jax.Array  # i32[S + 1 + GROUP]
    pool: _Pool
    attend: Callable[..., jax.Array]  # `_attend`
    group: int  # sequences

    def of_group(self, array: jax.Array, first: jax.Array) -> jax.Array:
        """Return the group of elements that starts at `first`."""
        return lax.dynamic_slice_in_dim(array, first, self.group)


def _decodes(batch: _Batch, out: jax.Array, num_decodes: jax.Array, seqs: int) -> jax.Array:
    """Attend for the decode rows at the front of the batch, one group of sequences at a time."""

    def decode_group(index, out):
        first = index * batch.group
        live = first + jnp.arange(batch.group) < num_decodes
        visible = jnp.where(live, batch.of_group(batch.kv_lens, first), 0)
        rows = batch.of_group(batch.q, first)  # [group, K, G, D]
        rows = batch.attend(rows, visible[:, None], batch.pool, first)
        return lax.dynamic_update_slice_in_dim(out, rows, first, axis=0)

    if seqs <= GROUP:
        return decode_group(0, out)
    return lax.fori_loop(0, -(-num_decodes // batch.group), decode_group, out)


def _short_sequences(
    batch: _Batch, out: jax.Array, num_decodes: jax.Array, num_grouped: jax.Array
) -> jax.Array:
    """Attend for sequences of at most SHORT rows, one group of them at a time."""
    q, group = batch.q, batch.group

    def short_group(index, out):
        first = num_decodes + index * group
        live = first + jnp.arange(group) < num_grouped
        start = batch.of_group(batch.cu_q_lens, first)
        q_len = jnp.where(live, batch.of_group(batch.cu_q_lens, first + 1) - start, 0)
        row = jnp.arange(SHORT)[None, :]
        visible = batch.of_group(batch.kv_lens, first)[:, None] - q_len[:, None] + row + 1
        exists = row < q_len[:, None]  # [group, SHORT]
        visible = jnp.where(exists, visible, 0)
        row = jnp.where(exists, start[:, None] + row, q.shape[0])
        rows = embed(q.reshape(q.shape[0], -1), row.reshape(-1))
        rows = _rows_first(rows.reshape(group, SHORT, *q.shape[1:]))
        rows = batch.attend(rows, jnp.tile(visible, rows.shape[2] // SHORT), batch.pool, first)
        rows = _rows_last(rows, SHORT).reshape(-1, *q.shape[1:])
        return out.at[row.reshape(-1)].set(rows, mode="drop", unique_indices=True)

    num_groups = -(-(num_grouped - num_decodes) // group)
    return lax.fori_loop(0, num_groups, short_group, out)


def _work_items(
    batch: _Batch,
    out: jax.Array,
    q_lens: jax.Array,  # i32[S]
    tiles: jax.Array,  # i32[S], of query rows
) -> jax.Array:
    """Attend for all other sequences, one tile of Q_TILE query rows at a time."""
    tiles_end = jnp.cumsum(tiles)

    def work_item(item, out):
        seq = jnp.sum(tiles_end <= item, dtype=jnp.int32)
        row = (item - (tiles_end[seq] - tiles[seq])) * Q_TILE + jnp.arange(Q_TILE)
        first = batch.cu_q_lens[seq] + row[0]
        exists = row < q_lens[seq]  # [Q_TILE]
        visible = jnp.where(exists, batch.kv_lens[seq] - q_lens[seq] + row + 1, 0)
        rows = _rows_first(lax.dynamic_slice_in_dim(batch.q, first, Q_TILE)[None])
        visible = jnp.tile(visible, rows.shape[2] // Q_TILE)[None]
        rows = _rows_last(batch.attend(rows, visible, batch.pool, seq), Q_TILE)[0]
        old = lax.dynamic_slice_in_dim(out, first, Q_TILE)
        rows = jnp.where(exists[:, None, None, None], rows, old)
        return lax.dynamic_update_slice_in_dim(out, rows, first, axis=0)

    return lax.fori_loop(0, tiles_end[-1], work_item, out)


def _uniform_rows(
    q: jax.Array,  # float[T, K, G, D]
    pool: _Pool,
    kv_lens: jax.Array,  # i32[S]
    q_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    attend: Callable[..., jax.Array],  # `_attend`
) -> jax.Array:  # f32[T, K, G, D]
    """Attend for every row in a tile of UNIFORM_ROWS rows of its sequence at absolute positions.

    The shapes of a row's sums, and its place in them, then depend only on its own position. The
    batch determines only which tiles share an iteration.
    """
    tokens, seqs = q.shape[0], q_lens.shape[0]
    starts = kv_lens - q_lens
    first_tile = starts // UNIFORM_ROWS
    tiles = jnp.where(q_lens > 0, -(-kv_lens // UNIFORM_ROWS) - first_tile, 0)
    tiles_end = jnp.cumsum(tiles)
    flat = q.reshape(tokens, -1)

    def over_tiles(index, out):
        item = index * UNIFORM_TILES + jnp.arange(UNIFORM_TILES)
        seq = jnp.sum(tiles_end[None, :] <= item[:, None], axis=1, dtype=jnp.int32)
        live = seq < seqs
        seq = jnp.minimum(seq, seqs - 1)
        tile = first_tile[seq] + item - (tiles_end[seq] - tiles[seq])
        position = tile[:, None] * UNIFORM_ROWS + jnp.arange(UNIFORM_ROWS)[None]
        start = starts[seq][:, None]
        exists = live[:, None] & (start <= position) & (position < kv_lens[seq][:, None])
        visible = jnp.where(exists, position + 1, 0)  # [UNIFORM_TILES, UNIFORM_ROWS]
        row = jnp.where(exists, cu_q_lens[seq][:, None] + position - start, tokens).reshape(-1)
        rows = embed(flat, row).reshape(*position.shape, *q.shape[1:])
        rows = _rows_first(rows)
        visible = jnp.tile(visible, rows.shape[2] // UNIFORM_ROWS)
        rows = attend(rows, visible, pool.only(seq), 0)
        rows = _rows_last(rows, UNIFORM_ROWS).reshape(-1, *q.shape[1:])
        return out.at[row].set(rows, mode="drop", unique_indices=True)

    num_groups = -(-tiles_end[-1] // UNIFORM_TILES)
    return lax.fori_loop(0, num_groups, over_tiles, jnp.zeros(q.shape, jnp.float32))


def _leading(condition: jax.Array) -> jax.Array:
    """Return how many elements precede the first that is false."""
    size = condition.shape[0]
    return jnp.min(jnp.where(condition, size, jnp.arange(size, dtype=jnp.int32)))


def _rows_first(rows: jax.Array) -> jax.Array:
    """Transpose [B, R, K, G, D] to [B, K, G * R, D]: one matrix of the rows that share keys."""
    B, R, K, G, D = rows.shape
    return rows.transpose(0, 2, 3, 1, 4).reshape(B, K, G * R, D)


def _rows_last(rows: jax.Array, R: int) -> jax.Array:
    """Invert `_rows_first`."""
    B, K, GR, D = rows.shape
    return rows.reshape(B, K, GR // R, R, D).transpose(0, 3, 1, 2, 4)


class _Rows(NamedTuple):
    """The keys or values of a tile as they are stored, with their scales if they have 8 bits."""

    data: jax.Array  # [B, K, KV_TILE, D]
    scale: jax.Array | None  # f32[B, K, KV_TILE]


class _Pool:
    """The cache of one layer, readable in tiles of KV_TILE tokens for any block size.

    It is viewed as rows of `piece` tokens of one head, where `piece` divides both the block and the
    tile.
    """

    def __init__(self, kv, block_tables, kv_dtype, dot_dtype):
        _, self.planes, self.kv_heads, block_size, self.head_dim = kv.shape
        self.kv_dtype, self.dot_dtype = kv_dtype, dot_dtype
        self.piece = math.gcd(block_size, KV_TILE)
        self.pieces = block_size // self.piece  # per block
        data, scale = kv if isinstance(kv, QuantizedKV) else (kv, None)
        self.data = data.reshape(-1, self.piece * self.head_dim)
        self.scale = None if scale is None else scale.reshape(-1, self.piece)
        seqs, max_blocks = block_tables.shape
        first_rows = block_tables * (self.planes * self.kv_heads * self.pieces)
        first_rows = first_rows[:, :, None] + jnp.arange(self.pieces)[None, None]
        first_rows = first_rows.reshape(seqs, max_blocks * self.pieces)
        self.tile_pieces = KV_TILE // self.piece
        padding = -first_rows.shape[1] % self.tile_pieces
        # i32[S + GROUP, tiles * tile_pieces], the row of the keys of each piece's first head
        self.first_rows = jnp.pad(first_rows, ((0, GROUP), (0, padding)))

    def only(self, seq: jax.Array) -> _Pool:
        """Return the same cache with the sequences of `seq: i32[B]`, in that order."""
        pool = copy.copy(self)
        pool.first_rows = self.first_rows.at[seq].get(mode="clip")
        return pool

    def tile(self, seq, tile) -> tuple[_Rows, _Rows]:
        """Return keys and values of tile `tile[b]` of the sequences `seq + b`; tile: i32[B]."""
        seqs = tile.shape[0]
        piece = tile[:, None] * self.tile_pieces + jnp.arange(self.tile_pieces)[None]
        rows = self.first_rows.at[seq + jnp.arange(seqs)[:, None], piece].get(mode="clip")
        head = jnp.arange(self.kv_heads) * self.pieces
        at = rows[:, None, :] + head[None, :, None]  # [B, K, tile_pieces]
        keys = self._read(at)
        return keys, keys if self.planes == 1 else self._read(at + self.kv_heads * self.pieces)

    def _read(self, rows) -> _Rows:
        shape = (rows.shape[0], self.kv_heads, KV_TILE)
        # If this gather is fused with its consumer, it takes twice as long without row copies.
        data = lax.optimization_barrier(self.data.at[rows].get(mode="clip"))
        data = data.reshape(*shape, self.head_dim)
        if self.scale is None:
            return _Rows(data, None)
        return _Rows(data, self.scale.at[rows].get(mode="clip").reshape(shape))

    def floats(self, data):
        """Convert data to floats, exactly, without the scale."""
        if data.dtype in (jnp.uint16, jnp.uint8):
            data = lax.bitcast_convert_type(data, self.kv_dtype)
        return data.astype(self.dot_dtype)


def _scores(
    rows, keys: _Rows, pool: _Pool, sm_scale: float, soft_cap: float | None
) -> jax.Array:  # f32[B, K, R, KV_TILE]
    scores = lax.dot_general(
        rows,
        pool.floats(keys.data),
        (((3,), (3,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    scores = scores * sm_scale
    if keys.scale is not None:
        scores = scores * keys.scale[:, :, None]
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    return scores


def _attend(
    rows,
    visible,
    pool: _Pool,
    seq,
    *,
    sm_scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
):
    """Compute the online softmax of grouped query rows over the tiles of their sequences.

    Args:
      rows: [B, K, R, D], R rows of each of the B sequences from `seq` on.
      visible: i32[B, R or 1], the end of the keys that a row attends to.
      pool: the cache.
      seq: the first sequence.
      sm_scale: the factor on scores.
      window: how many keys before `visible` a row attends to; None for all.
      soft_cap: the cap of scores.
      sinks: f32[K, G], logits without a value; rows of a head are consecutive in `rows`.

    Returns:
      f32[B, K, R, D].
    """
    B, K, R, D = rows.shape
    longest = visible.max(axis=1)  # i32[B]
    first_key = jnp.zeros(B, jnp.int32)
    if window is not None:
        shortest = jnp.where(visible > 0, visible, longest[:, None]).min(axis=1)
        first_key = jnp.maximum(shortest - window, 0)
    first_tile = first_key // KV_TILE

    def over_tile(index, carry):
        top, total, out = carry
        position = (first_tile + index)[:, None] * KV_TILE + jnp.arange(KV_TILE)[
            None
        ]  # [B, KV_TILE]
        keys, values = pool.tile(seq, first_tile + index)
        scores = _scores(rows, keys, pool, sm_scale, soft_cap)
        seen = position[:, None, :] < visible[:, :, None]  # [B, R or 1, KV_TILE]
        if window is not None:
            seen &= position[:, None, :] >= visible[:, :, None] - window
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(axis=-1)
        # Selected rather than multiplied, because 0 * NaN is NaN.
        exists = (first_key[:, None] <= position) & (position < longest[:, None])
        exists = exists[:, None, :]  # [B, 1, KV_TILE]
        data = jnp.where(exists[..., None], values.data, jnp.zeros((), values.data.dtype))
        if values.scale is not None:
            weights = weights * jnp.where(exists, values.scale, 0.0)[:, :, None]
        added = lax.dot_general(
            weights.astype(pool.dot_dtype),
            pool.floats(data),
            (((3,), (2,)), ((0, 1), (0, 1))),
            preferred_element_type=jnp.float32,
        )
        return new_top, total, out * decay[..., None] + added

    top, total = jnp.full((B, K, R), NO_SCORE, jnp.float32), jnp.zeros((B, K, R), jnp.float32)
    if sinks is not None:  # a sink of -inf must not become the maximum
        of_rows = jnp.repeat(sinks, R // sinks.shape[1], axis=1)
        top, total = jnp.maximum(top, of_rows[None]), total + 1.0
    start = (top, total, jnp.zeros((B, K, R, D), jnp.float32))
    num_tiles = (-(-longest // KV_TILE) - first_tile).max()
    _, total, out = lax.fori_loop(0, num_tiles, over_tile, start)
    return out / jnp.where(total == 0.0, 1.0, total)[..., None]
