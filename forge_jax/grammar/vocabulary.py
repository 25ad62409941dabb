"""The vocabulary of a model in the form that llguidance requires."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING

import llguidance
import msgspec
from tokenizers import AddedToken

from forge_jax.host.panics import is_panic

if TYPE_CHECKING:
    from forge_jax.text import Tokenizer


class Vocabulary(msgspec.Struct, frozen=True):
    """The bytes of each token. Special tokens are those that must not be sampled as text."""

    tokens: list[bytes]
    special_ids: list[int]
    end_ids: list[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, size: int, end_ids: Iterable[int]) -> Vocabulary:
        """Return the vocabulary of a model.

        Args:
          size: the model's output width.
          end_ids: the EOS tokens.
        """
        ends = sorted(end_ids)
        special = tokenizer.special_ids.union(ends)
        tokens = []
        for token in range(size):
            piece = tokenizer.token_bytes(token)
            if token in special:  # llguidance's form for a token that is not text
                piece = b"\xff" + f"[{token}]".encode()
            tokens.append(piece)
        return cls(tokens, sorted(special), ends)


def llguidance_tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Return an llguidance tokenizer that tokenizes forced text greedily, longest tokens first.

    It works for every model.
    """
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Greedy(vocabulary)),
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.end_ids,
    )


def canonical_tokenizer(
    tokenizer: Tokenizer, vocabulary: Vocabulary
) -> llguidance.LLTokenizer | None:
    """Return an llguidance tokenizer that tokenizes forced text like the model's tokenizer.

    The result is None if llguidance interprets the tokenizer differently.
    """
    backend = copy.deepcopy(tokenizer.backend)
    for token in vocabulary.end_ids:
        text = backend.id_to_token(token)
        if text is None:
            return None
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    try:
        made = llguidance.LLTokenizer(
            backend.to_str(), n_vocab=len(vocabulary.tokens), eos_token=vocabulary.end_ids
        )
    except BaseException as error:
        if isinstance(error, ValueError) or is_panic(error):
            return None
        raise
    special = frozenset(vocabulary.special_ids)
    for token, piece in enumerate(vocabulary.tokens):
        if token in special or not piece or piece[0] == 0xFF:  # 0xFF never begins text
            continue
        if made.decode_bytes([token]) != piece:
            return None
    return made


class _Greedy:
    def __init__(self, vocabulary: Vocabulary):
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.end_ids[0]
        self.bos_token_id = None
        special = frozenset(vocabulary.special_ids)
        self._ids = {
            piece: token
            for token, piece in reversed(list(enumerate(vocabulary.tokens)))
            if piece and token not in special
        }
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: bytes | str) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        if data == b"test":  # llguidance checks if bytes are accepted
            return []
        ids, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                raise ValueError("the vocabulary cannot encode a text that the grammar requires")
        return ids
