"""Who computes what: the work list of the GPU kernel, made on the device from lengths alone.

The query rows of a sequence are cut into *tiles* of at most `query_rows` rows, a row being one
token's one query head, `token * G + head in the group`. One tile and one key/value head are a
*unit*: it needs a run of KV tiles of KV_TILE tokens at absolute positions 0, KV_TILE, ... All KV
tiles of all units stand in one line, unit after unit, and each of the C thread blocks (CTAs) takes
an equal piece of the line. What a CTA does for one unit is an *item*.

- Balanced (the default): a piece is `per` KV tiles, wherever it starts or ends.
- `uniform`: items are whole *splits*, `split` KV tiles at absolute positions, and a CTA takes
  those that start in its piece. The order in which a row's keys are summed, within splits and over
  them, then follows from its position alone.

Query rows and results travel in *slices* of SLICE rows, since the copies of the hardware start at
multiples of eight rows. A tile has slices of its own.

Everything here is pure `jnp` of fixed shapes, to be computed once per step: the layers of a model
have the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from forge_kernels.attention.reference import token_rows

KV_TILE = 64  # tokens
SLICE = 8  # rows
MAX_SPLITS = 8  # of a unit, where uniform
MIN_SPLIT = 8  # KV tiles


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What is known when the plan is traced."""

    tokens: int  # T
    seqs: int  # S
    heads: int  # H
    kv_heads: int  # K
    max_context: int  # tokens that a block table holds
    max_q_len: int
    query_rows: int  # of a tile
    ctas: int
    window: int | None = None
    uniform: bool = False

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tile_tokens(self) -> int:
        return self.query_rows // self.group

    @property
    def num_tiles(self) -> int:
        """Of query rows, at most."""
        by_sequence = self.seqs * -(-self.max_q_len // self.tile_tokens)
        by_token = self.seqs + self.tokens // self.tile_tokens
        return min(self.tokens, by_sequence, by_token)

    @property
    def tile_slices(self) -> int:
        """Slices of a tile, at most."""
        rows = min(self.tile_tokens, self.max_q_len) * self.group
        return -(-rows // SLICE)

    @property
    def num_slices(self) -> int:
        """Slices of all tiles of one key/value head, at most."""
        rounded = (self.tokens * self.group + (SLICE - 1) * self.num_tiles) // SLICE
        return min(rounded, self.num_tiles * self.tile_slices)

    @property
    def split(self) -> int:
        """KV tiles of a split."""
        return max(MIN_SPLIT, -(-self._kv_tiles // MAX_SPLITS))

    @property
    def partial_slices(self) -> int:
        """Slices for the results of items that are not a whole unit, at most."""
        if self.uniform:
            return self.kv_heads * self.num_slices * self._most_splits
        return 2 * self.ctas * self.tile_slices

    @property
    def partial_items(self) -> int:
        """Items that are not a whole unit, at most."""
        if self.uniform:
            return self.kv_heads * self.num_tiles * self._most_splits
        return 2 * self.ctas

    @property
    def _most_splits(self) -> int:
        splits = -(-self._kv_tiles // self.split)
        return splits if splits > 1 else 0

    @property
    def _kv_tiles(self) -> int:
        return -(-self.max_context // KV_TILE)


class Tile:
    """Columns of `Plan.tiles`."""

    SEQ = 0
    POSITION = 1  # of the first token
    KV_LEN = 2  # of the sequence
    FIRST = 3  # KV tile
    COUNT = 4  # of KV tiles; 0: there is no such tile of query rows
    START = 5  # of the first unit in the line
    SLICE = 6  # the first
    SLICES = 7
    PARTIAL = 8  # uniform: the first slice of the units' partial results
    PARTIAL_ITEM = 9  # uniform: the first of the units' items
    PER_CTA = 10  # KV tiles of a CTA; the same in all rows
    COLUMNS = 11


class Cta:
    """Columns of `Plan.ctas`: where its piece of the line starts, and how long it is."""

    TILE = 0
    HEAD = 1
    OFFSET = 2  # KV tiles into the unit
    ITEMS = 3
    LEFT = 4  # KV tiles
    COLUMNS = 5


class Sum:
    """Columns of `Plan.sums`: which slices add up to a slice of the output."""

    FIRST = 0
    STRIDE = 1
    COUNT = 2  # 0: a slice of nobody
    ITEM = 3  # the first of the partial items; the others follow
    ROW = 4  # the slice's first row in its tile
    COLUMNS = 5


class Plan(NamedTuple):
    """With slices of the output first, K * num_slices, then those of partial results."""

    tiles: jax.Array  # i32[num_tiles, Tile.COLUMNS]
    ctas: jax.Array  # i32[ctas, Cta.COLUMNS]
    sums: jax.Array  # i32[K * num_slices, Sum.COLUMNS]
    pack: jax.Array  # i32[K * num_slices * SLICE]: the row of q[T * H, D]; T * H for none
    unpack: jax.Array  # i32[T, H]: the row of the output's slices; past the end for none


def make_plan(  # noqa: PLR0915
    geometry: Geometry,
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
) -> Plan:
    g = geometry
    K, G, BQ = g.kv_heads, g.group, g.tile_tokens
    q_lens = jnp.where(jnp.arange(g.seqs) < num_seqs, jnp.diff(cu_q_lens), 0)

    seq_tiles = -(-q_lens // BQ)
    seq_tiles_end = jnp.cumsum(seq_tiles)
    index = jnp.arange(g.num_tiles)
    live = index < seq_tiles_end[-1]
    seq = jnp.minimum(_passed(seq_tiles_end, index), g.seqs - 1)
    offset = (index - (seq_tiles_end[seq] - seq_tiles[seq])) * BQ
    num_tokens = jnp.where(live, jnp.clip(q_lens[seq] - offset, 0, BQ), 0)
    position = kv_lens[seq] - q_lens[seq] + offset
    first = jnp.zeros_like(position)
    if g.window is not None:
        first = jnp.maximum(position + 1 - g.window, 0) // KV_TILE
    count = jnp.where(live, -(-(position + num_tokens) // KV_TILE) - first, 0)
    slices = -(-(num_tokens * G) // SLICE)
    slices_end = jnp.cumsum(slices)
    slice0 = slices_end - slices

    end = jnp.cumsum(K * count)
    start, total = end - K * count, end[-1]
    per_cta = jnp.maximum(-(-total // g.ctas), 1)
    if g.uniform:
        splits = jnp.where(live, -(-(first + count) // g.split) - first // g.split, 0)
        partial_items = jnp.where(splits > 1, K * splits, 0)
        partial_slices = partial_items * slices
        item0 = jnp.cumsum(partial_items) - partial_items
        partial0 = jnp.cumsum(partial_slices) - partial_slices + K * g.num_slices
    else:
        splits = live.astype(jnp.int32)
        item0 = partial0 = jnp.zeros_like(first)
    splits_end = jnp.cumsum(K * splits)

    def locate(place):
        """The tile, head and offset into the unit of a place in the line."""
        tile = jnp.minimum(_passed(end, place), jnp.maximum(seq_tiles_end[-1] - 1, 0))
        size = jnp.maximum(count[tile], 1)
        inside = place - start[tile]
        return tile, inside // size, inside % size

    border = jnp.minimum(jnp.arange(g.ctas + 1) * per_cta, total)
    tile, head, inside = locate(border)
    if g.uniform:
        # A split belongs to the CTA in whose piece it starts.
        next_split = (-(-(first[tile] + inside) // g.split)) * g.split - first[tile]
        next_split = jnp.where(inside == 0, 0, jnp.minimum(next_split, count[tile]))
        border = border + next_split - inside
        tile, head, inside = locate(border)
        in_unit = jnp.where(inside == 0, 0, (first[tile] + inside) // g.split)
        in_unit = jnp.where(inside == 0, 0, in_unit - first[tile] // g.split)
    else:
        in_unit = jnp.zeros_like(inside)
    item = splits_end[tile] - K * splits[tile] + head * splits[tile] + in_unit
    started = 0 if g.uniform else (inside[1:] > 0).astype(jnp.int32)
    items = jnp.where(border[1:] > border[:-1], item[1:] - item[:-1] + started, 0)

    # The slices that make a slice of the output.
    index = jnp.arange(g.num_slices)
    of_tile = jnp.minimum(_passed(slices_end, index), g.num_tiles - 1)
    used = (index < slices_end[-1]).astype(jnp.int32)
    within = index - slice0[of_tile]
    heads = jnp.arange(K)[:, None]
    here = heads * g.num_slices + index
    if g.uniform:
        stride = jnp.broadcast_to(slices[of_tile], here.shape)
        parts = jnp.broadcast_to(splits[of_tile], here.shape)
        there = partial0[of_tile] + heads * (stride * parts) + within
        first_item = item0[of_tile] + heads * parts
    else:
        unit = start[of_tile] + heads * count[of_tile]
        first_cta, last_cta = unit // per_cta, (unit + count[of_tile] - 1) // per_cta
        parts = last_cta - first_cta + 1
        stride = jnp.full(here.shape, g.tile_slices)
        first_item = first_cta * 2 + 1
        there = K * g.num_slices + first_item * stride + within
    source = jnp.where(parts > 1, there, here)
    first_item = jnp.where(parts > 1, first_item, 0)
    within = jnp.broadcast_to(within * SLICE, here.shape)
    sums = jnp.stack([source, stride, parts * used, first_item, within], axis=-1)
    sums = sums.reshape(-1, Sum.COLUMNS)

    # Rows of the slices from rows of q, and back.
    row = jnp.arange(g.num_slices * SLICE)
    of_tile = jnp.repeat(of_tile, SLICE)
    row = row - slice0[of_tile] * SLICE
    token = cu_q_lens[seq[of_tile]] + offset[of_tile] + row // G
    exists = (jnp.repeat(used, SLICE) > 0) & (row < num_tokens[of_tile] * G)
    pack = jnp.where(exists, token * g.heads + heads * G + row % G, g.tokens * g.heads)

    seq_of, visible = token_rows(g.tokens, kv_lens, cu_q_lens, num_seqs)
    in_seq = jnp.arange(g.tokens) - cu_q_lens[seq_of]
    of_tile = seq_tiles_end[seq_of] - seq_tiles[seq_of] + in_seq // BQ
    of_tile = jnp.clip(of_tile, 0, g.num_tiles - 1)
    row = slice0[of_tile] * SLICE + (in_seq % BQ) * G
    query_head = jnp.arange(g.heads)
    unpack = (query_head // G) * (g.num_slices * SLICE) + query_head % G + row[:, None]
    unpack = jnp.where((visible > 0)[:, None], unpack, K * g.num_slices * SLICE)

    per_cta = jnp.broadcast_to(per_cta, first.shape)
    tiles = [seq, position, kv_lens[seq], first, count, start, slice0, slices]
    tiles += [partial0, item0, per_cta]
    ctas = [tile[:-1], head[:-1], inside[:-1], items, jnp.diff(border)]
    return Plan(
        tiles=jnp.stack(tiles, axis=1).astype(jnp.int32),
        ctas=jnp.stack(ctas, axis=1).astype(jnp.int32),
        sums=sums.astype(jnp.int32),
        pack=pack.reshape(-1).astype(jnp.int32),
        unpack=unpack.astype(jnp.int32),
    )


def _passed(ends: jax.Array, index: jax.Array) -> jax.Array:
    """How many of the ascending `ends` each index has reached."""
    return jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
