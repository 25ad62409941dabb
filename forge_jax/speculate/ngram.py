"""Prompt lookup decoding: drafts the text after an earlier occurrence of the last few tokens.

Source: Saxena, "Prompt Lookup Decoding" (2023). It uses only the sequence's own tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import cast

from forge_jax.speculate.drafter import Draft
from forge_jax.speculate.ngram_index import IndexPool, agreement

_REACH = 64  # tokens over which a match is compared, for its confidence


class NgramDrafter:
    """A drafter from the latest earlier occurrence of the longest n-gram that ends the tokens.

    Args:
      max_tokens: the maximum number of tokens of a draft.
      min_match: the minimum number of tokens of an n-gram.
      max_match: the maximum number of tokens of an n-gram.
      max_indexed: the maximum number of indexed tokens of all sequences, at about 150 bytes each.
      max_catch_up: the maximum number of tokens that a call indexes. Calls index a longer prompt in
        parts, and draft from the indexed part.
      max_sequences: the maximum number of sequences. Beyond it, the least recently used one is
        dropped.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        min_match: int = 1,
        max_match: int = 4,
        max_indexed: int = 1_048_576,
        max_catch_up: int = 512,
        max_sequences: int = 4096,
    ):
        assert max_tokens > 0 and 0 < min_match <= max_match <= _REACH and max_catch_up > 0
        self._max_tokens = max_tokens
        self._min_match = min_match
        self._max_match = max_match
        self._max_catch_up = max_catch_up
        lengths = range(min_match, max_match + 1)
        self._live = IndexPool(lengths, _REACH, max_indexed, max_sequences)

    @property
    def num_indexed(self) -> int:
        """The number of indexed tokens over all sequences."""
        return self._live.num_tokens

    def propose(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> Draft:
        index = self._live.follow((salt, key), tokens, self._max_catch_up)
        tail, text = list(tokens[-_REACH:]), index.text
        places, length = index.find(tail, 1)
        match = agreement(text, places[0], tail, length) if places else 0
        if not match:
            return Draft()
        draft = cast("list[int]", text[places[0] : places[0] + self._max_tokens])
        if index.end == len(tokens):
            period = len(text) - places[0]
            while len(draft) < self._max_tokens:  # assume that the text is periodic
                draft.append(draft[-period])
        return Draft(tuple(draft), (match / (match + 3),) * len(draft))

    def ingest(self, limit: int) -> bool:
        """Return False, because other sequences' outputs are not used."""
        return False

    def end(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> None:
        self._live.drop((salt, key))
