from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_jax.text import Detokenizer, Tokenizer

FAMILIES = ["byte_level", "stories", "metaspace"]
TEXTS = [
    "Once upon a time there was a little girl.",
    "family 👩‍👩‍👧‍👦 and flag 🇨🇭🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "日本語のテキスト、你好。 한국어",
    "combining e\u0301 a\u0308\u0323 नमस्ते",
    "  leading and trailing  ",
    "a literal � stays",
    "",
]


def stream(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], step: int = 1, skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    pushed = [detokenizer.push(ids[n : n + step]) for n in range(0, len(ids), step)]
    return [*pushed, detokenizer.flush()]


@pytest.mark.parametrize("step", [1, 3, 100])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "stories"])
def test_streamed_tokens_give_the_whole_text(name, text, step, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, [], ids, step)
    assert "".join(pieces) == text == tokenizer.backend.decode(ids)
    assert "�" in text or not any("�" in piece for piece in pieces)


@pytest.mark.parametrize("name", [*FAMILIES, "word_piece"])
@given(data=st.data())
def test_pushes_and_flush_equal_decode_for_any_ids(name, request, data):
    tokenizer = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    step, skip = data.draw(st.integers(1, 4)), data.draw(st.booleans())
    assert "".join(stream(tokenizer, [], ids, step, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("name", ["byte_level", "stories"])
@given(data=st.data())
def test_push_never_returns_a_partial_character(name, request, data):
    tokenizer = request.getfixturevalue(name)
    text = data.draw(st.text(st.sampled_from("aé日👩\u200d한\u0301 "), max_size=20))
    assert not any("�" in piece for piece in stream(tokenizer, [], tokenizer.encode(text)))


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
def test_output_after_a_prompt_is_the_rest_of_the_whole_text(name, request, data):
    tokenizer = request.getfixturevalue(name)
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12)
    prompt, output = data.draw(ids), data.draw(ids)
    before = Detokenizer(tokenizer)
    sent = before.push(prompt)  # without the unfinished character, which the output completes
    assert (
        "".join(stream(tokenizer, prompt, output)) == tokenizer.decode(prompt + output)[len(sent) :]
    )


def test_only_the_end_of_a_long_prompt_matters(stories):
    middle = stories.encode("the cat sat on the mat", add_special_tokens=False) * 50
    broken_off = [3 + byte for byte in "你".encode()[:2]]
    output = [3 + "你".encode()[2], 265]
    for begin in ([1], [1, 261], [1, 3 + 0x20, 265], []):
        assert "".join(stream(stories, [*begin, *middle, *broken_off], output)) == "你 the"
        assert "".join(stream(stories, [*begin, *middle], output[1:])) == " the"


def test_first_word_keeps_its_space_only_after_a_prompt(stories, metaspace):
    (the,) = metaspace.encode("the")
    for tokenizer, prompt, the_id in ((stories, [1, 403], 265), (metaspace, [the], the)):
        assert "".join(stream(tokenizer, prompt, [the_id])) == " the"
        assert "".join(stream(tokenizer, [], [the_id])) == "the"


def test_special_tokens_in_the_prompt_do_not_start_a_text(stories):
    assert "".join(stream(stories, [1], [265])) == "the"
    assert "".join(stream(stories, [1], [265], skip=False)) == " the"


def test_unfinished_character_is_held_back_and_flushed_as_replacement(stories, byte_level):
    for tokenizer, ids in (
        (stories, [3 + byte for byte in "👩".encode()]),
        (byte_level, byte_level.encode("👩")),
    ):
        detokenizer = Detokenizer(tokenizer, tokenizer.encode("a"))
        assert detokenizer.push(ids[:-1]) == ""
        assert detokenizer.flush() == "�"
        assert detokenizer.flush() == ""


def test_invalid_bytes_do_not_delay_later_text(stories):
    detokenizer = Detokenizer(stories, stories.encode("a"))
    assert detokenizer.push([3 + 0xFF]) == "�"
    assert detokenizer.push([3 + 0xE4]) == ""
    assert detokenizer.push([265]) == "� the"


def test_special_tokens_appear_only_on_request(byte_level):
    ids = [*byte_level.encode("cat"), 2]
    assert "".join(stream(byte_level, [], ids)) == "cat"
    assert "".join(stream(byte_level, [], ids, skip=False)) == "cat<|im_end|>"


def test_ids_outside_the_vocabulary_are_skipped(stories):
    assert "".join(stream(stories, stories.encode("a"), [265, 100_000, -1, 265])) == " the the"


def test_other_decoders_stream_word_by_word_after_a_prompt(word_piece):
    prompt, output = [2, 3], [4, 5, 7, 6, 1]
    pieces = stream(word_piece, prompt, output)
    assert pieces == ["s", " sat", " 日", ".", "", ""]
    assert "".join(pieces) == word_piece.decode(prompt + output)[len("the cat") :]
