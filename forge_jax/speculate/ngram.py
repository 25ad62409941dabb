"""Prompt lookup: what followed the last time the latest few tokens stood in this sequence.

Saxena, "Prompt Lookup Decoding" (2023). It learns nothing across sequences.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import cast

from forge_jax.speculate.drafter import Draft
from forge_jax.speculate.ngram_index import IndexPool, agreement

_REACH = 64  # tokens that a match is compared over, for its confidence


class NgramDrafter:
    """Looks for the longest n-gram that ends the tokens and stands earlier; the latest, if several.

    Args:
      max_tokens: of a draft.
      min_match, max_match: tokens of an n-gram.
      max_indexed: tokens held over all sequences, at about 150 bytes each.
      max_catch_up: tokens that one call takes in; a longer prompt is taken in over several calls,
        which answer by what they know.
      max_sequences: beyond these, what is known of the one asked for longest ago is dropped.
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
        """Tokens held, over all sequences."""
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
            while len(draft) < self._max_tokens:  # the text repeats itself
                draft.append(draft[-period])
        return Draft(tuple(draft), (match / (match + 3),) * len(draft))

    def ingest(self, limit: int) -> bool:
        """Learns nothing for others."""
        return False

    def end(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> None:
        self._live.drop((salt, key))
