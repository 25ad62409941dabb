"""Paged attention in plain XLA for CPUs: its cost follows the real contexts.

Two loops, both with bounds that are only known at run time, so that a batch pays for the tiles it has
and not for S x max_blocks:

- the decode rows at the front of the batch, in groups of GROUP sequences, each group up to its longest
  context;
- everything else as work items, one tile of Q_TILE query rows of one sequence, up to the last key
  that the tile sees.

A KV tile is always KV_TILE tokens at absolute positions 0, KV_TILE, 2 * KV_TILE, ...: the order in which
a row's keys are summed depends on nothing but its own position. Tiles past a row's end change nothing
in it: they multiply by exp(0) and add zeros.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

KV_TILE = 128  # tokens
GROUP = 16  # sequences
Q_TILE = 64  # query rows

NO_SCORE = -1e30  # the running maximum before any score: finite, so that exp(-inf - NO_SCORE) is 0


def xla_attention(
    q: jax.Array,  # float[T, H, D]
    kv: jax.Array,  # dtype[N, 2, K, bs, D]
    block_tables: jax.Array,  # i32[S, max_blocks]
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
    *,
    sm_scale: float,
    kv_dtype: jnp.dtype,
) -> jax.Array:  # q.dtype[T, H, D]
    tokens, heads, head_dim = q.shape
    seqs = kv_lens.shape[0]
    kv_heads = kv.shape[2]
    # XLA:CPU has fast bfloat16 dots; float16 ones it computes in float32 anyway.
    dot_dtype = jnp.bfloat16 if kv_dtype == jnp.bfloat16 else jnp.float32
    pool = _Pool(kv, block_tables, kv_dtype, dot_dtype)
    q = q.astype(dot_dtype).reshape(tokens, kv_heads, heads // kv_heads, head_dim)

    q_lens = jnp.where(jnp.arange(seqs) < num_seqs, jnp.diff(cu_q_lens), 0)
    num_decodes = jnp.cumprod(q_lens == 1).sum(dtype=jnp.int32)
    group = min(GROUP, seqs, tokens)
    decode_rows = -(-min(seqs, tokens) // group) * group
    # Room for a window of Q_TILE rows that starts at the last row, and for whole groups.
    q = jnp.pad(q, ((0, max(decode_rows - tokens, Q_TILE)), (0, 0), (0, 0), (0, 0)))
    out = jnp.zeros(q.shape, jnp.float32)

    def decode_group(index, out):
        first = index * group
        lens = lax.dynamic_slice_in_dim(kv_lens_padded, first, group)
        live = first + jnp.arange(group) < num_decodes
        visible = jnp.where(live, lens, 0)[:, None]  # [group, 1]
        rows = lax.dynamic_slice_in_dim(q, first, group)  # [group, K, G, D]
        rows = _attend(rows, visible, pool, first, sm_scale)
        return lax.dynamic_update_slice_in_dim(out, rows, first, axis=0)

    kv_lens_padded = jnp.pad(kv_lens, (0, max(decode_rows - seqs, 0)))
    if decode_rows == group:
        out = decode_group(0, out)
    else:
        out = lax.fori_loop(0, -(-num_decodes // group), decode_group, out)

    tiles = jnp.where(jnp.arange(seqs) < num_decodes, 0, -(-q_lens // Q_TILE))
    tiles_end = jnp.cumsum(tiles)

    def work_item(item, out):
        seq = jnp.sum(tiles_end <= item, dtype=jnp.int32)
        row = (item - (tiles_end[seq] - tiles[seq])) * Q_TILE + jnp.arange(Q_TILE)
        first = cu_q_lens[seq] + row[0]
        visible = jnp.where(row < q_lens[seq], kv_lens[seq] - q_lens[seq] + row + 1, 0)
        rows = lax.dynamic_slice_in_dim(q, first, Q_TILE)  # [Q_TILE, K, G, D]
        _, K, G, D = rows.shape
        rows = rows.transpose(1, 2, 0, 3).reshape(1, K, G * Q_TILE, D)
        rows = _attend(rows, jnp.tile(visible, G)[None], pool, seq, sm_scale)
        rows = rows.reshape(K, G, Q_TILE, D).transpose(2, 0, 1, 3)
        old = lax.dynamic_slice_in_dim(out, first, Q_TILE)
        rows = jnp.where((row < q_lens[seq])[:, None, None, None], rows, old)
        return lax.dynamic_update_slice_in_dim(out, rows, first, axis=0)

    if tokens > 1:
        out = lax.fori_loop(0, tiles_end[-1], work_item, out)
    return out[:tokens].reshape(tokens, heads, head_dim).astype(q.dtype)


class _Pool:
    """The cache of one layer, to be read in tiles of KV_TILE tokens whatever its block size.

    It is seen as rows of `piece` tokens of one head, where `piece` divides both the block and the tile.
    """

    def __init__(self, kv, block_tables, kv_dtype, dot_dtype):
        num_blocks, _, self.kv_heads, block_size, self.head_dim = kv.shape
        self.kv_dtype, self.dot_dtype = kv_dtype, dot_dtype
        self.piece = math.gcd(block_size, KV_TILE)
        self.pieces = block_size // self.piece  # of a block
        self.rows = kv.reshape(-1, self.piece, self.head_dim)
        seqs, max_blocks = block_tables.shape
        first_rows = block_tables * (2 * self.kv_heads * self.pieces)
        first_rows = first_rows[:, :, None] + jnp.arange(self.pieces)
        first_rows = first_rows.reshape(seqs, max_blocks * self.pieces)
        self.tile_pieces = KV_TILE // self.piece
        padding = -first_rows.shape[1] % self.tile_pieces
        # i32[S + GROUP, tiles * tile_pieces]: the row of each piece's first head's keys
        self.first_rows = jnp.pad(first_rows, ((0, GROUP), (0, padding)))

    def tile(self, seq, seqs: int, tile) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one tile of `seqs` sequences from `seq` on: [seqs, K, KV_TILE, D] each."""
        rows = lax.dynamic_slice(
            self.first_rows, (seq, tile * self.tile_pieces), (seqs, self.tile_pieces)
        )
        head = jnp.arange(self.kv_heads) * self.pieces
        keys = rows[:, None, :] + head[None, :, None]  # [seqs, K, tile_pieces]
        return self._read(keys), self._read(keys + self.kv_heads * self.pieces)

    def _read(self, rows):
        seqs = rows.shape[0]
        read = self.rows.at[rows].get(mode="clip")
        return read.reshape(seqs, self.kv_heads, KV_TILE, self.head_dim)

    def floats(self, bits):
        if bits.dtype == jnp.uint16:
            bits = lax.bitcast_convert_type(bits, self.kv_dtype)
        return bits.astype(self.dot_dtype)


