"""Suffix decoding compared with naive counting, isolation between sequences, and its cost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from counting import lines_executed
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge_jax.speculate import suffix
from forge_jax.speculate.drafter import Draft
from forge_jax.speculate.suffix import SuffixDrafter


class Studious(SuffixDrafter):
    """A drafter that indexes other outputs at once."""

    def propose(self, key, tokens, prompt_len, salt):
        while self.ingest(1_000_000):
            pass
        return super().propose(key, tokens, prompt_len, salt)


FEW = st.lists(st.integers(0, 2), max_size=50)
LENGTHS, PLACES = (16, 8, 4, 2, 1), 16


def naive(
    texts: list[list[int]], tail: list[int], repeats: bool, max_tokens: int, factor: float
) -> tuple[list[int], list[float], float]:
    """Return the draft by definition: most frequent continuation of the longest context.

    Args:
      texts: Oldest first; matches start after the first token.
    """
    places = []
    for length in LENGTHS:
        places = [
            (text, at)
            for text in reversed(texts)
            for at in range(len(text) - 1, length - 1, -1)
            if len(tail) >= length and text[at - length : at] == tail[-length:]
        ][:PLACES]
        if places:
            break

    def agreeing(text: list[int], at: int) -> int:
        count = 0
        while count < min(at, len(tail)) and text[at - 1 - count] == tail[-1 - count]:
            count += 1
        return count

    match = max((agreeing(*place) for place in places), default=0)
    places = [place for place in places if agreeing(*place) == match]
    ids: list[int] = []
    confidence: list[float] = []
    product, expected = 1.0, 0.0
    while len(ids) < min(max_tokens, int(factor * match)):
        ways = []
        for text, at in places:
            text = text + ids if repeats else text
            if at + len(ids) < len(text):
                ways.append((text[at + len(ids)], (text[: len(text) - len(ids) * repeats], at)))
        if not ways:
            break
        token, count = Counter(token for token, _ in ways).most_common(1)[0]
        n, m = len(ways), match + len(ids)
        product *= count**2 / (n * (n + 3 / m))
        if product < 0.05:
            break
        ids.append(token)
        confidence.append(count**2 / (n * (n + 3 / m)))
        expected += product
        places = [place for way, place in ways if way == token]
    return ids, confidence, expected


def check(draft: Draft, own: list[int], outputs: list[list[int]], k: int, factor: float) -> None:
    ids, confidence, expected = naive([own], own[-64:], True, k, factor)
    shared_ids, shared_confidence, more = naive(outputs, own[-64:], False, k, factor)
    if more > expected:
        ids, confidence = shared_ids, shared_confidence
    assert list(draft.token_ids) == ids
    assert list(draft.confidence) == pytest.approx(confidence)


@settings(deadline=None)
@given(st.lists(FEW, max_size=5), FEW, st.integers(1, 9), st.sampled_from([0.5, 1.0, 4.0]))
@example([[0, 1, 2, 0, 1] * 8] * 5, [0, 1, 2] * 20, 9, 4.0)
def test_draft_is_the_most_frequent_continuation(outputs, tokens, max_tokens, factor):
    drafter = Studious(max_tokens, max_spec_factor=factor)
    for key, output in enumerate(outputs):
        drafter.propose(key, [], 0, "")
        drafter.end(key, output, 0, "")
    for end in range(len(tokens) + 1):
        draft = drafter.propose("key", tokens[:end], len(tokens), "")
        check(draft, tokens[:end], outputs, max_tokens, factor)


def test_reference_check_detects_a_wrong_draft():
    draft = Studious(3).propose("key", [0, 1, 2, 0, 1], 0, "")
    check(draft, [0, 1, 2, 0, 1], [], 3, 4.0)
    with pytest.raises(AssertionError):
        check(Draft((2, 0, 2), draft.confidence), [0, 1, 2, 0, 1], [], 3, 4.0)


def test_confidence_grows_with_agreeing_occurrences():
    def first(*outputs: list[int]) -> float:
        return drafter_that_saw(*outputs).propose("key", [7, 1, 2], 3, "").confidence[0]

    alone = first([1, 2, 3])
    assert 0 < alone < 0.5
    assert alone < first([1, 2, 3], [1, 2, 3]) < 1
    assert first([1, 2, 3], [1, 2, 4]) < alone


def drafter_that_saw(*outputs: list[int], salt: str = "", **options) -> SuffixDrafter:
    drafter = Studious(4, **options)
    for number, output in enumerate(outputs):
        see(drafter, output, salt, f"seen {number}")
    return drafter


def see(drafter: SuffixDrafter, output: list[int], salt: str, key: str = "seen") -> None:
    drafter.propose(key, output[:1], 0, salt)
    drafter.end(key, output, 0, salt)


@settings(deadline=None)
@given(FEW, st.lists(st.integers(1, 20)))
def test_batched_and_single_tokens_give_the_same_draft(tokens, lumps):
    one_by_one, in_lumps = Studious(8), Studious(8)
    end = 0
    for lump in [*lumps, len(tokens)]:
        for at in range(end, min(end + lump, len(tokens)) + 1):
            expected = one_by_one.propose(1, tokens[:at], 4, "")
        end = min(end + lump, len(tokens))
        assert in_lumps.propose(1, tokens[:end], 4, "") == expected


def test_same_calls_give_the_same_drafts():
    assert session(random.Random(0)) == session(random.Random(0))


def session(rng: random.Random, salts: str = "ab", **options) -> list[tuple[str, Draft]]:
    """Grow, query and end sequences of two salts in a random order; return each query's result."""
    drafter = Studious(6, **options)
    drafts: list[tuple[str, Draft]] = []
    live: dict[tuple[str, int], list[int]] = {}
    for number in range(600):
        salt, key = rng.choice("ab"), rng.randrange(4)
        growth = [rng.randrange(3) + 10 * "ab".index(salt) for _ in range(rng.randrange(12))]
        ends = rng.random() < 0.05
        if salt not in salts:
            continue
        tokens = live.setdefault((salt, key), [])
        tokens += growth
        if ends:
            drafter.end(key, tokens, 5, salt)
            del live[salt, key]
        elif number % 3:
            drafts.append((salt, drafter.propose(key, tokens, 5, salt)))
    return drafts


