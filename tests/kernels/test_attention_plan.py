"""The work list of the GPU attention, walked: complete, balanced, nothing written twice."""

import inspect
from collections import Counter
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from forge_kernels.attention import plan as plan_file
from forge_kernels.attention.plan import KV_TILE, SLICE, Geometry, Plan, Tile, make_plan

jitted_plan = jax.jit(make_plan, static_argnums=0)

CASES = {
    "decode": ((1, 1), (1, 64), (1, 65), (1, 700), (1, 3)),
    "one long sequence": ((1, 3000),),
    "mixed": ((1, 200), (4, 133), (40, 90), (0, 12), (70, 800), (3, 3), (1, 1400)),
    "prompts": ((199, 199), (64, 64), (31, 900)),
    "nothing": (),
    "empty sequences": ((0, 0), (0, 40)),
}


@dataclass(frozen=True)
class Item:
    cta: int
    tile: int
    head: int
    low: int  # KV tile
    high: int
    target: int  # slice
    slices: int
    partial: int | None  # index of the partial item


def geometry(**options) -> Geometry:
    sizes = {"tokens": 310, "seqs": 10, "max_q_len": 200, "max_context": 4096}
    return Geometry(**{"heads": 8, "kv_heads": 2, "query_rows": 64, "ctas": 7} | sizes | options)


def plan_of(g: Geometry, seqs, make) -> Plan:
    kv_lens = np.full(g.seqs, 99, np.int32)
    kv_lens[: len(seqs)] = [context for _, context in seqs]
    cu_q_lens = np.full(g.seqs + 1, g.tokens, np.int32)
    cu_q_lens[: len(seqs) + 1] = np.cumsum([0, *(rows for rows, _ in seqs)])
    plan = make(g, kv_lens, cu_q_lens, np.int32(len(seqs)))
    return Plan(*(np.asarray(table) for table in plan))


