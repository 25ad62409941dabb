"""Differences of next-token distributions, computed in float64 from logits of both sides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOP = 5  # most likely tokens per position
_MOST_VALUES = 2**22  # per block of rows: 32 MiB in float64

type Top = tuple[tuple[int, float], ...]  # token IDs and logprobs, in descending order


@dataclass(frozen=True, slots=True)
class Position:
    """One token and the two distributions that predict it.

    Attributes:
      token: the token's ID.
      kl: KL(A||B) in nats, at least 0.
      logprobs: the token's, by A and by B.
      ranks: the token's, on both sides; 1 is the most likely token.
      entropies: the entropy of each distribution, in nats.
      top: the `TOP` most likely tokens of both sides.
    """

    token: int
    kl: float
    logprobs: tuple[float, float]
    ranks: tuple[int, int]
    entropies: tuple[float, float]
    top: tuple[Top, Top]

    @property
    def same_top(self) -> bool:
        """True if both sides have the same most likely token."""
        return self.top[0][0][0] == self.top[1][0][0]


def positions(a: np.ndarray, b: np.ndarray, tokens: Sequence[int]) -> Iterator[Position]:
    """Yield the differences of rows of logits.

    A vocabulary that is padded further than the other is cut to the shorter one's length.

    Args:
      a: f32[R, V], finite.
      b: f32[R, V'].
      tokens: the token that follows each row, R in all.
    """
    vocab = min(a.shape[1], b.shape[1])
    size = max(1, _MOST_VALUES // vocab)
    for start in range(0, len(tokens), size):
        rows = slice(start, start + size)
        yield from _block(a[rows, :vocab], b[rows, :vocab], tokens[rows])


def _block(a: np.ndarray, b: np.ndarray, tokens: Sequence[int]) -> Iterator[Position]:
    logprobs = log_softmax(a), log_softmax(b)
    divergences = kl_divergence(*logprobs)
    entropies = [-_expected(each, each) for each in logprobs]
    for row, token in enumerate(tokens):
        both = logprobs[0][row], logprobs[1][row]
        yield Position(
            token=int(token),
            kl=float(divergences[row]),
            logprobs=(float(both[0][token]), float(both[1][token])),
            ranks=(_rank(both[0], token), _rank(both[1], token)),
            entropies=(float(entropies[0][row]), float(entropies[1][row])),
            top=(_top(both[0]), _top(both[1])),
        )


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log-probabilities f64[R, V] of logits f32[R, V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def kl_divergence(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return KL(A||B) in nats, f64[R], of log-probabilities f64[R, V]."""
    return np.maximum(_expected(a, a - b), 0.0)  # rounding can make it negative


def _expected(logprobs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the expectation of values f64[R, V] under distributions f64[R, V], as f64[R]."""
    return (np.exp(logprobs) * values).sum(axis=-1)


def _rank(logprobs: np.ndarray, token: int) -> int:
    return int(np.count_nonzero(logprobs > logprobs[token])) + 1


def _top(logprobs: np.ndarray) -> Top:
    count = min(TOP, len(logprobs))
    ids = np.argpartition(-logprobs, count - 1)[:count]
    ids = ids[np.lexsort((ids, -logprobs[ids]))]
    return tuple((int(i), float(logprobs[i])) for i in ids)


def summary(found: Sequence[Position]) -> dict[str, Any]:
    """Return the figures of all positions, which must not be empty."""
    kl = np.array([each.kl for each in found])
    logprobs = np.array([each.logprobs for each in found])
    shift = np.exp(logprobs[:, 1]) - np.exp(logprobs[:, 0])
    return {
        "positions": len(found),
        "mean_kl": float(kl.mean()),
        "median_kl": float(np.median(kl)),
        "p90_kl": float(np.quantile(kl, 0.90)),
        "p99_kl": float(np.quantile(kl, 0.99)),
        "max_kl": float(kl.max()),
        "same_top": float(np.mean([each.same_top for each in found])),
        "rms_probability_change": float(np.sqrt(np.mean(shift**2))),
        "perplexity": [float(each) for each in np.exp(-logprobs.mean(axis=0))],
    }