def _attend(rows, visible, pool: _Pool, seq, sm_scale: float):
    """Online softmax of grouped query rows over the tiles of their sequences.

    rows: [B, K, R, D], R rows of each of the B sequences from `seq` on; visible: i32[B, R or 1], how many
    keys a row sees. Returns f32[B, K, R, D].
    """
    B, K, R, D = rows.shape
    longest = visible.max(axis=1)  # i32[B]

    def over_tile(tile, carry):
        top, total, out = carry
        position = tile * KV_TILE + jnp.arange(KV_TILE)
        keys, values = pool.tile(seq, B, tile)
        scores = lax.dot_general(
            rows,
            pool.floats(keys),
            (((3,), (3,)), ((0, 1), (0, 1))),
            preferred_element_type=jnp.float32,
        )
        seen = position[None, None, :] < visible[:, :, None]  # [B, R or 1, KV_TILE]
        scores = jnp.where(seen[:, None], scores * sm_scale, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(axis=-1))
        weights = jnp.exp(scores - new_top[..., None])
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(axis=-1)
        exists = position[None, :] < longest[:, None]  # [B, KV_TILE]: 0 * NaN is NaN
        values = jnp.where(exists[:, None, :, None], values, jnp.zeros((), values.dtype))
        added = lax.dot_general(
            weights.astype(pool.dot_dtype),
            pool.floats(values),
            (((3,), (2,)), ((0, 1), (0, 1))),
            preferred_element_type=jnp.float32,
        )
        return new_top, total, out * decay[..., None] + added

    start = (
        jnp.full((B, K, R), NO_SCORE, jnp.float32),
        jnp.zeros((B, K, R), jnp.float32),
        jnp.zeros((B, K, R, D), jnp.float32),
    )
    num_tiles = -(-longest.max() // KV_TILE)
    _, total, out = lax.fori_loop(0, num_tiles, over_tile, start)
    return out / jnp.where(total == 0.0, 1.0, total)[..., None]