def walk(g: Geometry, plan: Plan) -> list[Item]:
    """Return the items of all CTAs in the kernel's order."""
    items = []
    for cta, (tile, head, offset, count, left) in enumerate(plan.ctas):
        for _ in range(count):
            row = plan.tiles[tile]
            first, whole = row[Tile.FIRST], row[Tile.COUNT]
            size = min(whole - offset, left)
            parts, part = 1, 0
            if g.uniform:
                here = first + offset
                size = min(size, (here // g.split + 1) * g.split - here)
                parts = (first + whole - 1) // g.split - first // g.split + 1
                part = here // g.split - first // g.split
                partial = row[Tile.PARTIAL_ITEM] + head * parts + part
                target = row[Tile.PARTIAL] + (head * parts + part) * row[Tile.SLICES]
            else:
                parts = 1 if size == whole else 2
                unit_cta = (row[Tile.START] + head * whole) // row[Tile.PER_CTA]
                partial = unit_cta + cta + 1
                target = g.kv_heads * g.num_slices + partial * g.tile_slices
            if parts == 1:
                partial, target = None, head * g.num_slices + row[Tile.SLICE]
            low, slices = first + offset, row[Tile.SLICES]
            items.append(Item(cta, tile, head, low, low + size, target, slices, partial))
            offset, left = offset + size, left - size
            if offset == whole:
                head, offset = head + 1, 0
            if head == g.kv_heads:
                tile, head = tile + 1, 0
        assert left == 0
    return items


def visible_pairs(g: Geometry, seqs) -> Counter:
    """Return (token, kv head, KV tile) of everything that some row must see."""
    pairs, start = Counter(), 0
    for rows, context in seqs:
        for j in range(rows):
            position = context - rows + j
            low = 0 if g.window is None else max(0, position + 1 - g.window) // KV_TILE
            for kv_tile in range(low, position // KV_TILE + 1):
                pairs.update((start + j, head, kv_tile) for head in range(g.kv_heads))
        start += rows
    return pairs


def check(g: Geometry, seqs, make=jitted_plan) -> None:
    plan, G = plan_of(g, seqs, make), g.group
    items = walk(g, plan)
    last = g.tokens * g.heads
    num_slices = g.kv_heads * g.num_slices
    token_of = np.where(plan.pack < last, plan.pack // g.heads, -1)
    token_of = token_of.reshape(g.kv_heads, g.num_slices, SLICE)

    # Every visible pair exactly once; a tile may cover pairs that are masked for some rows.
    seen, wanted = Counter(), visible_pairs(g, seqs)
    for item in items:
        first = plan.tiles[item.tile, Tile.SLICE]
        tokens = set(token_of[item.head, first : first + item.slices].ravel()) - {-1}
        for kv_tile in range(item.low, item.high):
            seen.update((token, item.head, kv_tile) for token in tokens)
    assert set(seen) >= set(wanted) and set(seen.values()) <= {1}
    limit = dict.fromkeys(range(g.tokens), -1)
    for token, _, kv_tile in wanted:
        limit[token] = max(limit[token], kv_tile)
    beyond = [kv_tile - limit[token] for token, _, kv_tile in seen]
    assert max(beyond, default=0) <= -(-g.tile_tokens // KV_TILE)

    # Loads are equal up to one KV tile or one split.
    loads = Counter({cta: 0 for cta in range(g.ctas)})
    for item in items:
        loads[item.cta] += item.high - item.low
    busy = [load for load in loads.values() if load]
    if busy and not g.uniform:
        assert max(busy) == -(-sum(busy) // g.ctas)
        assert [load == max(busy) for load in busy[:-1]] == [True] * (len(busy) - 1)
    if busy and g.uniform:
        assert max(busy) <= -(-sum(busy) // g.ctas) + g.split

    # Nothing is written twice, and the sums name exactly the written slices.
    written = {}
    for item in items:
        for j in range(item.slices):
            assert 0 <= item.target + j < num_slices + g.partial_slices
            assert written.setdefault(item.target + j, item) is item
    partial = [item.partial for item in items if item.partial is not None]
    assert len(partial) == len(set(partial))
    assert all(0 <= index < g.partial_items for index in partial)
    summed = []
    for index, (first, stride, count, first_item, row) in enumerate(plan.sums):
        parts = [first + part * stride for part in range(count)]
        summed += parts
        head, offset = divmod(index, g.num_slices)
        for part in parts:
            item = written[part]
            assert item.head == head
            assert plan.tiles[item.tile, Tile.SLICE] + part - item.target == offset
            assert row == (part - item.target) * SLICE
        if count > 1:
            wanted_items = list(range(first_item, first_item + count))
            assert [written[part].partial for part in parts] == wanted_items
        lows = [written[part].low for part in parts]
        assert lows == sorted(lows)
        if g.uniform:
            assert all(low % g.split == 0 for low in lows[1:])
    assert sorted(summed) == sorted(written)

    # Every row of q enters a slice and returns.
    rows = sum(rows for rows, _ in seqs)
    np.testing.assert_array_equal(plan.unpack[rows:], num_slices * SLICE)
    packed = plan.pack[plan.unpack[:rows]]
    np.testing.assert_array_equal(packed, np.arange(rows * g.heads).reshape(rows, g.heads))
    head = plan.unpack[:rows] // (g.num_slices * SLICE)
    np.testing.assert_array_equal(head, np.broadcast_to(np.arange(g.heads) // G, head.shape))


FORMS = {
    "plain": {},
    "window": {"window": 100, "query_rows": 128},
    "7 query heads to one": {"heads": 7, "kv_heads": 1, "ctas": 132},
    "wide window": {"heads": 4, "kv_heads": 4, "ctas": 3, "window": 1000},
}


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.quick_cases(3)
def test_every_visible_pair_is_computed_once_in_order(form, uniform):
    for seqs in CASES.values():
        check(geometry(uniform=uniform, **FORMS[form]), seqs)


@pytest.mark.parametrize("uniform", [False, True])
def test_random_batches_are_computed_once_in_order(uniform):
    rng = np.random.default_rng(0)
    for _ in range(8):
        rows = rng.choice([0, 1, 1, 1, 4, 30, 70], 8)
        seqs = tuple((int(r), int(r + rng.integers(r == 1, 900))) for r in rows)
        check(geometry(tokens=600, uniform=uniform), seqs)


def test_decode_step_has_one_tile_and_slice_per_sequence_and_head():
    g = Geometry(
        tokens=64,
        seqs=64,
        heads=32,
        kv_heads=8,
        max_context=8192,
        max_q_len=1,
        query_rows=64,
        ctas=132,
    )
    assert (g.num_tiles, g.tile_slices, g.num_slices) == (64, 1, 64)


FAULTS = {
    "forgets the last tile": (
        "jnp.minimum(jnp.arange(g.ctas + 1) * line.per_cta, line.total)",
        "jnp.minimum(jnp.arange(g.ctas + 1) * line.per_cta, line.total - 1)",
    ),
    "ignores the offset of a tile": (
        "kv_lens[seq] - q_lens[seq] + offset",
        "kv_lens[seq] - q_lens[seq]",
    ),
    "sums one part too few": ("last_cta - first_cta + 1", "last_cta - first_cta"),
    "sums from the wrong slot": ("first_cta * 2 + 1", "first_cta * 2"),
    "loses a head": ("+ query_head % g.group", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.quick_cases(2)
def test_walk_detects_a_planted_fault(fault):
    text, (old, new) = inspect.getsource(plan_file), FAULTS[fault]
    assert text.count(old) == 1
    faulty: dict = {"__name__": plan_file.__name__}
    exec(compile(text.replace(old, new), fault, "exec"), faulty)
    with pytest.raises((AssertionError, KeyError)):
        check(geometry(), CASES["mixed"], jax.jit(faulty["make_plan"], static_argnums=0))
