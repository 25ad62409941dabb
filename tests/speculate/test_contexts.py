"""The index of contexts compared with a linear search, and the pool that divides the room."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_jax.speculate.ngram_index import IndexPool, NgramIndex, agreement

FEW = st.integers(0, 2)
TEXTS = st.lists(
    st.tuples(st.lists(FEW, max_size=6), st.lists(FEW, max_size=40)), min_size=1, max_size=4
)
LENGTHS = st.sampled_from([(1, 2, 4, 8), (1, 2, 3), (2, 3, 5), (3,)])


def naive(
    texts: list[tuple[list[int], list[int]]], forgotten: int, tail: list[int], lengths: tuple
) -> list[list[int]]:
    """Return the continuations of the longest matching context of `tail`, latest first."""
    for length in sorted(lengths, reverse=True):
        found: list[list[int]] = []
        position = 0
        for before, tokens in texts:
            position += 1 + len(before)
            whole = before + tokens
            for at in range(len(before), len(whole)):
                live = position + at - len(before) >= forgotten
                context = whole[max(at - length, 0) : at]
                if live and len(tail) >= length and context == tail[-length:]:
                    found.insert(0, whole[at:])
            position += len(tokens)
        if found:
            return found
    return []


def following(index: NgramIndex, tail: list[int]) -> list[list[int]]:
    places, _ = index.find(tail, 1000)
    ends = [(*index.text[place:], None).index(None) for place in places]
    return [index.text[place : place + end] for place, end in zip(places, ends, strict=True)]


def index_of(texts, lengths, chunk: int = 1000) -> NgramIndex:
    index = NgramIndex(lengths, max(lengths))
    for before, tokens in texts:
        index.begin(before)
        for at in range(0, len(tokens), chunk):
            index.append(tokens[at : at + chunk])
            index.enter(chunk)
    return index


@settings(deadline=None)
@given(TEXTS, LENGTHS, st.integers(1, 50), st.integers(0, 120), st.lists(FEW, max_size=10))
def test_index_matches_linear_search(texts, lengths, chunk, forgotten, tail):
    index = index_of(texts, lengths, chunk)
    index.forget(forgotten)
    for query in [tail, *(tokens[-n:] for _, tokens in texts for n in (1, 3, 9) if tokens)]:
        assert following(index, query) == naive(texts, forgotten, query, lengths)


@settings(deadline=None)
@given(TEXTS, TEXTS, LENGTHS)
def test_forgetting_equals_never_having_indexed(old, new, lengths):
    index = index_of(old + new, lengths)
    index.forget(sum(1 + len(before) + len(tokens) for before, tokens in old))
    fresh = index_of(new, lengths)
    for _, tokens in old + new:
        for end in range(len(tokens) + 1):
            assert following(index, tokens[:end]) == following(fresh, tokens[:end])


@settings(deadline=None)
@given(TEXTS, LENGTHS)
def test_forgetting_everything_leaves_nothing(texts, lengths):
    index = index_of(texts, lengths)
    assert index.num_entries > 0 or all(len(b) + len(t) <= min(lengths) or not t for b, t in texts)
    index.forget(10_000)
    assert len(index) == 0 and index.num_entries == 0


def test_forgotten_text_is_freed():
    index = NgramIndex((1, 2, 4), 8)
    for at in range(0, 100_000, 500):
        index.extend([token % 700 for token in range(at, at + 500)])
        index.forget(max(len(index) - 1000, 0))
        assert len(index.text) < 1000 + 8 + 1024 + 1000 // 8 + 500
    assert len(index) == 1000 and index.num_entries <= 3 * 1000


def test_pending_text_is_indexed_in_order_when_entered():
    index = NgramIndex((1,), 1)
    index.begin([7])
    index.append([1, 2, 7, 3])
    assert index.find([7], 9) == ([], 0)
    index.enter(2)
    assert following(index, [7]) == [[1, 2, 7, 3]]
    index.enter(100)
    assert following(index, [7]) == [[3], [1, 2, 7, 3]]


def test_pending_text_that_is_forgotten_is_never_indexed():
    index = NgramIndex((1,), 1)
    index.begin([7])
    index.append([1, 7, 2])
    index.forget(4)
    index.enter(100)
    assert following(index, [7]) == [[2]] and index.num_entries == 1


@settings(deadline=None)
@given(st.lists(FEW, max_size=30), st.lists(FEW, max_size=30), st.data())
def test_agreement_counts_equal_tokens_backward(text, tail, data):
    at = data.draw(st.integers(0, len(text)))
    least = data.draw(st.integers(0, len(tail)))
    count = 0
    while count < min(at, len(tail)) and text[at - 1 - count] == tail[-1 - count]:
        count += 1
    assert agreement(text, at, tail, least) == (count if count >= least else 0)


# --- the pool ----------------------------------------------------------------------------------


def pool(max_tokens: int, max_names: int = 100) -> IndexPool:
    return IndexPool((1, 2, 4), 8, max_tokens, max_names)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 400), st.booleans()), max_size=30))
def test_pool_never_exceeds_its_capacity(calls):
    indexes = pool(500, max_names=4)
    rng = random.Random(0)
    for name, count, drop in calls:
        indexes.add(name, name, (), [rng.randrange(5) for _ in range(count)], goes_on=True)
        if drop:
            indexes.drop(name)
        held = [len(index) for index in indexes._indexes.values()]
        assert indexes.num_tokens == sum(held) <= 500 and len(indexes) <= 4


def test_index_below_an_equal_share_loses_nothing():
    indexes = pool(10_000)
    for name in range(9):
        indexes.add(name, name, (), [name] * 900, goes_on=True)
    for _ in range(200):
        indexes.add("greedy", "greedy", (), [99] * 1000, goes_on=True)
    kept = [indexes.get(name) for name in range(9)]
    assert all(index is not None and len(index) == 901 for index in kept)
    assert indexes.num_tokens > 10_000 - 128


def test_oldest_tokens_are_forgotten_first():
    indexes = pool(300)
    for start in range(0, 1000, 100):
        indexes.add("salt", start, (), list(range(start, start + 100)), goes_on=False)
    index = indexes.get("salt")
    assert index is not None
    index.enter(10_000)
    found = [token for token in range(1000) if index.find([token], 1)[0]]
    assert found and min(found) >= 700 and {*range(800, 899)} < {*found}


def test_dropped_index_is_freed_incrementally():
    indexes = pool(100_000)
    text = list(range(20_000))
    for _ in range(40):
        indexes.follow("long", text, 500)
    indexes.follow("short", [1, 2, 3], 500)
    indexes.drop("short")
    assert indexes.num_dropped == 0
    indexes.drop("long")
    left = [indexes.num_dropped]
    while left[-1]:
        assert indexes.get("long") is None
        left.append(indexes.num_dropped)
    assert 15_000 < left[0] < 20_000
    assert all(0 < a - b <= 1024 for a, b in pairwise(left))


@pytest.mark.parametrize("repeats", [1, 2, 20])
def test_token_takes_at_most_the_documented_bytes(repeats):
    rng = random.Random(0)
    tokens = [rng.randrange(5000) for _ in range(6_000 // repeats)] * repeats
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = NgramIndex((1, 2, 4, 8, 16), 64)
    for at in range(0, len(tokens), 500):
        index.extend(tokens[at : at + 500])
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 30 < taken / len(tokens) < 300
