from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from forge_jax.errors import CheckpointError, RequestError
from forge_jax.text import Tokenizer
from forge_jax.text.tokenizer import OTHER_FORMS

VALID_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def test_package_imports_no_jax():
    code = "import sys, forge_jax.text; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_folder_without_tokenizer_json_has_no_tokenizer(tmp_path):
    assert Tokenizer.from_folder(tmp_path) is None


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', "[]", ""])
def test_broken_tokenizer_json_is_named_in_the_error(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a usable tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_broken_config_is_named_in_the_error(write_folder, content):
    folder = write_folder()
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder)


def test_folder_without_config_has_no_named_tokens(write_folder):
    tokenizer = Tokenizer.from_folder(write_folder())
    assert tokenizer is not None
    assert tokenizer.bos_token is tokenizer.bos_token_id is None
    assert tokenizer.eos_token is tokenizer.eos_token_id is None
    assert tokenizer.decode(tokenizer.encode("a cat")) == "a cat"


def test_special_tokens_come_from_the_config_and_then_from_the_map(write_folder):
    folder = write_folder({"eos_token": {"content": "<|im_end|>", "lstrip": False}})
    (folder / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": "<|endoftext|>", "eos_token": "<|im_start|>"})
    )
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|endoftext|>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)


def test_token_marked_special_in_the_config_is_special(write_folder, byte_level_backend):
    backend = byte_level_backend
    end_id = backend.get_vocab_size()
    backend.add_tokens(["<|end|>"])  # an ordinary one in tokenizer.json
    tokenizer = Tokenizer.from_folder(write_folder({"eos_token": "<|end|>"}, backend))
    assert tokenizer is not None
    assert tokenizer.eos_token_id == end_id
    assert end_id in tokenizer.special_ids
    assert tokenizer.decode(tokenizer.encode("a<|end|>")) == "a"


def test_special_tokens_without_a_name_are_special(write_folder, byte_level_backend):
    ids = [byte_level_backend.token_to_id("<think>"), byte_level_backend.get_vocab_size()]
    byte_level_backend.add_tokens(["<|call|>"])
    config = {"additional_special_tokens": ["<think>", {"content": "<|call|>"}, "[UNKNOWN]"]}
    tokenizer = Tokenizer.from_folder(write_folder(config, byte_level_backend))
    assert tokenizer is not None
    assert tokenizer.special_ids == {0, 1, 2, *ids}
    assert "[UNKNOWN]" not in tokenizer.backend.get_vocab()


def test_extra_special_tokens_have_their_own_names(write_folder):
    config = {"extra_special_tokens": {"thought": "<think>", "bos_token": "<|endoftext|>"}}
    tokenizer = Tokenizer.from_folder(write_folder(config))
    assert tokenizer is not None
    assert tokenizer.special_tokens == {"thought": "<think>", "bos_token": "<|endoftext|>"}
    assert 330 in tokenizer.special_ids


def test_added_tokens_of_the_config_are_added_with_their_flags(write_folder):
    """Transformers does the same; a token with another id than declared is left out."""
    added = {
        "2": {"content": "<|im_end|>", "lstrip": True, "rstrip": True, "special": False},
        "331": {"content": "<|tool|>", "special": True},
        "332": {"content": "<word>", "normalized": False},
        "400": {"content": "<far>"},
    }
    tokenizer = Tokenizer.from_folder(write_folder({"added_tokens_decoder": added}))
    assert tokenizer is not None
    assert tokenizer.encode("<|tool|><word>") == [331, 332]
    assert tokenizer.special_ids == {0, 1, 2, 331}
    assert tokenizer.encode("  <|im_end|>\n") == [2]
    assert tokenizer.backend.token_to_id("<far>") is None


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ([], "must be an object"),
        ({"x": {"content": "a"}}, "an invalid id: 'x'"),
        ({"9" * 40: {"content": "a"}}, "an invalid id"),
        ({"331": "a"}, "must contain tokens"),
        ({"331": {"content": ""}}, "must contain tokens"),
        ({"331": {"content": "a" * 5000}}, "must contain tokens"),
        ({"331": {"content": "a", "special": 1}}, "a flag that is neither"),
        ({"331": {"content": "a"}, "332": {"content": "a"}}, "a token twice"),
        ({str(i): {"content": "a" * i} for i in range(1, 70)}, "are prefixes of each other"),
        ({str(i): {"content": str(i)} for i in range(70_000)}, "must be an object"),
    ],
)
def test_malformed_added_tokens_of_the_config_are_named_in_the_error(write_folder, added, message):
    folder = write_folder({"added_tokens_decoder": added})
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: added_.*{message}"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_tokenizer_format_names_its_converter(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=rf"has {re.escape(name)} but no tokenizer\.json.*AutoTok"
    ):
        Tokenizer.from_folder(tmp_path)


def test_other_tokenizer_format_is_ignored_next_to_tokenizer_json(write_folder):
    folder = write_folder()
    (folder / "tokenizer.model").write_bytes(b"")
    assert Tokenizer.from_folder(folder) is not None


def test_special_token_outside_the_vocabulary_gets_no_id(write_folder, byte_level_backend):
    tokenizer = Tokenizer.from_folder(write_folder({"pad_token": "[PAD]", "eos_token": "[EOS]"}))
    assert tokenizer is not None
    assert tokenizer.eos_token_id is None
    assert tokenizer.vocab_size == byte_level_backend.get_vocab_size()


def test_vocab_size_counts_added_tokens(byte_level):
    assert byte_level.vocab_size == 331
    assert byte_level.token_text(330) == "<think>"


