"""Suffix decoding: the most frequent way on from the longest context that has been seen before.

Oliaro et al., "SuffixDecoding" (arXiv 2411.04975), with what matters of its two trees: contexts of
this sequence, prompt and output, and of the outputs of other sequences of the same salt. Here they
are no trees. A `NgramIndex` finds where the context stands, latest first, and what follows at the
latest of these places is counted when it is asked for: to enter a token takes a few dictionary
operations whatever stands around it, and forgetting leaves no count behind.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq

from forge_jax.speculate.drafter import Draft
from forge_jax.speculate.ngram_index import IndexPool, NgramIndex, agreement

_LENGTHS = (1, 2, 4, 8, 16)  # of the contexts that are indexed
_PLACES = 16  # the latest ones, that are counted
_PIECE = 128  # tokens of an output that others of its salt may find, at a time
_MOST_WAITING = 8192  # tokens of others' outputs that wait for `ingest`; what ends then is not kept


class SuffixDrafter:
    """Drafts from this sequence or from others of its salt, whichever promises more tokens.

    Nothing crosses salts: each has an index of its own, by its full name.

    A token's confidence is c^2 / (n (n + 3/m)): of n places where the last m tokens stand, c agree
    on what follows. One place alone gives m / (m + 3). Measured on text, this is near the share
    that is right; a plain c / n is far above it, most of all where places disagree.

    Args:
      max_tokens: of a draft.
      max_depth: tokens that a match is compared over.
      max_spec_factor: a draft is at most this many times as long as its match.
      min_token_prob: a draft ends where the product of its confidences falls below this.
      max_live_tokens, max_shared_tokens: held of live sequences, and of outputs for others, at
        about 200 bytes each. Beyond that whoever holds most, the sequence or the salt, forgets its
        oldest tokens first.
      max_catch_up: tokens of the sequence that one call takes in.
      max_sequences, max_salts: beyond these, the one asked for longest ago is dropped.
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
        self._unread: dict[str, None] = {}  # salts with outputs that wait for `ingest`

    @property
    def num_live(self) -> int:
        """Tokens held of live sequences."""
        return self._live.num_tokens

    @property
    def num_shared(self) -> int:
        """Tokens held of outputs, for others of their salt."""
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
        mark: int,  # position up to which others know the output, if any
        key: Hashable,
        tokens: Seq[int],
        prompt_len: int,
        salt: str,
        piece: int,
    ) -> int:
        """Lets others of the salt find what is new of an output, in whole pieces: the new mark."""
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
        """The most frequent way on, and how many of its tokens are expected to be accepted.

        `repeats` tells that the index's text ends with `tail`: it may go on with the draft itself.
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
    """What most places go on with, which ones those are, and how many go on at all."""
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
    most = max(counts, key=counts.__getitem__)  # of equals, the latest
    agreeing = [place for place, token in zip(places, tokens, strict=True) if token == most]
    return most, agreeing, len(tokens) - ended


def _longest(
    text: list[int | None], places: list[int], length: int, tail: list[int]
) -> tuple[int, list[int]]:
    """The places before which most of `tail` stands, and how much of it that is.

    At least its last `length` tokens do before each of them; collisions of hashes are let through.
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
