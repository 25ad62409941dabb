"""Prompt lookup compared with a linear search, and its cost."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from counting import lines_executed
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_jax.speculate.drafter import Draft
from forge_jax.speculate.ngram import NgramDrafter

FEW = st.lists(st.integers(0, 2), max_size=60)


def naive(tokens: list[int], max_tokens: int, min_match: int, max_match: int) -> list[int]:
    """Return the tokens after the latest longest n-gram, repeated at the end of the text."""
    for length in range(max_match, min_match - 1, -1):
        for at in range(len(tokens) - 1, length - 1, -1):
            if length <= len(tokens) and tokens[at - length : at] == tokens[-length:]:
                text = list(tokens)
                for ahead in range(max_tokens):
                    text.append(text[at + ahead])
                return text[len(tokens) :]
    return []


@settings(deadline=None)
@given(FEW, st.integers(1, 9), st.integers(1, 4), st.integers(0, 4))
def test_draft_follows_the_latest_longest_match(tokens, max_tokens, least, more):
    drafter = NgramDrafter(max_tokens, min_match=least, max_match=least + more)
    for end in range(len(tokens) + 1):
        draft = drafter.propose("key", tokens[:end], 0, "")
        assert list(draft.token_ids) == naive(tokens[:end], max_tokens, least, least + more)


@settings(deadline=None)
@given(FEW, st.lists(st.integers(1, 20)))
def test_batched_and_single_tokens_give_the_same_draft(tokens, lumps):
    one_by_one, in_lumps = NgramDrafter(8), NgramDrafter(8)
    end = 0
    for lump in [*lumps, len(tokens)]:
        for at in range(end, min(end + lump, len(tokens)) + 1):
            expected = one_by_one.propose(1, tokens[:at], 0, "")
        end = min(end + lump, len(tokens))
        assert in_lumps.propose(1, tokens[:end], 0, "") == expected


def test_repeating_text_keeps_repeating():
    draft = NgramDrafter(7).propose("key", [9, 1, 2, 3, 1, 2, 3], 3, "")
    assert draft.token_ids == (1, 2, 3, 1, 2, 3, 1)


def test_longer_match_has_more_confidence_and_later_tokens_no_more():
    rng = random.Random(0)
    text = [rng.randrange(1000) for _ in range(80)]
    drafts = [
        NgramDrafter(6).propose("key", [*text, 5000, *text[20 - match : 20]], 0, "")
        for match in range(1, 20)
    ]
    assert all(draft.token_ids == tuple(text[20:26]) for draft in drafts)
    for draft in drafts:
        assert all(0 < b <= a < 1 for a, b in pairwise(draft.confidence))
        assert len(draft.confidence) == len(draft.token_ids)
    assert all(a.confidence < b.confidence for a, b in pairwise(drafts))


def test_long_prompt_is_indexed_over_several_calls():
    rng = random.Random(0)
    text = [rng.randrange(50_000) for _ in range(5000)]
    early, late = [*text, *text[100:104]], [*text, *text[4000:4004]]
    drafter = NgramDrafter(4, max_catch_up=500)
    assert drafter.propose("early", early, 5000, "").token_ids == tuple(text[104:108])
    assert drafter.num_indexed == 500
    drafts = [drafter.propose("late", late, 5000, "") for _ in range(11)]
    assert drafts[:8] == [Draft()] * 8
    assert [draft.token_ids for draft in drafts[8:]] == [tuple(text[4004:4008])] * 3
    assert drafter.num_indexed == 500 + len(late)


def test_call_cost_is_independent_of_the_prompt_length():
    costs = [
        lines_executed(
            lambda length=length: NgramDrafter(4, max_catch_up=100).propose(
                1, list(range(length)), length, ""
            )
        )
        for length in (500, 50_000)
    ]
    assert costs[0] == costs[1] > 100


@pytest.mark.parametrize("period", [1, 2, 7, 300])
def test_repetitive_text_has_bounded_cost_per_token(period):
    drafter = NgramDrafter(8)
    tokens: list[int] = []
    costs = []
    for at in range(800):
        tokens.append(at % period)
        costs.append(lines_executed(lambda: drafter.propose("key", tokens, 0, "")))
    assert max(costs[-period - 1 :]) <= max(costs[period : 2 * period + 100]) <= 200


def test_memory_is_bounded_over_all_sequences():
    drafter = NgramDrafter(4, max_indexed=1000, max_sequences=5)
    for key in range(20):
        tokens: list[int] = []
        for _ in range(10):
            tokens += [key] * 50
            drafter.propose(key, tokens, 0, "")
            assert drafter.num_indexed <= 1000
    assert len(drafter._live) == 5


# --- odd calls ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [1], [1, 2]])
def test_text_without_repetition_gives_no_draft(tokens):
    assert NgramDrafter(4).propose("key", tokens, 0, "") == Draft()


def test_sequence_resumes_after_preemption_unchanged():
    tokens = [1, 2, 3, 4, 1, 2]
    drafter = NgramDrafter(2)
    first = drafter.propose("key", tokens, 3, "")
    assert first.token_ids == (3, 4)
    assert drafter.propose("key", tokens, 3, "") == first
    assert drafter.propose("key", [*tokens, 3], 3, "").token_ids == (4, 1)


@settings(deadline=None)
@given(st.lists(FEW, max_size=6))
def test_changed_token_list_restarts_the_index(lists):
    drafter = NgramDrafter(4)
    for tokens in lists:
        grown = [*tokens, 7, 8]
        # Text indexed before is distinguished from another text by its last tokens.
        drafter.propose("key", grown, 0, "")
        assert drafter.propose("key", [5, 6], 0, "") == Draft()
        assert drafter.propose("key", [5, 6, 5], 0, "").token_ids == (6, 5, 6, 5)


def test_ended_and_unknown_sequences_keep_nothing():
    drafter = NgramDrafter(4)
    drafter.end("unknown", [1, 2, 1, 2], 0, "")
    drafter.propose("key", [1, 2, 1, 2], 0, "")
    drafter.end("key", [1, 2, 1, 2], 0, "")
    assert drafter.num_indexed == 0
    assert drafter.propose("key", [1], 0, "") == Draft()


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([-1, -2, 0, 1, 2**31, 2**61 - 1, 2**61, 2**64, -(2**70)]), max_size=40)
)
def test_any_integers_are_tokens(tokens):
    drafter = NgramDrafter(4)
    for end in range(len(tokens) + 1):
        draft = drafter.propose("key", tokens[:end], 0, "")
        assert set(draft.token_ids) <= set(tokens[:end])


def test_tokens_may_be_any_sequence():
    assert NgramDrafter(2).propose("key", (1, 2, 3, 1), 0, "").token_ids == (2, 3)


def test_key_is_scoped_to_its_salt():
    drafter = NgramDrafter(4)
    drafter.propose("key", [1, 2, 3], 0, "a")
    assert drafter.propose("key", [1, 2, 3, 1], 0, "b").token_ids == (2, 3, 1, 2)
    drafter.end("key", [1, 2, 3, 1], 0, "b")
    assert drafter.num_indexed == 3