def test_special_ids_contain_only_special_tokens(byte_level, stories):
    assert byte_level.special_ids == {0, 1, 2}
    assert stories.special_ids == {0, 1, 2}


def test_saved_truncation_and_padding_are_disabled(write_folder, byte_level_backend):
    backend = byte_level_backend
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = Tokenizer.from_folder(write_folder(None, backend))
    assert tokenizer is not None
    text = "Once upon a time there was a little girl."
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_bos_is_added_once_if_the_post_processor_adds_it(stories):
    assert stories.encode("Once")[:2] == [1, 403]
    assert stories.encode("Once", add_special_tokens=False) == [403]


@pytest.mark.parametrize("add_bos_token", [True, False, None])
def test_bos_is_added_if_the_config_requests_it(write_folder, add_bos_token):
    config = {"bos_token": "<|endoftext|>", "add_bos_token": add_bos_token}
    tokenizer = Tokenizer.from_folder(write_folder(config))
    assert tokenizer is not None
    bare = tokenizer.encode("a cat", add_special_tokens=False)
    assert 0 not in bare
    assert tokenizer.encode("a cat") == ([0, *bare] if add_bos_token else bare)
    assert tokenizer.encode("") == ([0] if add_bos_token else [])


def test_special_tokens_in_a_template_are_recognized_and_none_is_added(stories):
    assert stories.encode_template("<s>Once</s>") == [1, 403, 2]


def test_decode_skips_or_shows_special_tokens(byte_level):
    ids = [1, *byte_level.encode("cat"), 2]
    assert byte_level.decode(ids) == "cat"
    assert byte_level.decode(ids, skip_special_tokens=False) == "<|im_start|>cat<|im_end|>"


def test_lone_surrogates_are_rejected(stories):
    with pytest.raises(RequestError, match="surrogate"):
        stories.encode("a\ud800")


@given(data=st.data())
def test_byte_level_decode_matches_the_library_for_any_ids(byte_level, data):
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 5), max_size=30))
    for skip in (True, False):
        expected = byte_level.backend.decode(ids, skip_special_tokens=skip)
        assert byte_level.decode(ids, skip) == expected


@given(data=st.data())
def test_metaspace_decode_matches_the_library_for_any_ids(metaspace, data):
    ids = data.draw(st.lists(st.integers(0, metaspace.vocab_size + 2), max_size=12))
    for skip in (True, False):
        expected = metaspace.backend.decode(ids, skip_special_tokens=skip)
        assert metaspace.decode(ids, skip) == expected


@given(data=st.data())
def test_byte_fallback_decode_matches_the_library_for_valid_bytes(stories, data):
    ids = data.draw(st.lists(st.integers(0, stories.vocab_size + 5), max_size=12))
    expected = stories.backend.decode(ids)
    if "�" not in expected:
        assert stories.decode(ids) == expected


@given(text=VALID_TEXT)
def test_byte_fallback_decode_matches_the_library_for_any_text(stories, text):
    ids = stories.encode(text)
    assert stories.decode(ids) == stories.backend.decode(ids)


def test_valid_characters_survive_next_to_an_invalid_byte(stories):
    byte_ids = [3 + byte for byte in "你".encode()]
    assert stories.decode([*byte_ids, 3 + 0xFF]) == "你�"


@pytest.mark.parametrize("name", ["byte_level", "stories", "metaspace"])
def test_tokenwise_decoder_has_a_byte_table(name, request):
    assert request.getfixturevalue(name).table is not None


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Metaspace()]),
    ],
)
def test_other_decoders_have_no_table_and_decode_like_the_library(decoder):
    backend = Backend(models.BPE(vocab={"▁a": 0, "b": 1, " ": 2, "<0x41>": 3}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    assert tokenizer.table is None
    ids = [2, 0, 1, 3, 2]
    assert tokenizer.decode(ids) == backend.decode(ids)
    assert tokenizer.token_bytes(1) == b"b"


def test_gemma_decoder_keeps_the_first_space():
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend = Backend(models.BPE(vocab={"▁a": 0, "<0x41>": 1}, merges=[]))
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend)
    assert tokenizer.table is not None
    assert tokenizer.decode([0, 1]) == backend.decode([0, 1]) == " aA"


def test_token_bytes_match_each_family(stories, byte_level, word_piece):
    assert stories.token_bytes(265) == b" the"
    assert stories.token_bytes(3 + 0xE4) == b"\xe4"
    assert stories.token_bytes(1) == b"<s>"
    (space_id,) = byte_level.encode(" ")
    assert byte_level.token_bytes(space_id) == b" "
    assert word_piece.token_bytes(3) == b"cat"


@pytest.mark.parametrize("name", ["stories", "byte_level", "metaspace", "word_piece"])
@pytest.mark.parametrize("token_id", [-1, 10_000_000])
def test_ids_outside_the_vocabulary_have_no_bytes_and_no_text(name, token_id, request):
    tokenizer = request.getfixturevalue(name)
    assert tokenizer.token_bytes(token_id) == b""
    assert tokenizer.token_text(token_id) == ""


@given(text=VALID_TEXT)
def test_bytes_of_a_texts_tokens_are_the_text(byte_level, text):
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()


def test_token_text_shows_a_partial_character_as_replacement(stories):
    assert stories.token_text(3 + 0xE4) == "�"
    assert stories.token_text(265) == " the"
    assert stories.token_text(2) == "</s>"


def test_added_latin_1_token_decodes_as_in_the_library(byte_level_backend):
    backend = byte_level_backend
    backend.add_tokens(["é", "日é", "Ġx"])
    tokenizer = Tokenizer(backend)
    for token_id in range(331, 334):
        assert tokenizer.decode([token_id]) == backend.decode([token_id])
