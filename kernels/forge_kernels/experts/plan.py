"""The work list of the experts' GPU kernel, computed on the device from the router's choices.

A *pair* is one token and one of its experts. The pairs of an expert fill *tiles* of `tile_rows`
rows, and no tile has pairs of two experts. The kernel reads an expert's matrices once per tile, and
nothing of experts without tiles.

All functions are pure `jnp` with fixed shapes, without a loop or a sort. A layer's plan is a few
small kernels of the step's command buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

CHUNK = 256  # pairs that are compared with each other


@dataclass(frozen=True)
class Geometry:
    """The values that are known when the plan is traced."""

    tokens: int  # T
    per_token: int  # k
    experts: int  # E
    total: int | None = None  # experts of all devices, if they share them

    @property
    def pairs(self) -> int:
        return self.tokens * self.per_token

    @property
    def tile_rows(self) -> int:
        """The rows of a tile: above the average of an expert's pairs, so that most have one."""
        average = self.pairs / (self.total or self.experts)
        return 16 if average <= 8 else 32 if average <= 16 else 64

    @property
    def num_tiles(self) -> int:
        """The maximum number of tiles."""
        chosen = min(self.experts, self.pairs)
        return chosen + (self.pairs - chosen) // self.tile_rows

    @property
    def rows(self) -> int:
        """The rows of all tiles."""
        return self.num_tiles * self.tile_rows


class Plan(NamedTuple):
    """The work list. Tiles are in the order of their experts' numbers."""

    expert: jax.Array  # i32[num_tiles], E for unused tiles
    token: jax.Array  # i32[rows], 0 for unused rows
    row: jax.Array  # i32[T, k], of each pair, from `rows` on for pairs that do not exist


def make_plan(
    geometry: Geometry,
    experts: jax.Array,  # i32[T, k]
    num_rows: jax.Array,  # i32[], tokens
) -> Plan:
    g = geometry
    exists = jnp.arange(g.tokens)[:, None] < num_rows
    pair_expert = jnp.where(exists, experts, g.experts).reshape(-1)
    before, counts = _rank(g, pair_expert)
    tiles = -(-counts // g.tile_rows)
    number = jnp.arange(g.experts)
    ends = jnp.sum(jnp.where(number[None] <= number[:, None], tiles[None], 0), axis=1)
    expert = jnp.sum(ends[None] <= jnp.arange(g.num_tiles)[:, None], axis=1)
    valid = (pair_expert >= 0) & (pair_expert < g.experts)
    mine = jnp.where(valid, pair_expert, 0)
    pair = jnp.arange(g.pairs)
    row = jnp.where(valid, (ends - tiles)[mine] * g.tile_rows + before, g.rows + pair)
    token = jnp.zeros(g.rows, jnp.int32)
    token = token.at[row].set(pair // g.per_token, mode="drop", unique_indices=True)
    as_i32 = [each.astype(jnp.int32) for each in (expert, token, row.reshape(experts.shape))]
    return Plan(*as_i32)


def _rank(g: Geometry, pair_expert: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return how many earlier pairs have each pair's expert, and the pairs of each expert.

    Pairs are compared within chunks. Counts of earlier chunks are added.
    """
    size = min(CHUNK, g.pairs)
    chunks = -(-g.pairs // size)
    padded = jnp.pad(pair_expert, (0, chunks * size - g.pairs), constant_values=g.experts)
    padded = padded.reshape(chunks, size)
    place = jnp.arange(size)
    earlier = (padded[:, None] == padded[:, :, None]) & (place[None, None] < place[None, :, None])
    before = jnp.sum(earlier, axis=2)
    counts = jnp.sum(padded[:, None] == jnp.arange(g.experts)[None, :, None], axis=2)  # [chunks, E]
    if chunks > 1:
        chunk = jnp.arange(chunks)
        passed = chunk[None, :, None] < chunk[:, None, None]
        carried = jnp.sum(jnp.where(passed, counts[None], 0), axis=1)  # [chunks, E]
        mine = jnp.clip(padded, 0, g.experts - 1)
        before = before + jnp.take_along_axis(carried, mine, axis=1)
    return before.reshape(-1)[: g.pairs], jnp.sum(counts, axis=0)


def tiles_read(geometry: Geometry, experts: jax.Array, num_rows: jax.Array) -> jax.Array:
    """Return i32[], how many times the kernel reads one expert's matrices for these choices."""
    plan = make_plan(geometry, experts, num_rows)
    return jnp.sum(plan.expert < geometry.experts, dtype=jnp.int32)
