"""`TokenFilter`: the tokens that a request's `allowed_token_ids` and `bad_words` permit.

A bad word is one or more token sequences. The last token of a sequence is banned while the output
ends with the others. The end of the prompt does not count. llguidance is not needed for this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from forge_jax.errors import GrammarError, RequestError
from forge_jax.grammar.masks import bits

if TYPE_CHECKING:
    from forge_jax.sampling_params import SamplingParams
    from forge_jax.text import Tokenizer


class TokenFilter:
    """The immutable filter of all outputs of a request.

    Args:
      vocab_size: the model's output width.
      allowed: the allowed token ids; None: all.
      bad: banned sequences of token ids, none of them empty.
    """

    __slots__ = ("always", "endings", "longest")

    def __init__(
        self, vocab_size: int, allowed: Sequence[int] | None, bad: Iterable[tuple[int, ...]]
    ):
        self.always = bits(np.arange(vocab_size) if allowed is None else allowed, vocab_size)
        self.endings: list[tuple[tuple[int, ...], int]] = []  # (tokens before, banned token)
        for *before, last in bad:
            if before:
                self.endings.append((tuple(before), last))
            else:
                _clear(self.always, last)
        self.longest = max((len(before) for before, _ in self.endings), default=0)

    @classmethod
    def of(
        cls, params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int
    ) -> TokenFilter | None:
        """Return the filter of a request whose ids are checked; None if it permits all tokens.

        Raises:
          RequestError: no token is permitted, or a bad word cannot be converted to tokens.
        """
        if params.allowed_token_ids is None and not params.bad_words:
            return None
        bad: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            if tokenizer is None:
                raise RequestError(
                    "bad_words needs a tokenizer, but this model has none: use allowed_token_ids "
                    "or logit_bias",
                    param="bad_words",
                )
            spellings = _spellings(tokenizer, tuple(params.bad_words))
            bad = tuple(ids for ids in spellings if max(ids) < vocab_size)  # others cannot occur
        made = cls(vocab_size, params.allowed_token_ids, bad)
        if not made.always.any():
            raise RequestError("bad_words leave none of the allowed tokens", param="bad_words")
        return made

    def follower(self) -> Follower:
        """Return a follower at the beginning of an output."""
        return Follower(self)


class Follower:
    """The state of one output of a request with a filter. It is not thread-safe."""

    __slots__ = ("_filter", "_tail")

    def __init__(self, of: TokenFilter):
        self._filter = of
        self._tail: tuple[int, ...] = ()  # the last tokens that may begin a bad word

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output.

        Raises:
          GrammarError: a token is not permitted.
        """
        if self._valid(token_ids) < len(token_ids):
            raise GrammarError("the output has a token that its filter does not permit")
        self._tail = self._after(token_ids)

    def valid_drafts(self, token_ids: Sequence[int]) -> int:
        """Return the number of these tokens, from the first, that may follow."""
        return self._valid(token_ids)

    def mask(self, drafts: Sequence[int] = ()) -> np.ndarray:
        """Return the read-only mask of tokens that may follow these drafts, i32[mask_width]."""
        always, banned = self._filter.always, self._banned(self._after(drafts))
        if not banned:
            return always
        mask = always.copy()
        for token in banned:
            _clear(mask, token)
        return mask

    def _valid(self, token_ids: Sequence[int]) -> int:
        always, tail = self._filter.always, self._tail
        for index, token in enumerate(token_ids):
            if not always[token >> 5] >> (token & 31) & 1 or token in self._banned(tail):
                return index
            tail = self._longest_tail((*tail, token))
        return len(token_ids)

    def _banned(self, tail: tuple[int, ...]) -> list[int]:
        """Return the tokens that would complete a bad word of several tokens."""
        endings = self._filter.endings
        return [last for before, last in endings if tail[-len(before) :] == before]

    def _after(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        return self._longest_tail((*self._tail, *token_ids)) if token_ids else self._tail

    def _longest_tail(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        longest = self._filter.longest
        return tokens[-longest:] if longest else ()


@lru_cache(maxsize=64)  # a request is checked more than once, and clients repeat their words
def _spellings(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, with and without a space before it."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        try:
            forms = [tuple(tokenizer.encode(text, False)) for text in (bare, f" {bare}") if text]
        except RequestError as error:
            raise RequestError(f"bad_words: {error}", param="bad_words") from error
        if not any(forms):
            raise RequestError("bad_words: a word has no tokens", param="bad_words")
        found |= dict.fromkeys(form for form in forms if form)
    return tuple(found)


def _clear(mask: np.ndarray, token: int) -> None:
    mask.view(np.uint32)[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
