"""The bytes of each token id, for decoders that work token by token.

Two families cover most models. In byte-level BPE (GPT-2), each character of a token encodes one
byte. In SentencePiece-like vocabularies, `▁` is a space and `<0xE4>` is a byte. In both, a
sequence's text is the concatenation of its tokens' bytes, except that the first token may lose a
space. Other decoders have no such table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence, Set

from tokenizers import Tokenizer as Backend

_MAX_CHAR_BYTES = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of every token, and those that the first token of a text loses.

    `pieces[i]` are the bytes that token `i` adds in the middle of a text. Ids outside the
    vocabulary add none, as in the `decode` of `tokenizers`.
    """

    def __init__(
        self,
        pieces: list[bytes | None],
        *,
        leading: bytes = b"",
        leading_count: int = 0,
        first_pieces: dict[int, bytes] | None = None,
    ):
        self.pieces = pieces  # None: no such token
        self.leading = leading  # a text loses up to leading_count of these at its start
        self.leading_count = leading_count
        self.first_pieces = first_pieces or {}  # tokens that differ at the start of a text
        self._texts: dict[frozenset[int], dict[int, str]] = {}

    @classmethod
    def of(cls, backend: Backend) -> TokenBytes | None:
        """Return a tokenizer's table, or None if its decoder does not work token by token."""
        steps = _decoder_steps(backend)
        kinds = [step["type"] for step in steps]
        vocab = backend.get_vocab(with_added_tokens=True)
        if kinds == ["ByteLevel"]:
            return cls(_by_id({token: _undisguise(token) for token in vocab}, vocab))
        if kinds == ["Metaspace"]:
            return cls._metaspace(vocab, steps[0])
        return cls._sentencepiece(vocab, steps)

    @classmethod
    def _metaspace(cls, vocab: dict[str, int], step: dict) -> TokenBytes:
        mark = step["replacement"]
        pieces = _by_id({token: token.replace(mark, " ").encode() for token in vocab}, vocab)
        if step["prepend_scheme"] == "never":
            return cls(pieces)
        # The decoder removes every mark from the first token, wherever the mark is.
        first = {i: token.replace(mark, "").encode() for token, i in vocab.items() if mark in token}
        return cls(pieces, first_pieces=first)

    @classmethod
    def _sentencepiece(cls, vocab: dict[str, int], steps: list[dict]) -> TokenBytes | None:
        """Return the table for the steps Replace*, ByteFallback?, Fuse?, Strip? in this order.

        The result is None for other steps.
        """
        replacements: list[tuple[str, str]] = []
        byte_fallback = fused = False
        strip, strip_count = "", 0
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
                    not byte_fallback and not fused
                ):
                    replacements.append((old, new))
                case {"type": "ByteFallback"} if not byte_fallback and not fused:
                    byte_fallback = True
                case {"type": "Fuse"} if not fused:
                    fused = True
                case {"type": "Strip", "content": str(char), "start": int(start), "stop": 0} if (
                    fused and not strip
                ):
                    strip, strip_count = char, start
                case _:
                    return None
        if not (byte_fallback or fused):
            return None  # without a decoder, tokens are joined with spaces

        def read(token: str) -> bytes:
            for old, new in replacements:
                token = token.replace(old, new)
            if byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(match[1], 16)])
            return token.encode()

        pieces = _by_id({token: read(token) for token in vocab}, vocab)
        return cls(pieces, leading=strip.encode(), leading_count=strip_count)

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token in the middle of a text; empty for an unknown id."""
        if not 0 <= token_id < len(self.pieces):
            return b""
        return self.pieces[token_id] or b""

    def texts(self, hidden_ids: frozenset[int]) -> dict[int, str]:
        """Return the cache of token texts, by id, for streams that hide `hidden_ids`.

        It has tokens of whole characters, and is valid between two characters in the middle of a
        text. The streams fill it.
        """
        return self._texts.setdefault(hidden_ids, {})


class ByteStream:
    """An incremental conversion of ids to bytes."""

    def __init__(self, table: TokenBytes, hidden_ids: Set[int]):
        self._table = table
        self._hidden_ids = hidden_ids
        self._begun = False
        self._to_strip = table.leading_count

    @property
    def in_middle(self) -> bool:
        """True if each token adds the same bytes from now on."""
        return self._begun and not self._to_strip

    def skip(self, prompt_ids: Sequence[int]) -> bytes:
        """Skip a prompt and return its last bytes, which contain any unfinished character.

        Only the prompt's beginning, up to its first text, and its end are read.
        """
        begin, data = 0, b""
        while begin < len(prompt_ids) and (self._to_strip or not self._begun):
            data += self.push(prompt_ids[begin : begin + 1])
            begin += 1
        end, tail = len(prompt_ids), b""
        while end > begin and len(tail) < _MAX_CHAR_BYTES:
            end -= 1
            tail = self.push(prompt_ids[end : end + 1]) + tail
        return tail if end > begin else data + tail

    def push(self, ids: Iterable[int]) -> bytes:
        pieces, hidden = self._table.pieces, self._hidden_ids
        size = len(pieces)
        found = []
        for i in ids:
            if i in hidden or not 0 <= i < size or (piece := pieces[i]) is None:
                continue
            if not self._begun:
                self._begun = True
                piece = self._table.first_pieces.get(i, piece)
            found.append(piece)
        data = b"".join(found)
        return self._stripped(data) if self._to_strip else data

    def _stripped(self, data: bytes) -> bytes:
        while data and self._to_strip:
            if not data.startswith(self._table.leading):
                self._to_strip = 0
                break
            data = data[len(self._table.leading) :]
            self._to_strip -= 1
        return data


def _decoder_steps(backend: Backend) -> list[dict]:
    """Return the steps of the decoder, with nested sequences flattened; empty without one."""
    if backend.decoder is None:
        return []

    def flat(step: dict) -> list[dict]:
        if step["type"] != "Sequence":
            return [step]
        return [leaf for inner in step["decoders"] for leaf in flat(inner)]

    return flat(json.loads(backend.decoder.__getstate__()))


def _by_id(bytes_of: dict[str, bytes], vocab: dict[str, int]) -> list[bytes | None]:
    pieces: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, i in vocab.items():
        pieces[i] = bytes_of[token]
    return pieces


def _byte_disguises() -> dict[str, int]:
    """Return GPT-2's printable character for each byte, as a map to bytes.

    Visible Latin-1 characters stand for themselves, and the other bytes start at U+0100. Source:
    https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(0x100) if b not in set(visible)]
    return {chr(b): b for b in visible} | {chr(0x100 + n): b for n, b in enumerate(hidden)}


_BYTE_OF_DISGUISE = _byte_disguises()


def _undisguise(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_DISGUISE[char] for char in token])
    except KeyError:
        # A character outside the alphabet means that the token was added as ordinary text.
        return token.encode()
