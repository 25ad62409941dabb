"""Matchers, which follow outputs in their grammars, and the masks of tokens that may follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import llguidance
import numpy as np

from forge_jax.errors import GrammarError, GrammarLimitError
from forge_jax.grammar.translate import reason

ALONE_S = 3e-4  # time in which the calling thread computes masks without helpers
SLOW_S = 5e-3  # wall time of a step's masks from which the next step times each one


class Matcher:
    """The parser state of one output. Not thread-safe.

    Each method raises `GrammarError` if the matcher has failed. Do not use the matcher afterwards.
    llguidance itself does not raise: a failed matcher would silently truncate the output.

    Attributes:
      spent_s: CPU time of its masks, as far as a `MaskPool` has measured it.
    """

    __slots__ = ("_inner", "spent_s")

    def __init__(self, inner: llguidance.LLMatcher):
        self._inner = inner
        self.spent_s = 0.0

    @property
    def num_forced_bytes(self) -> int:
        """The number of bytes of text that the grammar forces next."""
        return len(self._inner.compute_ff_bytes())

    @property
    def stopped(self) -> bool:
        """True if the output is complete and nothing can be added."""
        return self._inner.is_stopped()

    @property
    def accepting(self) -> bool:
        """True if the output may end here."""
        return self._inner.is_accepting()

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of tokens that may come next into `row: i32[mask_width]`.

        Raises:
          GrammarError: no token may come next, or the grammar is too complex.
        """
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.check()
        if not row.any():
            raise GrammarError("no token of the vocabulary can continue this output")

    def accept(self, token_ids: Sequence[int]) -> None:
        """Append tokens to the output.

        Raises:
          GrammarError: the grammar does not permit a token.
        """
        inner = self._inner
        if len(token_ids) == 1:
            followed = inner.consume_token(token_ids[0])
        else:
            followed = inner.consume_tokens(list(token_ids))
        if not followed:
            self.check()
            raise GrammarError("the output does not follow its grammar")

    def valid_drafts(self, token_ids: Sequence[int]) -> int:
        """Return the number of these tokens that may follow, without changing the state.

        A token that completes the output does not count, because no draft can come after it.
        """
        inner = self._inner
        valid = consumed = 0
        for token in token_ids:
            if not inner.try_consume_tokens([token]):
                break
            consumed += 1
            if inner.is_stopped():
                break
            valid += 1
        self.rollback(consumed)
        return valid

    def rollback(self, count: int) -> None:
        """Remove the last `count` tokens.

        Raises:
          GrammarError: the tokens cannot be removed.
        """
        if count and not self._inner.rollback(count):
            self.check()
            raise GrammarError("the output cannot be rolled back")

    def check(self) -> None:
        """Raise an error if the matcher has failed.

        Raises:
          GrammarLimitError: a limit of the parser is exceeded.
          GrammarError: it failed for another reason.
        """
        if self._inner.is_error():
            why = reason(self._inner.get_error())
            if why.startswith("it is too complex"):
                raise GrammarLimitError(why)
            raise GrammarError("the grammar became too complex to evaluate for this output")


class MaskPool:
    """A pool of threads that compute the masks of many matchers without holding the GIL.

    A mask usually takes a few microseconds, and waking threads takes as long as ten masks.
    Therefore the calling thread begins, and other threads help only if it takes long. After a step
    with slow masks, the next step times each matcher, to attribute the cost.

    Args:
      num_threads: the number of helping threads.
      clock: returns the CPU seconds of the calling thread.
    """

    def __init__(self, num_threads: int, *, clock: Callable[[], float] = time.thread_time):
        self._num_threads = num_threads
        self._executor = llguidance.LLExecutor(num_threads=num_threads)
        self._clock = clock
        self._slow = False

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, thread_name_prefix="forge-mask")

    def fill(
        self, work: Sequence[tuple[Matcher, int, Sequence[int]]], masks: np.ndarray
    ) -> list[Matcher]:
        """Compute the rows of matchers: the next token's, and one after each draft token.

        Args:
          work: (matcher, first row, drafts that `valid_drafts` accepted).
          masks: the output, i32[rows, mask_width], C-contiguous.

        Returns:
          The matchers that failed. Their rows are undefined.
        """
        assert masks.flags.c_contiguous
        begin_s = time.perf_counter()
        if self._slow:
            list(self._threads.map(partial(self._timed, masks), work))
        elif len(work) == 1:
            self._timed(masks, work[0])
        else:
            self._fill(work, masks)
        self._slow = time.perf_counter() - begin_s >= SLOW_S
        empty = ~masks.any(axis=1)
        return [matcher for matcher, row, _ in work if empty[row] or matcher._inner.is_error()]

    def _timed(self, masks: np.ndarray, work: tuple[Matcher, int, Sequence[int]]) -> None:
        """Compute the rows of one matcher in this thread, and add the CPU time to `spent_s`."""
        matcher, row, drafts = work
        begin_s, inner = self._clock(), matcher._inner
        address, row_bytes = masks.ctypes.data, masks.strides[0]
        inner.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        taken = 0
        for ahead, token in enumerate(drafts, start=1):
            taken += inner.try_consume_tokens([token])
            if taken < ahead or inner.is_error():
                break
            inner.unsafe_compute_mask_ptr(address + (row + ahead) * row_bytes, row_bytes)
        if taken and not inner.is_error():
            inner.rollback(taken)
        matcher.spent_s += self._clock() - begin_s

    def _fill(self, work: Sequence[tuple[Matcher, int, Sequence[int]]], masks: np.ndarray) -> None:
        address, row_bytes, rows = masks.ctypes.data, masks.strides[0], len(masks)
        plain = [(matcher._inner, row) for matcher, row, drafts in work if not drafts]
        alone_until_s = time.perf_counter() + ALONE_S
        while plain and (len(plain) == 1 or time.perf_counter() < alone_until_s):
            inner, row = plain.pop()
            inner.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
        drafted = [(matcher._inner, row, list(drafts)) for matcher, row, drafts in work if drafts]
        if plain:
            self._executor.unsafe_compute_mask_ptr(plain, address, row_bytes, rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(
                drafted, address, row_bytes, rows
            )
