"""`Matcher`: where one output stands in its grammar, and which tokens may follow."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import llguidance
import numpy as np

from forge_jax.errors import GrammarError, GrammarLimitError
from forge_jax.grammar.translate import reason

ALONE_S = 3e-4
SLOW_S = 5e-3  # of wall time for the masks of a step, from which on each is timed by itself


class Matcher:
    """Follows one output token by token. Not thread-safe.

    llguidance never raises: a matcher that fails allows nothing but the end of the output, which
    would be cut. So each call that may fail looks, and raises `GrammarError`; what comes after that
    means nothing.

    Attributes:
      spent_s: CPU time that its masks have taken, as far as a `MaskPool` has measured it.
    """

    __slots__ = ("_inner", "spent_s")

    def __init__(self, inner: llguidance.LLMatcher):
        self._inner = inner
        self.spent_s = 0.0

    @property
    def num_forced_bytes(self) -> int:
        """Bytes of text that must come next."""
        return len(self._inner.compute_ff_bytes())

    @property
    def stopped(self) -> bool:
        """Whether the output is complete and nothing can be added."""
        return self._inner.is_stopped()

    @property
    def accepting(self) -> bool:
        """Whether the output is complete as it stands."""
        return self._inner.is_accepting()

    def fill(self, row: np.ndarray) -> None:
        """Writes the tokens that may come next into `row: i32[mask_width]`; a bit that is set: yes.

        Raises:
          GrammarError: nothing may, or the grammar is too complex to tell.
        """
        self._inner.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.check()
        if not row.any():
            raise GrammarError("no token of the vocabulary can continue this output")

    def accept(self, token_ids: Sequence[int]) -> None:
        """Follows the output by some tokens.

        Raises:
          GrammarError: one of them may not stand there.
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
        """How many of these tokens could follow, up to what would end the output. Changes nothing.

        The token that completes the output is left to be sampled: nothing can be drafted after it.
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
        """Takes back the last `count` tokens.

        Raises:
          GrammarError: they cannot be taken back.
        """
        if count and not self._inner.rollback(count):
            self.check()
            raise GrammarError("the output cannot be taken back")

    def check(self) -> None:
        """Raises GrammarError if it has failed, GrammarLimitError if for a limit of the parser."""
        if self._inner.is_error():
            why = reason(self._inner.get_error())
            if why.startswith("it is too complex"):
                raise GrammarLimitError(why)
            raise GrammarError("the grammar became too complex to follow for this output")


class MaskPool:
    """Fills the masks of many matchers, without holding the GIL.

    A mask mostly takes some microseconds, and to wake threads takes as long as ten of them: so the
    calling thread begins, and other threads help with what is left when it gets long. Once the
    masks of a step have taken long, the next step's are timed one by one, to know whose they are.

    Args:
      num_threads: that help.
      clock: CPU seconds of the calling thread.
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
        """Fills the rows of some matchers: each one's own, and one after each of its drafts.

        Args:
          work: (matcher, first row, drafts that `valid_drafts` has found valid).
          masks: i32[rows, mask_width], C-contiguous.

        Returns:
          The matchers that failed; their rows mean nothing.
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
        """Fills the rows of one matcher in this thread, and adds the time to what it has spent."""
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
