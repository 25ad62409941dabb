"""Suffix decoding: drafts the most frequent continuation of the longest context seen before.

Source: Oliaro et al., "SuffixDecoding" (arXiv 2411.04975). Contexts come from this sequence's
prompt and output, and from outputs of other sequences of the same salt. Instead of the paper's
trees, a `NgramIndex` finds the occurrences of a context, and the continuations of the latest ones
are counted on demand. Adding a token takes a few dictionary operations, and dropping tokens leaves
no stale counts.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq

from forge_jax.speculate.drafter import Draft
from forge_jax.speculate.ngram_index import IndexPool, NgramIndex, agreement

_LENGTHS = (1, 2, 4, 8, 16)  # Lengths of indexed contexts.
_PLACES = 16  # The latest occurrences, which are counted.
_PIECE = 128  # Tokens of an output that are shared at a time.
_MOST_WAITING = 8192  # Shared tokens that wait for `ingest`. Beyond it, no more are shared.


class SuffixDrafter:
    """A drafter from this sequence or others of its salt, whichever promises more tokens.

    Drafts never depend on another salt, because each salt has its own index.

    A token's confidence is c^2 / (n (n + 3/m)), where c of n occurrences of the last m tokens agree
    on it. A single occurrence gives m / (m + 3). In measurements on text this is close to the
    acceptance rate. A plain c / n is far too high, especially if occurrences disagree.

    Args:
      max_tokens: the maximum number of tokens of a draft.
      max_depth: the tokens over which a match is compared.
      max_spec_factor: the longest draft, as a multiple of the match.
      min_token_prob: a draft ends when the product of its confidences falls below this.
      max_live_tokens: the maximum number of tokens of live sequences, at about 200 bytes each.
        Beyond it, the longest sequence drops its oldest tokens.
      max_shared_tokens: the maximum number of tokens of shared outputs. Beyond it, the largest salt
        drops its oldest tokens.
      max_catch_up: the maximum number of tokens of the sequence that a call indexes.
      max_sequences: the maximum number of sequences. Beyond it, the least recently used one is
        dropped.
      max_salts: the maximum number of salts, with the same rule.
    """

    def __init__(
        self,
        max_tokens: int,
        *,
        max_depth: int = 64,
        max_spec_factor: float = 4.0,
        min_token_prob: float = 0.05,
        max_live_tokens: int = 1_048_576,
        max_shared_tokens: int = 262_144,
        max_catch_up: int = 512,
        max_sequences: int = 4096,
        max_salts: int = 1024,
    ):
        assert max_tokens > 0 and max_depth > 0 and max_catch_up > 0
        assert max_spec_factor > 0 and 0 <= min_token_prob <= 1
        self._max_tokens = max_tokens
        self._max_depth = max_depth
        self._max_spec_factor = max_spec_factor
        self._min_token_prob = min_token_prob
        self._max_catch_up = max_catch_up
        lengths = [length for length in _LENGTHS if length <= max_depth]
        self._live = IndexPool(lengths, max_depth, max_live_tokens, max_sequences)
        self._shared = IndexPool(lengths, max_depth, max_shared_tokens, max_salts)
        self._max_salts = max_salts
        self._unread: dict[str, None] = {}  # salts with tokens that wait for `ingest`

    @property
    def num_live(self) -> int:
        """The number of indexed tokens of live sequences."""
        return self._live.num_tokens

    @property
    def num_shared(self) -> int:
        """The number of indexed tokens of shared outputs."""
        return self._shared.num_tokens

    def propose(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> Draft:
        own = self._live.follow((salt, key), tokens, self._max_catch_up)
        own.mark = self._share(own.mark, key, tokens, prompt_len, salt, _PIECE)
        tail = list(tokens[-self._max_depth :])
        repeats = own.end == len(tokens)
        draft, expected = self._go_on(own, tail, repeats)
        shared = self._shared.get(salt)
        if shared is not None:
            other, more = self._go_on(shared, tail, repeats=False)
            if more > expected:
                return other
        return draft

    def ingest(self, limit: int) -> bool:
        salt = next(iter(self._unread), None)
        if salt is not None:
            del self._unread[salt]
            shared = self._shared.get(salt)
            if shared is not None:
                shared.enter(limit)
                if shared.num_waiting:
                    self._unread[salt] = None
        return bool(self._unread)

    def end(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> None:
        own = self._live.get((salt, key))
        self._share(0 if own is None else own.mark, key, tokens, prompt_len, salt, 1)
        if own is not None:
            self._live.drop((salt, key))

    def _share(
        self,
        mark: int,  # position up to which the output is shared
        key: Hashable,
        tokens: Seq[int],
        prompt_len: int,
        salt: str,
        piece: int,
    ) -> int:
        """Share new tokens of an output with its salt, in whole pieces, and return the mark."""
        begin = max(mark, prompt_len)
        end = begin + (len(tokens) - begin) // piece * piece
        if end == begin:
            return mark
        shared = self._shared.get(salt)
        if shared is not None and shared.num_waiting > _MOST_WAITING:
            return mark
        self._unread[salt] = None
        if len(self._unread) > self._max_salts:
            del self._unread[next(iter(self._unread))]
        before = tokens[max(begin - _LENGTHS[-1], 0) : begin]
        self._shared.add(salt, key, before, tokens[begin:end], goes_on=mark > 0)
        return end

    def _go_on(self, index: NgramIndex, tail: list[int], repeats: bool) -> tuple[Draft, float]:
        """Return the most frequent continuation, and its expected number of accepted tokens.

        Args:
          repeats: True if the index's text ends with `tail`, so that a match may extend into the
            draft itself.
        """
        text, size = index.text, len(index.text)
        match, places = _longest(text, *index.find(tail, _PLACES), tail)
        confidence: list[float] = []
        ids: list[int] = []
        product, expected = 1.0, 0.0
        most = min(self._max_tokens, int(self._max_spec_factor * match)) if places else 0
        for ahead in range(most):
            if len(places) > 1:
                token, places, count = _vote(text, places, ahead)
            else:
                at = places[0] + ahead
                token, count = text[at] if at < len(text) else None, 1
            if token is None:
                break
            agreeing = len(places)
            likely = agreeing * agreeing / (count * (count + 3 / (match + ahead)))
            product *= likely
            if product < self._min_token_prob:
                break
            ids.append(token)
            confidence.append(likely)
            expected += product
            if repeats:
                text.append(token)
        if repeats:
            del text[size:]
        return Draft(tuple(ids), tuple(confidence)), expected


def _vote(
    text: list[int | None], places: list[int], ahead: int
) -> tuple[int | None, list[int], int]:
    """Return the most frequent next token, the places with it, and how many have a next token."""
    size = len(text)
    tokens = [text[place + ahead] if place + ahead < size else None for place in places]
    if None not in tokens and tokens.count(tokens[0]) == len(tokens):
        return tokens[0], places, len(places)
    counts = dict.fromkeys(tokens, 0)
    for token in tokens:
        counts[token] += 1
    ended = counts.pop(None, 0)
    if not counts:
        return None, [], 0
    most = max(counts, key=counts.__getitem__)  # the latest of equally frequent tokens
    agreeing = [place for place, token in zip(places, tokens, strict=True) if token == most]
    return most, agreeing, len(tokens) - ended


def _longest(
    text: list[int | None], places: list[int], length: int, tail: list[int]
) -> tuple[int, list[int]]:
    """Return the length of the longest match with the end of `tail`, and the places with it.

    Before each of the given places, at least the last `length` tokens match, except for hash
    collisions.
    """
    if length == len(tail):
        return length, places
    left = tail[-length - 1]
    longer = [place for place in places if place > length and text[place - length - 1] == left]
    if not longer:
        return length, places
    length, places = length + 1, []
    for place in longer:
        match = agreement(text, place, tail, length)
        if match > length:
            length, places = match, [place]
        elif match:
            places.append(place)
    return length, places
