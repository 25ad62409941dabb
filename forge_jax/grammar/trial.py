"""A trial of a grammar, which generates a few tokens to measure the cost of its masks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection

import numpy as np

from forge_jax.errors import GrammarError, GrammarLimitError
from forge_jax.grammar.build import Grammar
from forge_jax.grammar.masks import mask_width
from forge_jax.grammar.matcher import Matcher

WALKS, STEPS = 2, 16
MAX_FORCED_BYTES = 8192  # Bytes without alternatives. Each mask tokenizes all of them.
MAX_MASK_S = 0.025  # Average CPU time of a mask and a token.
MIN_MASKS = 4  # Masks before the average is checked.
TRIAL_S = MIN_MASKS * MAX_MASK_S  # CPU time after which the trial ends.


def try_out(
    grammar: Grammar,
    vocab_size: int,
    end_ids: Collection[int],
    *,
    clock: Callable[[], float] = time.thread_time,
) -> str | None:
    """Return why the masks of a grammar are too expensive, or None if they are not.

    The trial generates the first tokens of a few outputs, with fixed seeds.

    Args:
      vocab_size: the model's output width.
      end_ids: the EOS tokens.
      clock: returns the CPU seconds of this thread.
    """
    begin_s, masks = clock(), 0
    for seed in range(WALKS):
        matcher, rng = grammar.matcher(), random.Random(seed)
        row = np.zeros(mask_width(vocab_size), np.int32)
        for _ in range(STEPS):
            if matcher.stopped:
                break
            try:
                matcher.fill(row)
                masks += 1
                token = _next_token(matcher, row, end_ids, rng)
                if token is None:
                    break
                matcher.accept([token])
            except GrammarLimitError as error:
                return str(error)
            except GrammarError:
                break  # a dead end of this vocabulary
            forced = matcher.num_forced_bytes
            if forced > MAX_FORCED_BYTES:
                return (
                    f"it forces {forced} bytes of text without alternatives; at most "
                    f"{MAX_FORCED_BYTES} are allowed"
                )
            spent_s = clock() - begin_s
            if masks < MIN_MASKS:
                continue
            if spent_s > masks * MAX_MASK_S:
                return (
                    f"its masks take {1e3 * spent_s / masks:.0f} ms of CPU time each; "
                    f"at most {1e3 * MAX_MASK_S:.0f} are allowed"
                )
            if spent_s > TRIAL_S:
                return None
    return None


def _next_token(
    matcher: Matcher, row: np.ndarray, end_ids: Collection[int], rng: random.Random
) -> int | None:
    """Return a random token that the mask permits, or None if only EOS tokens are permitted."""
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    allowed = allowed[~np.isin(allowed, list(end_ids))]
    return int(rng.choice(allowed)) if len(allowed) else None
