"""The work list of the GPU kernel, computed on the device from lengths alone.

A *row* is one query head of one token, `token * G + head in the group`. The rows of a sequence are
split into *tiles* of at most `query_rows` rows. One tile and one key/value head are a *unit*, which
needs a run of KV tiles of KV_TILE tokens at absolute positions 0, KV_TILE, ... The KV tiles of all
units form one line, and each of the C thread blocks (CTAs) takes an equal piece of it. The work of
a CTA for one unit is an *item*.

- Balanced (the default): a piece is `per` KV tiles and may start and end anywhere.
- `uniform`: items are whole *splits*, `split` KV tiles at absolute positions, and a CTA takes the
  splits that start in its piece. The order in which a row's keys are summed, within splits and over
  them, then depends on its position only.

Query rows and results are copied in *slices* of SLICE rows, because the hardware's copies start at
multiples of eight rows. Tiles do not share slices.

All functions are pure `jnp` with fixed shapes and run once per step, because all layers of a model
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
MAX_SPLITS = 8  # per unit, if uniform
MIN_SPLIT = 8  # KV tiles


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The values that are known when the plan is traced."""

    tokens: int  # T
    seqs: int  # S
    heads: int  # H
    kv_heads: int  # K
    max_context: int  # tokens per block table
    max_q_len: int
    query_rows: int  # per tile
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
        """The maximum number of tiles of query rows."""
        by_sequence = self.seqs * -(-self.max_q_len // self.tile_tokens)
        by_token = self.seqs + self.tokens // self.tile_tokens
        return min(self.tokens, by_sequence, by_token)

    @property
    def tile_slices(self) -> int:
        """The maximum number of slices of a tile."""
        rows = min(self.tile_tokens, self.max_q_len) * self.group
        return -(-rows // SLICE)

    @property
    def num_slices(self) -> int:
        """The maximum number of slices of all tiles of one key/value head."""
        rounded = (self.tokens * self.group + (SLICE - 1) * self.num_tiles) // SLICE
        return min(rounded, self.num_tiles * self.tile_slices)

    @property
    def decodes(self) -> bool:
        """True if tile i is the token in row i, because no sequence has several."""
        return self.max_q_len == 1 and self.seqs >= self.tokens

    @property
    def split(self) -> int:
        """KV tiles per split."""
        return max(MIN_SPLIT, -(-self._kv_tiles // MAX_SPLITS))

    @property
    def partial_slices(self) -> int:
        """The maximum number of slices for the results of items that are not a whole unit."""
        if self.uniform:
            return self.kv_heads * self.num_slices * self._most_splits
        return 2 * self.ctas * self.tile_slices

    @property
    def partial_items(self) -> int:
        """The maximum number of items that are not a whole unit."""
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
    POSITION = 1  # first token's position
    KV_LEN = 2  # the sequence's KV length
    FIRST = 3  # KV tile
    COUNT = 4  # KV tiles; 0: the tile is unused
    START = 5  # start of the first unit in the line
    SLICE = 6  # the first
    SLICES = 7
    PARTIAL = 8  # uniform: the first slice of the units' partial results
    PARTIAL_ITEM = 9  # uniform: the first of the units' items
    PER_CTA = 10  # KV tiles per CTA; the same in all rows
    COLUMNS = 11


class Cta:
    """Columns of `Plan.ctas`: the start and the length of each CTA's piece of the line."""

    TILE = 0
    HEAD = 1
    OFFSET = 2  # KV tiles into the unit
    ITEMS = 3
    LEFT = 4  # KV tiles
    COLUMNS = 5


class Sum:
    """Columns of `Plan.sums`: the slices that are added to make a slice of the output."""

    FIRST = 0
    STRIDE = 1
    COUNT = 2  # 0: the slice is unused
    ITEM = 3  # the first of the partial items; the others follow
    ROW = 4  # the slice's first row in its tile
    COLUMNS = 5


class Plan(NamedTuple):
    """The work list. The K * num_slices slices of the output precede those of partial results."""

    tiles: jax.Array  # i32[num_tiles, Tile.COLUMNS]
    ctas: jax.Array  # i32[ctas, Cta.COLUMNS]
    sums: jax.Array  # i32[K * num_slices, Sum.COLUMNS]
    pack: jax.Array  # i32[K * num_slices * SLICE], the row of q[T * H, D], or T * H for none
    unpack: jax.Array  # i32[T, H], the row of the output's slices, or past the end for none


def make_plan(
    geometry: Geometry,
    kv_lens: jax.Array,  # i32[S]
    cu_q_lens: jax.Array,  # i32[S + 1]
    num_seqs: jax.Array,  # i32[]
) -> Plan:
    q_lens = jnp.where(jnp.arange(geometry.seqs) < num_seqs, jnp.diff(cu_q_lens), 0)
    tiles = _query_tiles(geometry, kv_lens, q_lens)
    line = _line(geometry, tiles)
    ctas = _share_line(geometry, tiles, line)
    slices = _slices(geometry, tiles)
    columns = [tiles.seq, tiles.position, kv_lens[tiles.seq], tiles.first, tiles.count]
    columns += [line.start, tiles.slice0, tiles.slices, line.partial0, line.item0]
    columns += [jnp.broadcast_to(line.per_cta, tiles.first.shape)]
    return Plan(
        tiles=jnp.stack(columns, axis=1).astype(jnp.int32),
        ctas=ctas.astype(jnp.int32),
        sums=_sums(geometry, tiles, line, slices).astype(jnp.int32),
        pack=_pack(geometry, tiles, slices, cu_q_lens).astype(jnp.int32),
        unpack=_unpack(geometry, tiles, kv_lens, cu_q_lens, num_seqs).astype(jnp.int32),
    )


class _QueryTiles(NamedTuple):
    """Tiles of query rows; arrays are i32[num_tiles], except `seq_*`, which are i32[S]."""

    live: jax.Array  # bool
    seq: jax.Array
    offset: jax.Array  # its first token's index in the sequence's rows
    num_tokens: jax.Array
    position: jax.Array  # its first token's position
    first: jax.Array  # KV tile
    count: jax.Array  # number of KV tiles
    slices: jax.Array
    slices_end: jax.Array  # slices of all tiles up to this one
    slice0: jax.Array  # the first slice
    seq_tiles: jax.Array
    seq_tiles_end: jax.Array


def _query_tiles(g: Geometry, kv_lens: jax.Array, q_lens: jax.Array) -> _QueryTiles:
    seq_tiles = -(-q_lens // g.tile_tokens)
    seq_tiles_end = jnp.cumsum(seq_tiles)
    index = jnp.arange(g.num_tiles)
    live = index < seq_tiles_end[-1]
    seq = jnp.minimum(_passed(seq_tiles_end, index), g.seqs - 1)
    offset = (index - (seq_tiles_end[seq] - seq_tiles[seq])) * g.tile_tokens
    num_tokens = jnp.where(live, jnp.clip(q_lens[seq] - offset, 0, g.tile_tokens), 0)
    position = kv_lens[seq] - q_lens[seq] + offset
    first = jnp.zeros_like(position)
    if g.window is not None:
        first = jnp.maximum(position + 1 - g.window, 0) // KV_TILE
    count = jnp.where(live, -(-(position + num_tokens) // KV_TILE) - first, 0)
    slices = -(-(num_tokens * g.group) // SLICE)
    slices_end = jnp.cumsum(slices)
    return _QueryTiles(
        live, seq, offset, num_tokens, position, first, count,
        slices, slices_end, slices_end - slices, seq_tiles, seq_tiles_end,
    )  # fmt: skip


class _Line(NamedTuple):
    """All KV tiles of all units in a row; arrays without a shape are i32[num_tiles]."""

    start: jax.Array  # start of the tile's first unit
    end: jax.Array  # end of its last unit
    total: jax.Array  # i32[]
    per_cta: jax.Array  # i32[], KV tiles
    splits: jax.Array  # items per unit; 1 if balanced
    item0: jax.Array  # the first of the units' partial items
    partial0: jax.Array  # the first slice of the units' partial results


def _line(g: Geometry, tiles: _QueryTiles) -> _Line:
    K, first, count = g.kv_heads, tiles.first, tiles.count
    end = jnp.cumsum(K * count)
    per_cta = jnp.maximum(-(-end[-1] // g.ctas), 1)
    splits = tiles.live.astype(jnp.int32)
    item0 = partial0 = jnp.zeros_like(first)
    if g.uniform:
        splits = jnp.where(tiles.live, -(-(first + count) // g.split) - first // g.split, 0)
        partial_items = jnp.where(splits > 1, K * splits, 0)
        partial_slices = partial_items * tiles.slices
        item0 = jnp.cumsum(partial_items) - partial_items
        partial0 = jnp.cumsum(partial_slices) - partial_slices + K * g.num_slices
    return _Line(end - K * count, end, end[-1], per_cta, splits, item0, partial0)


def _share_line(g: Geometry, tiles: _QueryTiles, line: _Line) -> jax.Array:
    """Split the line into one piece per CTA: `Plan.ctas`."""
    first, count = tiles.first, tiles.count

    def locate(place: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the tile, head and offset into the unit of a place in the line."""
        tile = jnp.minimum(_passed(line.end, place), jnp.maximum(tiles.seq_tiles_end[-1] - 1, 0))
        size = jnp.maximum(count[tile], 1)
        inside = place - line.start[tile]
        return tile, inside // size, inside % size

    border = jnp.minimum(jnp.arange(g.ctas + 1) * line.per_cta, line.total)
    tile, head, inside = locate(border)
    in_unit = jnp.zeros_like(inside)
    if g.uniform:
        # A split belongs to the CTA of the piece in which it starts.
        next_split = (-(-(first[tile] + inside) // g.split)) * g.split - first[tile]
        next_split = jnp.where(inside == 0, 0, jnp.minimum(next_split, count[tile]))
        border = border + next_split - inside
        tile, head, inside = locate(border)
        in_unit = jnp.where(inside == 0, 0, (first[tile] + inside) // g.split)
        in_unit = jnp.where(inside == 0, 0, in_unit - first[tile] // g.split)
    splits = line.splits[tile]
    splits_end = jnp.cumsum(g.kv_heads * line.splits)
    item = splits_end[tile] - g.kv_heads * splits + head * splits + in_unit
    started = 0 if g.uniform else (inside[1:] > 0).astype(jnp.int32)
    items = jnp.where(border[1:] > border[:-1], item[1:] - item[:-1] + started, 0)
    return jnp.stack([tile[:-1], head[:-1], inside[:-1], items, jnp.diff(border)], axis=1)


class _Slices(NamedTuple):
    """Slices of the output of one head; arrays are i32[num_slices]."""

    tile: jax.Array
    used: jax.Array  # 0 or 1
    within: jax.Array  # the number in the tile


def _slices(g: Geometry, tiles: _QueryTiles) -> _Slices:
    index = jnp.arange(g.num_slices)
    tile = jnp.minimum(_passed(tiles.slices_end, index), g.num_tiles - 1)
    used = (index < tiles.slices_end[-1]).astype(jnp.int32)
    return _Slices(tile, used, index - tiles.slice0[tile])


def _sums(g: Geometry, tiles: _QueryTiles, line: _Line, slices: _Slices) -> jax.Array:
    """Return the slices that add up to each slice of the output: `Plan.sums`."""
    of_tile, within = slices.tile, slices.within
    heads = jnp.arange(g.kv_heads)[:, None]
    here = heads * g.num_slices + jnp.arange(g.num_slices)[None]
    if g.uniform:
        stride = jnp.broadcast_to(tiles.slices[of_tile], here.shape)
        parts = jnp.broadcast_to(line.splits[of_tile], here.shape)
        there = line.partial0[of_tile][None] + heads * (stride * parts) + within[None]
        first_item = line.item0[of_tile][None] + heads * parts
    else:
        count = tiles.count[of_tile][None]
        unit = line.start[of_tile][None] + heads * count
        first_cta, last_cta = unit // line.per_cta, (unit + count - 1) // line.per_cta
        parts = last_cta - first_cta + 1
        stride = jnp.full(here.shape, g.tile_slices)
        first_item = first_cta * 2 + 1
        there = g.kv_heads * g.num_slices + first_item * stride + within[None]
    source = jnp.where(parts > 1, there, here)
    first_item = jnp.where(parts > 1, first_item, 0)
    row = jnp.broadcast_to(within * SLICE, here.shape)
    parts = parts * slices.used[None]
    sums = jnp.stack([source, stride, parts, first_item, row], axis=-1)
    return sums.reshape(-1, Sum.COLUMNS)


def _pack(g: Geometry, tiles: _QueryTiles, slices: _Slices, cu_q_lens: jax.Array) -> jax.Array:
    """Return the row of q that each row of the slices takes: `Plan.pack`."""
    heads = jnp.arange(g.kv_heads)[:, None]
    of_tile = jnp.repeat(slices.tile, SLICE)
    row = jnp.arange(g.num_slices * SLICE) - tiles.slice0[of_tile] * SLICE
    token = cu_q_lens[tiles.seq[of_tile]] + tiles.offset[of_tile] + row // g.group
    exists = (jnp.repeat(slices.used, SLICE) > 0) & (row < tiles.num_tokens[of_tile] * g.group)
    query_row = (token * g.heads + row % g.group)[None] + heads * g.group
    return jnp.where(exists[None], query_row, g.tokens * g.heads).reshape(-1)


def _unpack(
    g: Geometry,
    tiles: _QueryTiles,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
) -> jax.Array:
    """Return the row of the output's slices for each query head and token: `Plan.unpack`."""
    seq, visible = token_rows(g.tokens, kv_lens, cu_q_lens, num_seqs)
    in_seq = jnp.arange(g.tokens) - cu_q_lens[seq]
    tile = tiles.seq_tiles_end[seq] - tiles.seq_tiles[seq] + in_seq // g.tile_tokens
    tile = jnp.clip(tile, 0, g.num_tiles - 1)
    row = tiles.slice0[tile] * SLICE + (in_seq % g.tile_tokens) * g.group
    query_head = jnp.arange(g.heads)
    head_row = (query_head // g.group) * (g.num_slices * SLICE) + query_head % g.group
    nowhere = g.kv_heads * g.num_slices * SLICE
    return jnp.where((visible > 0)[:, None], head_row[None] + row[:, None], nowhere)


def _passed(ends: jax.Array, index: jax.Array) -> jax.Array:
    """Return how many of the ascending `ends` each index has reached."""
    return jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
