from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forge_jax.errors import RequestError
from forge_jax.text import StopStrings


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """Return the text that a client receives, and the stop string."""
    matcher = StopStrings(stops, include)
    sent = ""
    for piece in pieces:
        text, stop = matcher.push(piece)
        sent += text
        if stop is not None:
            return sent, stop
    return sent + matcher.flush(), None


def naive(stops: list[str], text: str, include: bool) -> tuple[str, str | None]:
    """Return the definition's result: the shortest prefix that ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
    include=st.booleans(),
)
@example(stops=["aab"], pieces=["a", "a", "a", "b"], include=False)
@example(stops=["xabcz", "ab1", "bc"], pieces=["xabc"], include=False)  # falls back twice
@example(stops=["abab", "ba"], pieces=["ab", "ac", "ba"], include=False)
def test_any_split_of_the_text_matches_the_definition(stops, pieces, include):
    assert run(stops, pieces, include) == naive(stops, "".join(pieces), include)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abc", max_size=6), max_size=8),
)
def test_only_a_possible_stop_string_start_is_held_back(stops, pieces):
    matcher = StopStrings(stops)
    text = sent = ""
    for piece in pieces:
        out, stop = matcher.push(piece)
        if stop is not None:
            return
        text, sent = text + piece, sent + out
        held = text[len(sent) :]
        beginnings = {s[:n] for s in stops for n in range(len(s))}
        longest = max((b for b in beginnings if text.endswith(b)), key=len)
        assert (sent, held) == (text[: len(text) - len(longest)], longest)


def test_stop_string_across_tokens_is_removed():
    matcher = StopStrings(["</s>"])
    assert matcher.push("hi <") == ("hi ", None)
    assert matcher.push("/") == ("", None)
    assert matcher.push("s> more") == ("", "</s>")


def test_false_start_is_released():
    matcher = StopStrings(["\nUser:"])
    assert matcher.push("a\nUse") == ("a", None)
    assert matcher.push("less") == ("\nUseless", None)


def test_overlapping_starts_are_found():
    assert run(["aab"], ["aaab"]) == ("a", "aab")
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_first_completed_string_wins_even_if_another_began_before():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["</s>", "</s"], ["x</s>"]) == ("x", "</s")


def test_longer_of_two_completed_together_wins():
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")
    assert run(["abc", "bc"], ["xabc"]) == ("x", "abc")


def test_included_stop_string_ends_the_text_without_delay():
    matcher = StopStrings(["END"], include_stop_str_in_output=True)
    assert matcher.push("the EN") == ("the EN", None)
    assert matcher.push("D of") == ("D", "END")


def test_flush_returns_held_text_once():
    matcher = StopStrings(["END"])
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_text_passes_without_stop_strings():
    assert run([], ["a", "b"]) == ("ab", None)


def test_empty_stop_string_is_rejected():
    with pytest.raises(RequestError) as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


def test_push_after_a_match_raises():
    matcher = StopStrings(["a"])
    matcher.push("a")
    with pytest.raises(AssertionError):
        matcher.push("b")


def test_time_is_linear_in_the_worst_case():
    # Quadratic work would be 10^10 comparisons.
    matcher = StopStrings(["a" * 255 + "b", "a" * 100 + "c"])
    start = time.perf_counter()
    for _ in range(1000):
        matcher.push("a" * 100)
    assert time.perf_counter() - start < 5
