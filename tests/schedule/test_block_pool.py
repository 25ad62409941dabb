import pytest

from forge_jax.schedule.block_pool import BlockPool


def chain(pool: BlockPool, count: int, salt: str = "", first: int = 0) -> list[bytes]:
    hashes: list[bytes] = []
    for index in range(count):
        tokens = [first + index] * pool.block_size
        hashes.append(pool.hash_block(hashes[-1] if hashes else None, tokens, salt))
    return hashes


def cached_chain(pool: BlockPool, count: int, first: int = 0) -> tuple[list[int], list[bytes]]:
    """Return the blocks of a prompt of `count` blocks that was served and released."""
    blocks, hashes = pool.allocate(count), chain(pool, count, first=first)
    assert blocks is not None
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.register(block, block_hash)
    pool.release(blocks)
    return blocks, hashes


def test_every_block_can_be_allocated_and_no_more():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(3)
    assert blocks is not None and sorted(blocks) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(blocks)
    assert pool.num_free == 3
    pool.check()


def test_allocation_that_does_not_fit_takes_nothing():
    pool = BlockPool(3, 4)
    assert pool.allocate(4) is None
    assert pool.num_free == 3


def test_cached_prefix_is_found_up_to_the_first_miss():
    pool = BlockPool(8, 4)
    blocks, hashes = cached_chain(pool, 3)
    assert pool.match(hashes) == blocks
    assert pool.match(hashes[:2]) == blocks[:2]
    assert pool.match([hashes[0], b"other", hashes[2]]) == blocks[:1]
    assert pool.match(chain(pool, 3, salt="tenant")) == []


def test_match_reads_no_hash_after_the_first_miss():
    pool = BlockPool(8, 4)
    _, hashes = cached_chain(pool, 1)

    def lazily():
        yield hashes[0]
        yield b"miss"
        raise AssertionError("one too many")

    assert len(pool.match(lazily())) == 1


def test_hashes_depend_on_everything_before_the_block():
    pool = BlockPool(8, 2)
    assert pool.hash_block(None, [1, 2], "") != pool.hash_block(None, [1, 2], "a")
    assert pool.hash_block(None, [1, 2], "") != pool.hash_block(None, [2, 1], "")
    parents = [pool.hash_block(None, [1, 2], salt) for salt in ("", "a")]
    assert len({pool.hash_block(parent, [3, 4], "") for parent in [None, *parents]}) == 3
    assert pool.hash_block(None, [2**31 - 1, 0], "") == pool.hash_block(None, (2**31 - 1, 0), "")


def test_cached_blocks_count_as_free_until_acquired():
    pool = BlockPool(4, 4)
    blocks, _ = cached_chain(pool, 3)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (4, 3, 0)
    assert pool.num_unreferenced(blocks) == 3
    pool.acquire_cached(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_used) == (1, 0, 3)
    assert pool.num_unreferenced(blocks) == 0


def test_shared_block_is_freed_by_its_last_owner():
    pool = BlockPool(4, 4)
    blocks, _ = cached_chain(pool, 2)
    pool.acquire_cached(blocks)
    pool.acquire_cached(blocks)
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks)
    assert pool.num_free == 4
    pool.check()


def test_shared_and_registered_blocks_are_not_writable():
    pool = BlockPool(4, 4)
    (block,) = pool.allocate(1) or ()
    assert pool.is_writable(block)
    pool.register(block, b"hash")
    assert not pool.is_writable(block)
    pool.release([block])
    assert not pool.is_writable(block)


def test_free_blocks_are_used_before_cached_ones():
    pool = BlockPool(4, 4)
    _, hashes = cached_chain(pool, 2)
    assert pool.allocate(2) is not None
    assert len(pool.match(hashes)) == 2
    assert pool.num_evictions == 0


def test_tail_of_a_chain_is_evicted_before_its_head():
    pool = BlockPool(3, 4)
    _, hashes = cached_chain(pool, 3)
    for left in (2, 1, 0):
        pool.allocate(1)
        assert len(pool.match(hashes)) == left


def test_lru_evicts_the_least_recently_used_block():
    pool = BlockPool(2, 4, eviction="lru")
    (first,), first_hash = cached_chain(pool, 1, first=0)
    _, second_hash = cached_chain(pool, 1, first=1)
    pool.acquire_cached([first])
    pool.release([first])
    pool.allocate(1)
    assert pool.match(first_hash) == [first]
    assert pool.match(second_hash) == []


def test_fifo_evicts_the_first_registered_block_even_if_used_since():
    pool = BlockPool(2, 4, eviction="fifo")
    (first,), first_hash = cached_chain(pool, 1, first=0)
    (second,), second_hash = cached_chain(pool, 1, first=1)
    for _ in range(3):
        pool.acquire_cached([first])
        pool.release([first])
    pool.allocate(1)
    assert pool.match(first_hash) == []
    assert pool.match(second_hash) == [second]
    pool.check()


def test_fifo_keeps_the_age_of_a_block_in_use_at_its_turn():
    pool = BlockPool(3, 4, eviction="fifo")
    (first,), first_hash = cached_chain(pool, 1, first=0)
    cached_chain(pool, 1, first=1)
    pool.acquire_cached([first])
    taken = pool.allocate(2)  # a free one and the second, because the first is in use
    pool.release([first])
    _, third_hash = taken, chain(pool, 1, first=2)
    assert taken is not None
    pool.register(taken[0], third_hash[0])
    pool.release(taken[:1])
    pool.allocate(1)
    assert pool.match(first_hash) == []
    assert len(pool.match(third_hash)) == 1


def test_first_block_of_a_hash_stays():
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2) or ()
    pool.register(first, b"hash")
    pool.register(second, b"hash")
    assert pool.match([b"hash"]) == [first]
    pool.release([first, second])
    assert (pool.num_cached, pool.num_free) == (1, 4)
    pool.check()


def test_nothing_is_cached_without_a_prefix_cache():
    pool = BlockPool(4, 4, prefix_cache=False)
    _, hashes = cached_chain(pool, 2)
    assert pool.match(hashes) == []
    assert pool.num_cached == 0


def test_reset_drops_references_and_cache_and_keeps_the_counters():
    pool = BlockPool(4, 4)
    _, hashes = cached_chain(pool, 2)
    pool.allocate(2)
    pool.record_lookup(8, 4)
    pool.reset()
    assert pool.num_free == 4
    assert pool.match(hashes) == []
    assert (pool.queried_tokens, pool.hit_tokens) == (8, 4)
    pool.check()


def test_releasing_twice_is_rejected():
    pool = BlockPool(4, 4)
    blocks = pool.allocate(1) or []
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_acquiring_an_uncached_block_is_rejected():
    with pytest.raises(AssertionError, match="not cached"):
        BlockPool(4, 4).acquire_cached([0])


@pytest.mark.parametrize(
    "breakage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(1),
        lambda pool: pool._index.clear(),
        lambda pool: pool._cached.clear(),
        lambda pool: pool._refs.__setitem__(0, 1),
        lambda pool: pool._refs.__setitem__(3, -1),
    ],
)
def test_check_detects_a_broken_pool(breakage):
    pool = BlockPool(4, 4)
    cached_chain(pool, 2)
    pool.check()
    breakage(pool)
    with pytest.raises(AssertionError):
        pool.check()