# --- tenants ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_drafts_of_one_salt_are_independent_of_another(seed):
    together = session(random.Random(seed))
    for salt in "ab":
        alone = session(random.Random(seed), salts=salt)
        assert [draft for other, draft in together if other == salt] == [d for _, d in alone]
        assert any(draft.token_ids for _, draft in alone)


@pytest.mark.parametrize("seed", range(5))
def test_no_token_crosses_salts_under_memory_pressure(seed):
    for salt, draft in session(random.Random(seed), max_live_tokens=200, max_shared_tokens=300):
        assert all(token // 10 == "ab".index(salt) for token in draft.token_ids)


SMALL = st.lists(st.sampled_from([0, 1, 2, -1, -2, 2**61 - 1]), min_size=1, max_size=12)


@settings(deadline=None)
@given(SMALL, SMALL, st.sampled_from(["same key", "another"]), st.booleans())
def test_continuation_is_not_found_under_another_salt(context, tail, key, ended):
    secret = [1000, 1001, 1002, 1003]
    drafter = Studious(4)
    planted = [*context, *secret, *tail]
    drafter.propose("same key", planted, 0, "a")
    drafter.propose("same key", [*planted, *planted * 40], 0, "a")
    if ended:
        drafter.end("same key", [*planted, *planted * 40], 0, "a")
    for query in (context, [*tail, *context], planted[: len(context) + 1]):
        asked = drafter.propose(key, query, 0, "b")
        assert not {*asked.token_ids} & ({*secret} - {*query})
    again = drafter.propose("third", [*context, 1000], 0, "a")
    assert again.token_ids[0] == 1001  # it is found under its own salt


def test_prompt_is_no_draft_for_other_sequences():
    drafter = Studious(4)
    tokens = [1, 2, 3, 4, 5, *range(100, 140)]
    drafter.propose("key", tokens, 5, "")
    drafter.end("key", tokens, 5, "")
    assert drafter.propose("other", [1, 2, 3], 3, "") == Draft()
    assert drafter.propose("other", [1, 2, 3, 4, 5], 5, "").token_ids == (100, 101, 102, 103)


def test_running_output_is_found_by_others_of_its_salt(monkeypatch):
    monkeypatch.setattr(suffix, "_PIECE", 10)
    drafter = Studious(4)
    tokens = list(range(100))
    for end in range(1, 36):
        drafter.propose("key", tokens[:end], 5, "")
    # Output 5 to 34: three whole pieces, which are one text.
    assert drafter.propose("other", [8, 9], 2, "").token_ids == (10, 11, 12, 13)
    assert drafter.propose("other", [12, 13], 2, "").token_ids == (14, 15, 16, 17)
    assert drafter.propose("other", [33], 1, "").token_ids == (34,)
    assert drafter.propose("other", [34], 1, "") == Draft()
    drafter.end("key", tokens[:50], 5, "")
    assert drafter.propose("other", [33, 34], 2, "").token_ids == (35, 36, 37, 38)


def test_consecutive_outputs_of_a_key_are_separate_texts(monkeypatch):
    monkeypatch.setattr(suffix, "_PIECE", 2)
    drafter = Studious(4)
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        drafter.propose("key", tokens, 0, "")
    assert drafter.propose("other", [2, 3], 2, "").token_ids == (4,)
    assert drafter.propose("other", [6, 7], 2, "").token_ids == (8,)


# --- room -------------------------------------------------------------------------------------


def test_unknown_sequence_leaves_its_output():
    drafter = Studious(4)
    drafter.end("unknown", [1, 2, 3, 4, 5, 6, 7, 8], 3, "")
    assert drafter.num_live == 0
    assert drafter.propose("key", [9, 4, 5, 6], 4, "").token_ids[:2] == (7, 8)
    assert not drafter.propose("other", [9, 1, 2], 3, "").token_ids  # prompts are private


def test_ended_sequence_leaves_only_its_output():
    drafter = Studious(4)
    drafter.propose("key", [*range(50)], 40, "")
    assert (drafter.num_live, drafter.num_shared) == (50, 0)
    drafter.end("key", [*range(60)], 40, "")
    context = 16  # tokens before the output, and their separator
    assert (drafter.num_live, drafter.num_shared) == (0, 20 + context + 1)


@settings(deadline=None)
@given(st.lists(FEW, min_size=1, max_size=4), st.lists(FEW, min_size=1, max_size=4), FEW)
def test_forgotten_output_leaves_no_trace_in_drafts(old, new, query):
    drafter, fresh = drafter_that_saw(*old, *new), drafter_that_saw(*new)
    for one in (drafter, fresh):
        one.propose("key", [], 0, "")  # indexes pending text
    index = drafter._shared.get("")
    if index is None:
        return
    index.forget(sum(1 + len(output) for output in old if output))
    for end in range(len(query) + 1):
        assert drafter.propose(end, query[:end], 99, "") == fresh.propose(end, query[:end], 99, "")


def test_flooding_salt_takes_nothing_from_the_others():
    drafter = Studious(4, max_shared_tokens=5000)
    for salt in range(9):
        see(drafter, list(range(300)), f"salt {salt}")
    rng = random.Random(0)
    for _ in range(50):
        see(drafter, [rng.randrange(9) for _ in range(1000)], "greedy")
        assert drafter.num_shared <= 5000
    for salt in range(9):
        asked = drafter.propose("key", [0, 1, 2], 3, f"salt {salt}")
        assert asked.token_ids == (3, 4, 5, 6)


def test_least_recently_used_salt_is_evicted():
    drafter = Studious(4, max_salts=2)
    for salt in "ab":
        see(drafter, [1, 2, 3, 4], salt)
    drafter.propose("key", [1], 1, "a")
    see(drafter, [1, 2, 3, 4], "c")
    found = [bool(drafter.propose("key", [1, 2], 2, salt).token_ids) for salt in "abc"]
    assert found == [True, False, True]


def test_live_sequences_share_their_room_evenly():
    drafter = Studious(4, max_live_tokens=2000, max_catch_up=10_000)
    drafter.propose("short", [*range(300)], 300, "")
    for key in range(3):
        drafter.propose(key, [*range(1000)], 1000, "")
        assert drafter.num_live <= 2000
    assert drafter.propose("short", [*range(300), 0, 1], 300, "").token_ids == (2, 3, 4, 5)
    assert drafter.propose(0, [*range(1000), 0, 1], 1000, "") == Draft()
    assert drafter.propose(0, [*range(1000), 0, 1, 900], 1000, "").token_ids[0] == 901


@pytest.mark.parametrize("period", [1, 2, 7, 300])
def test_repetitive_text_has_bounded_cost_per_token(period):
    drafter = SuffixDrafter(8)
    tokens: list[int] = []
    costs = []
    for at in range(700):
        tokens.append(at % period)
        costs.append(lines_executed(lambda: drafter.propose("key", tokens, 0, "")))
    assert sum(costs[-150:]) <= 1.5 * sum(costs[350:500])
    assert sorted(costs)[-20] <= 2000  # except calls that finish a piece


def test_call_cost_is_independent_of_prompt_and_history_length():
    drafter = SuffixDrafter(4, max_catch_up=100)
    costs = [
        lines_executed(lambda n=n: drafter.propose(n, list(range(n)), n, "")) for n in (500, 50_000)
    ]
    assert costs[0] == costs[1] > 100
    drafter.end(50_000, list(range(50_000)), 42_000, "")
    later = [lines_executed(lambda: drafter.propose("a", [1, 2], 2, "")) for _ in range(20)]
    ingest = [lines_executed(lambda: drafter.ingest(100)) for _ in range(20)]
    assert max(later) < 200 and 100 < max(ingest) <= 30 * 100


def test_outputs_are_indexed_incrementally_in_turn_by_salt():
    drafter = SuffixDrafter(4)
    for salt in ("a", "b"):
        drafter.end("ended", list(range(1000)), 0, salt)

    def known() -> list[bool]:
        return [
            bool(drafter.propose("key", [n, n + 1], 2, salt).token_ids)
            for salt in ("a", "b")
            for n in (50, 350)
        ]

    assert known() == [False, False, False, False]
    assert drafter.ingest(200)
    assert known() == [True, False, False, False]
    assert drafter.ingest(200)
    assert known() == [True, False, True, False]
    assert drafter.ingest(200) and drafter.ingest(200)
    assert known() == [True] * 4
    assert drafter.ingest(1000) and not drafter.ingest(1000)
    assert not drafter.ingest(1000)


def test_output_that_ends_behind_a_long_backlog_is_dropped():
    drafter = SuffixDrafter(4)
    drafter.end("long", list(range(10_000)), 0, "")
    drafter.end("late", [7, 8, 9, 9, 9], 0, "")
    drafter.end("elsewhere", [7, 8, 6, 6, 6], 0, "a")
    while drafter.ingest(1000):
        pass
    assert drafter.num_shared < 10_100
    assert drafter.propose("key", [7, 8], 2, "").token_ids == (9, 10, 11, 12)
    assert drafter.propose("key", [7, 8], 2, "a").token_ids == (6, 6, 6)
    drafter.end("next", [7, 8, 5, 5, 5], 0, "")
    while drafter.ingest(1000):
        pass
    assert drafter.propose("key", [0, 7, 8], 3, "").token_ids[0] in (5, 9)


def test_waiting_salts_are_bounded_like_held_ones():
    drafter = SuffixDrafter(4, max_salts=3)
    for salt in "abcdefgh":
        drafter.end("key", [1, 2, 3, 4], 0, salt)
    assert [drafter.ingest(10) for _ in range(3)] == [True, True, False]


# --- odd calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [1], [1, 2]])
def test_text_without_repetition_gives_no_draft(tokens):
    assert Studious(4).propose("key", tokens, 0, "") == Draft()


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), FEW, st.integers(0, 60), st.booleans())))
def test_invalid_call_sequences_do_not_crash(calls):
    """Covers shrinking or changing lists under a key, too long prompts, and ends out of order."""
    drafter = Studious(4, max_catch_up=7)
    for key, tokens, prompt_len, ends in calls:
        if ends:
            drafter.end(key, tokens, prompt_len, "")
        else:
            size = list(tokens)
            draft = drafter.propose(key, tokens, prompt_len, "")
            assert len(draft.token_ids) == len(draft.confidence) <= 4 and tokens == size


def test_shrunken_token_list_restarts_the_index():
    drafter = Studious(2)
    drafter.propose("key", [1, 2, 3, 4, 5, 6], 6, "")
    assert drafter.propose("key", [5, 6, 7, 5], 4, "").token_ids == (6, 7)
    assert drafter.num_live == 4


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([-1, -2, 0, 1, 2**31, 2**61 - 1, 2**61, 2**64, -(2**70)]), max_size=40)
)
def test_any_integers_are_tokens(tokens):
    drafter = drafter_that_saw(tokens[::-1], tokens) if tokens else Studious(4)
    for end in range(len(tokens) + 1):
        draft = drafter.propose("key", tokens[:end], 0, "")
        assert set(draft.token_ids) <= set(tokens)


def test_tokens_may_be_any_sequence():
    assert Studious(2).propose("key", (1, 2, 3, 1, 2), 0, "").token_ids == (3, 1)
