"""`try_out`: writes some tokens by a grammar, to find out what its masks cost."""

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
MAX_FORCED_BYTES = 8192  # that must follow in one way; each mask tokenizes all of them
MAX_MASK_S = 0.025  # CPU time of a mask and a token, on average
MIN_MASKS = 4  # from which an average is taken
TRIAL_S = MIN_MASKS * MAX_MASK_S  # after which there are no further steps


def try_out(
    grammar: Grammar,
    vocab_size: int,
    end_ids: Collection[int],
    *,
    clock: Callable[[], float] = time.thread_time,
) -> str | None:
    """Why the masks of a grammar would cost too much; None if they do not.

    Takes the first tokens of some outputs, at random but always the same ones.

    Args:
      vocab_size: the model's output width.
      end_ids: the tokens that end an output.
      clock: CPU seconds of this thread.
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
                return f"it forces {forced} bytes of text in a row; at most {MAX_FORCED_BYTES}"
            spent_s = clock() - begin_s
            if masks < MIN_MASKS:
                continue
            if spent_s > masks * MAX_MASK_S:
                return (
                    f"its masks take {1e3 * spent_s / masks:.0f} ms of CPU time each; "
                    f"at most {1e3 * MAX_MASK_S:.0f}"
                )
            if spent_s > TRIAL_S:
                return None
    return None


def _next_token(
    matcher: Matcher, row: np.ndarray, end_ids: Collection[int], rng: random.Random
) -> int | None:
    """One of the tokens that a mask allows; None: only an end may come."""
    allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
    allowed = allowed[~np.isin(allowed, list(end_ids))]
    return int(rng.choice(allowed)) if len(allowed) else None
