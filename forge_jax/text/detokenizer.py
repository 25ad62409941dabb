"""Incremental detokenization, which never has to take back text that was sent."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from tokenizers.decoders import DecodeStream

from forge_jax.text.token_bytes import ByteStream, TokenBytes
from forge_jax.text.tokenizer import Tokenizer

_TAIL_TOKENS = 6  # enough for any character (at most 4 bytes) and one or two special tokens


class Detokenizer:
    """An incremental conversion of one sequence's ids to text.

    The pushed and flushed texts together equal `tokenizer.decode` of prompt and output, without the
    prompt's text. A character is sent when all of its bytes are complete.

    Args:
      tokenizer: the model's tokenizer.
      prompt_tail_ids: the prompt, or its last few ids if they have some text. Only the ends are
        read, so a long prompt costs nothing. The output's first word then keeps its space, and a
        character that the prompt cuts off is completed. If empty, the output begins a text and
        loses the space that `decode` drops.
      skip_special_tokens: leaves special tokens out of the text.
    """

    __slots__ = ("_stream", "push")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_tail_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ):
        self._stream: _TableText | _LibraryText
        if tokenizer.table is None:
            self._stream = _LibraryText(tokenizer, prompt_tail_ids, skip_special_tokens)
        else:
            hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
            self._stream = _TableText(tokenizer.table, hidden, prompt_tail_ids)
        # Returns the text that these ids complete; empty in the middle of a character.
        self.push: Callable[[Sequence[int]], str] = self._stream.push

    def flush(self) -> str:
        """Return the rest at the end of the sequence: U+FFFD for an unfinished character."""
        return self._stream.flush()


class _TableText:
    """A stream for tokenizers with a byte table: 0.1 us for most tokens, without a lock."""

    __slots__ = ("_between", "_bytes", "_decoder", "_size", "_texts")

    def __init__(self, table: TokenBytes, hidden: frozenset[int], prompt_tail_ids: Sequence[int]):
        self._bytes = ByteStream(table, hidden)
        self._texts = table.texts(hidden)
        self._size = len(table.pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(self._bytes.skip(prompt_tail_ids))
        self._between = self._is_between()

    def push(self, ids: Sequence[int]) -> str:
        if not self._between or len(ids) != 1:
            return self._push_bytes(ids)
        text = self._texts.get(ids[0])
        if text is None:
            text = self._push_bytes(ids)
            # Whole characters are the same wherever the token comes between two characters.
            if self._between and 0 <= ids[0] < self._size and "\ufffd" not in text:
                self._texts[ids[0]] = text
        return text

    def _push_bytes(self, ids: Sequence[int]) -> str:
        text = self._decoder.decode(self._bytes.push(ids))
        self._between = self._is_between()
        return text

    def flush(self) -> str:
        self._between = False
        return self._decoder.decode(b"", final=True)

    def _is_between(self) -> bool:
        """Return True if the next token's text is independent of the tokens before it."""
        return self._bytes.in_middle and not self._decoder.getstate()[0]


class _LibraryText:
    """A stream for other decoders, based on the library's, which has no flush."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail_ids: Sequence[int], skip_special: bool):
        self._backend = tokenizer.backend
        self._skip_special = skip_special
        self._tail_ids = list(prompt_tail_ids[-_TAIL_TOKENS:])
        self._stream = DecodeStream(ids=self._tail_ids, skip_special_tokens=skip_special)
        self._ids: list[int] = []
        self._sent_chars = 0

    def push(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        text = "".join(self._stream.step(self._backend, i) or "" for i in ids)
        self._sent_chars += len(text)
        return text

    def flush(self) -> str:
        before = len(self._decode(self._tail_ids))
        text = self._decode(self._tail_ids + self._ids)[before + self._sent_chars :]
        self._sent_chars += len(text)
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip_special)
