"""The tokenizer and the chat templates of a GGUF file, converted to a `tokenizer.json`.

Three kinds of vocabularies are supported. SentencePiece's (`tokenizer.ggml.model` is "llama")
derives merges from the scores of its pieces. Gemma 4's ("gemma4") has such pieces and lists merges.
Byte-level BPE ("gpt2") lists merges, and names its pattern (`tokenizer.ggml.pre`). The reference is
llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from forge_jax.checkpoint.gguf.metadata import Metadata
from forge_jax.checkpoint.gguf.split import read_gguf
from forge_jax.errors import CheckpointError
from forge_jax.host.files import short_repr
from forge_jax.text.patterns import (
    DEEPSEEK_CODER,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT4,
    GPT4O,
    KIMI,
    QWEN,
    QWEN_MARKS,
    SEED,
    TEKKEN,
)
from forge_jax.text.tokenizer_file import MAX_PIECE_CHARS, checked_backend

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
MAX_CHARS = 2**24  # limit of a vocabulary whose merges must be derived
MARK = "▁"  # SentencePiece's space
_NO_TOKENIZER = ("none", "no_vocab")
_KINDS = ("llama", "gemma4", "gpt2")
# SentencePiece's ids, used if the file has none.
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}
_GEMMA = ("gemma2", "gemma3")
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other tokens drop the space after them


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {
        **{"type": "ByteLevel", "add_prefix_space": False},
        **{"trim_offsets": True, "use_regex": use_regex},
    }


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


_DIGIT = {"type": "Digits", "individual_digits": True}


def _split(*patterns: str, digits: bool = False) -> dict[str, Any]:
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    splits = [{**split, "pattern": {"Regex": pattern}} for pattern in patterns]
    return _sequence(*splits, *[_DIGIT] * digits, _byte_level(use_regex=False))


_DIGITS = _sequence(_DIGIT, _byte_level(use_regex=True))
# By `tokenizer.ggml.pre`: the split of a text before its merges.
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _split(GPT4)),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _split(GPT4)),
    "deepseek-llm": _split(*DEEPSEEK_V2, digits=True),
    "deepseek-coder": _split(*DEEPSEEK_CODER, digits=True),
    "deepseek-v3": _split(*DEEPSEEK_V3),
    "kimi-k2": _split(KIMI),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _split(QWEN)),
    "qwen35": _split(QWEN_MARKS),
    "seed-coder": _split(SEED),
    **dict.fromkeys(("gpt-4o", "llama4"), _split(GPT4O)),
    "tekken": _split(TEKKEN),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4"), _byte_level(use_regex=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
}
# A split part that is a token is not merged, and BOS comes first by default.
_WHOLE_TOKENS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
_NORMALIZED = ("qwen2", "qwen35", "stablelm2", "command-r")  # texts are normalized to NFC


def load_gguf_tokenizer(
    file: Path, vocab_size: int | None = None
) -> tuple[Backend, dict[str, str]] | None:
    """Return a file's tokenizer and special tokens: `{"bos_token": "<s>", ...}`.

    The result is None if the file has no tokenizer.

    Raises:
      CheckpointError: the vocabulary is invalid. The message names the file and the key.
      UnsupportedModelError: the kind of tokenizer is not supported.
    """
    metadata = read_gguf(file).view
    if metadata.values.get("tokenizer.ggml.model", "none") in _NO_TOKENIZER:
        return None
    vocabulary = _Vocabulary(metadata)
    return checked_backend(vocabulary.tokenizer_json(), file, vocab_size), vocabulary.named_tokens()


def gguf_templates(file: Path) -> dict[str, str]:
    """Return the chat templates of a file by name; "default" is the unnamed one."""
    metadata = read_gguf(file).view
    prefix = "tokenizer.chat_template"
    return {
        key.removeprefix(prefix).removeprefix(".") or "default": metadata.string(key)
        for key in metadata.values
        if key == prefix or key.startswith(f"{prefix}.")
    }


class _Vocabulary:
    def __init__(self, metadata: Metadata):
        self.metadata = metadata
        self.arch = metadata.string("general.architecture")
        self.kind = metadata.string("tokenizer.ggml.model")
        if self.kind not in _KINDS:
            raise metadata.unsupported(
                f"tokenizer.ggml.model {short_repr(self.kind)} is not supported; supported: "
                f"{', '.join(_KINDS)}"
            )
        self.tokens = metadata.strings("tokenizer.ggml.tokens")
        self.types = [NORMAL] * len(self.tokens)
        if metadata.has("tokenizer.ggml.token_type"):
            types = metadata.numbers("tokenizer.ggml.token_type", len(self.tokens))
            self.types = types.tolist()

    # ---- special tokens --------------------------------------------------------------------------

    def named_tokens(self) -> dict[str, str]:
        named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        ids = {name: self.special_id(key) for name, key in named.items()}
        return {f"{name}_token": self.tokens[i] for name, i in ids.items() if i is not None}

    def special_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        found = self.metadata.token_id(key, len(self.tokens))
        if found is None and self.kind == "llama" and not self.metadata.has(key):
            default = _DEFAULT_IDS.get(name, len(self.tokens))
            return default if default < len(self.tokens) else None
        return found

    def post_processor(self, *, adds_bos: bool) -> dict[str, Any] | None:
        """Return a post-processor that adds BOS and EOS around a text as the file requires."""
        names = {
            "bos": self.metadata.boolean("tokenizer.ggml.add_bos_token", adds_bos),
            "eos": self.metadata.boolean("tokenizer.ggml.add_eos_token", False),
        }
        special = {}
        for name, wanted in names.items():
            found = self.special_id(name)
            if not wanted:
                continue
            if found is None:
                key = f"tokenizer.ggml.{name}_token_id"
                raise self.metadata.error(key, f"the id of the token that add_{name}_token adds")
            special[name] = (self.tokens[found], found)
        if not special:
            return None

        def around(sequence: str) -> list[dict[str, Any]]:
            parts: dict[str, dict[str, Any]] = {
                name: {"SpecialToken": {"id": token, "type_id": 0}}
                for name, (token, _) in special.items()
            }
            text = {"Sequence": {"id": sequence, "type_id": 0}}
            return [part for part in (parts.get("bos"), text, parts.get("eos")) if part]

        return {
            "type": "TemplateProcessing",
            "single": around("A"),
            "pair": around("A") + around("B"),
            "special_tokens": {
                token: {"id": token, "ids": [i], "tokens": [token]} for token, i in special.values()
            },
        }

    def added_tokens(self, end: int) -> list[dict[str, Any]]:
        """Return the tokens below `end` that are matched in a text before it is split."""
        # A space after Phi-3's own tokens is not part of the text.
        strips = self.arch == "phi3" and self.kind == "llama"
        found = []
        for i, kind in enumerate(self.types[:end]):
            token = self.tokens[i]
            if kind not in (CONTROL, USER_DEFINED, UNKNOWN) or self.is_space_run(i):
                continue
            found.append(
                {
                    **{"id": i, "content": token, "single_word": False, "lstrip": False},
                    "rstrip": strips and token not in _KEEP_SPACE,
                    **{"normalized": False, "special": kind != USER_DEFINED},
                }
            )
        return found

    # ---- the whole -------------------------------------------------------------------------------

    def tokenizer_json(self) -> dict[str, Any]:
        whole = self.byte_level() if self.kind == "gpt2" else self.sentencepiece()
        return {"version": "1.0", "truncation": None, "padding": None, **whole}

    def ids(self, merges: Iterable[list[str]]) -> tuple[dict[str, int], int]:
        """Return the vocabulary, and the number of tokens without unused ones at the end.

        Unused tokens at the end pad the model's width. Special tokens at the end are only added
        tokens, so that no text can become one without being recognized.
        """
        end = len(self.tokens)
        while end and self.types[end - 1] == UNUSED:
            end -= 1
        made = {left + right for left, right in merges}
        size = end
        while size and self.types[size - 1] in (CONTROL, USER_DEFINED):
            if self.tokens[size - 1] in made:
                break
            size -= 1
        ids: dict[str, int] = {}
        for i, token in enumerate(self.tokens[:end]):
            if ids.setdefault(token, i) != i:
                raise CheckpointError(
                    f"{self.metadata.file}: tokenizer.ggml.tokens has a token twice: "
                    f"{short_repr(token)}"
                )
        return {token: i for token, i in ids.items() if i < size}, end

    # ---- byte-level BPE --------------------------------------------------------------------------

    def byte_level(self) -> dict[str, Any]:
        pre = self.metadata.string("tokenizer.ggml.pre")
        if pre not in PRE_TOKENIZERS:
            raise self.metadata.unsupported(
                f"tokenizer.ggml.pre {short_repr(pre)} is not supported; "
                f"supported: {', '.join(PRE_TOKENIZERS)}"
            )
        merges = self.listed_merges()
        vocab, end = self.ids(merges)
        whole = pre in _WHOLE_TOKENS
        return {
            "added_tokens": self.added_tokens(end),
            "normalizer": {"type": "NFC"} if pre in _NORMALIZED else None,
            "pre_tokenizer": PRE_TOKENIZERS[pre],
            "post_processor": self.post_processor(adds_bos=whole),
            "decoder": _byte_level(use_regex=True),
            "model": {"type": "BPE", "ignore_merges": whole, "vocab": vocab, "merges": merges},
        }

    def listed_merges(self) -> list[list[str]]:
        return [self.merge(merge) for merge in self.metadata.strings("tokenizer.ggml.merges")]

    def merge(self, text: str) -> list[str]:
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise CheckpointError(
                f"{self.metadata.file}: tokenizer.ggml.merges must contain two tokens with a space "
                f"between, not {short_repr(text)}"
            )
        return [left, right]

    # ---- SentencePiece ---------------------------------------------------------------------------

    def sentencepiece(self) -> dict[str, Any]:
        if self.metadata.boolean("tokenizer.ggml.remove_extra_whitespaces", False):
            raise self.metadata.unsupported(
                "tokenizer.ggml.remove_extra_whitespaces is not supported"
            )
        lists_merges = self.kind == "gemma4"
        prefixed = self.metadata.boolean("tokenizer.ggml.add_space_prefix", not lists_merges)
        self.tokens = [
            MARK * len(token) if self.is_space_run(i) else token
            for i, token in enumerate(self.tokens)
        ]
        merges = self.listed_merges() if lists_merges else self.merges_by_score()
        vocab, end = self.ids(merges)
        unknown = self.special_id("unknown")
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": MARK}
        back = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        prepend = {"type": "Prepend", "prepend": MARK}
        normalizers = [prepend, replace] if prefixed else [replace]
        decoders = [
            back,
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *([strip] if prefixed else []),
        ]
        return {
            "added_tokens": self.added_tokens(end),
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": None,
            "post_processor": self.post_processor(adds_bos=True),
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {
                "type": "BPE",
                "unk_token": None if unknown is None else self.tokens[unknown],
                "fuse_unk": True,
                "byte_fallback": BYTE in self.types,
                "vocab": vocab,
                "merges": merges,
            },
        }

    def is_space_run(self, token_id: int) -> bool:
        """Return True for Gemma's runs of spaces.

        They are ordinary pieces, although the converter writes them as user-defined spaces.
        """
        token = self.tokens[token_id]
        return (
            self.arch in _GEMMA
            and self.types[token_id] == USER_DEFINED
            and set(token) <= {" ", MARK}
            and token != ""
        )

    def merges_by_score(self) -> list[list[str]]:
        """Return all ways to combine two pieces into a third, those with the best score first.

        Gemma's scores are ignored, because its converter does not always find them. Pieces are then
        ordered by id, the order in which SentencePiece learned them.
        """
        count = len(self.tokens)
        scores = np.zeros(count)
        if self.arch not in _GEMMA:
            scores = self.metadata.numbers("tokenizer.ggml.scores", count)
        ids = {
            token: i
            for i, token in enumerate(self.tokens)
            if self.types[i] == NORMAL or self.is_space_run(i)
        }
        chars = sum(map(len, ids))
        if chars > MAX_CHARS or max(map(len, ids), default=0) > MAX_PIECE_CHARS:
            raise CheckpointError(
                f"{self.metadata.file}: tokenizer.ggml.tokens has {chars} characters, or a token "
                f"of more than {MAX_PIECE_CHARS}; at most {MAX_CHARS} are read"
            )
        merges = []
        for token, i in ids.items():
            for at in range(1, len(token)):
                left = ids.get(token[:at])
                if left is not None and (right := ids.get(token[at:])) is not None:
                    merges.append((-scores[i], i, left, right))
        merges.sort()
        return [[self.tokens[left], self.tokens[right]] for *_, left, right in merges]
