"""Bit masks of the tokens that a row may sample."""

from collections.abc import Sequence

import numpy as np


def mask_width(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask; token t is bit t % 32 of word t // 32."""
    return -(-vocab_size // 32)


def bits(token_ids: Sequence[int] | np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the mask of these tokens, i32[mask_width(vocab_size)]."""
    ones = np.zeros(32 * mask_width(vocab_size), np.uint8)
    ones[np.asarray(token_ids, np.int64)] = 1
    return np.packbits(ones, bitorder="little").view(np.int32)
