from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from forge_jax.text import Tokenizer

STORIES_FOLDER = Path(__file__).parent.parent / "fixtures" / "text" / "stories260k"

CORPUS = [
    "Once upon a time there was a little girl. She didn't like 12 cats, but she loved dogs!",
    "user assistant system: What is it? It is <|a tag|> in the text.",
    "naïve café — 日本語のテキスト、你好 👩‍👩‍👧‍👦 é",
]
CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="session")
def stories() -> Tokenizer:
    """Return a SentencePiece-like tokenizer with byte fallback, BOS and a stripped first space."""
    tokenizer = Tokenizer.from_folder(STORIES_FOLDER)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture
def byte_level_backend() -> Backend:
    """Return a new byte-level tokenizer for each test that changes it."""
    return _byte_level_backend()


def _byte_level_backend() -> Backend:
    """Return a byte-level BPE with ChatML's special tokens and `<think>` as an ordinary one."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=CHATML_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>"])
    return backend


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer(
        _byte_level_backend(), {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    )


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """Return a Unigram model with `</s>` as a piece of its vocabulary, without byte fallback."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁▁▁", -4.0), ("▁the", -3.0)]
    pieces += [(char, -5.0) for char in "abcdehst<>/ .é日"]
    backend = Backend(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<unk>", "</s>"])
    return Tokenizer(backend, {"eos_token": "</s>", "unk_token": "<unk>"})


@pytest.fixture(scope="session")
def word_piece() -> Tokenizer:
    """Return a tokenizer whose decoder works across tokens: it puts spaces between words."""
    words = ["[UNK]", "[SEP]", "the", "cat", "##s", "sat", ".", "日", "##é"]
    backend = Backend(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    return Tokenizer(backend, {"eos_token": "[SEP]"})


@pytest.fixture
def write_folder(tmp_path: Path):
    """Return a function that writes a model folder with the byte-level tokenizer and a config."""

    def write(config: dict | None = None, backend: Backend | None = None) -> Path:
        (backend or _byte_level_backend()).save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        return tmp_path

    return write
