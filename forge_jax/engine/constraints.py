"""`Constraints`: the masks that grammars and token lists apply to the rows of a step.

A constrained row samples under a mask. A grammar's mask depends on all tokens before it, and the
mask of bad words on the last ones. The last token of such a sequence must therefore be on the host
before its next step. The masks of a step are filled together, in threads, without the GIL. A list
of allowed tokens alone has the same mask at each step, so it needs no token on the host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from forge_jax.errors import ForgeError, GrammarError, GrammarLimitError, RequestError
from forge_jax.grammar.masks import bits, mask_width
from forge_jax.schedule.plan import SequenceResult, StepPlan
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.scheduler import SequenceUpdate

if TYPE_CHECKING:
    from forge_jax.grammar.build import Grammar
    from forge_jax.grammar.matcher import MaskPool, Matcher
    from forge_jax.grammar.token_filter import Follower, TokenFilter

MAX_THREADS = 8
MASK_BURST_S, MASK_S = 0.5, 0.01  # CPU time per request: initial allowance, and per mask
MANY = 3  # threshold of `hold_up`: one constrained sequence in three


@dataclass(slots=True, weakref_slot=True)
class _Charge:
    """The CPU time that the masks of a request have taken, over all of its samples."""

    spent_s: float = 0.0
    masks: int = 0

    @property
    def over(self) -> bool:
        """True if it exceeds the limit for one request."""
        return self.spent_s > MASK_BURST_S + MASK_S * self.masks


@dataclass(frozen=True, slots=True)
class _Held:
    """The constraints of one sequence: a grammar, token lists, or both."""

    grammar: Grammar | None
    tokens: TokenFilter | None
    matcher: Matcher | None
    follower: Follower | None
    charge: _Charge
    # The mask that the device applies for min_tokens, or None.
    not_stops: np.ndarray | None = None

    @property
    def stopped(self) -> bool:
        """True if the output is complete and no token may follow."""
        return self.matcher is not None and self.matcher.stopped

    def accept(self, token_ids: Seq[int]) -> None:
        """Advance by output tokens.

        Raises:
          GrammarError: if a token is not allowed.
        """
        if self.follower is not None:
            self.follower.accept(token_ids)
        if self.matcher is not None:
            self.matcher.accept(token_ids)

    def valid_drafts(self, token_ids: Seq[int]) -> int:
        """Return how many of these tokens could follow, up to one that would end the output."""
        valid = len(token_ids)
        if self.follower is not None:
            valid = self.follower.valid_drafts(token_ids)
        return valid if self.matcher is None else self.matcher.valid_drafts(token_ids[:valid])


class _Rows(NamedTuple):
    """A sequence's rows that sample: `first`, and one more after each draft token."""

    seq: Sequence
    held: _Held
    first: int
    num_output: int  # output tokens before the first row
    drafts: tuple[int, ...] = ()


class Constraints:
    """The constraints of all live sequences, owned by one thread.

    Args:
      vocab_size: the model's output width.
      end_ids: the tokens that end an output.
      clock: CPU seconds of the calling thread, to charge requests for their masks.
    """

    def __init__(
        self,
        vocab_size: int,
        end_ids: Collection[int],
        *,
        clock: Callable[[], float] = time.thread_time,
    ):
        self.clock = clock
        self.held: dict[Sequence, _Held] = {}  # the constrained sequences
        self._charges: WeakValueDictionary[str, _Charge] = WeakValueDictionary()  # by request id
        # Sequences that `follow_early` has advanced, with its error.
        self._followed: dict[Sequence, GrammarError | None] = {}
        self._dead_ends: dict[Sequence, RequestError] = {}  # after drafts of the step in flight
        self._words = mask_width(vocab_size)
        self._vocab_size = vocab_size
        self._not_ends = self._all_but(end_ids)

    def _all_but(self, token_ids: Iterable[int]) -> np.ndarray:
        return ~bits([i for i in token_ids if i < self._vocab_size], self._vocab_size)

    @cached_property
    def _pool(self) -> MaskPool:
        from forge_jax.grammar.matcher import MaskPool

        return MaskPool(min(os.cpu_count() or 1, MAX_THREADS), clock=self.clock)

    def __bool__(self) -> bool:
        """Return True if any sequence has a constraint."""
        return bool(self.held)

    def add(self, seq: Sequence, grammar: Grammar | None, tokens: TokenFilter | None) -> bool:
        """Add a sequence and advance past its existing output. Return False if that is complete.

        Raises:
          GrammarError: if its constraints do not allow the output.
        """
        held = _Held(
            grammar,
            tokens,
            None if grammar is None else grammar.matcher(),
            None if tokens is None else tokens.follower(),
            self._charges.setdefault(seq.request_id, _Charge()),
            self._all_but(seq.stop_ids) if seq.params.held_tokens else None,
        )
        if seq.num_output:
            held.accept(seq.tokens[seq.prompt_len :])
        if held.stopped:
            return False
        self.held[seq] = held
        return True

    def of(self, seq: Sequence) -> tuple[Grammar | None, TokenFilter | None]:
        """Return the grammar and token lists that a live sequence was added with."""
        held = self.held.get(seq)
        return (None, None) if held is None else (held.grammar, held.tokens)

    def end(self, seq: Sequence) -> None:
        """Drop a sequence that has ended. It need not have a constraint."""
        for known in (self.held, self._followed, self._dead_ends):
            known.pop(seq, None)

    def waits(self, seqs: Seq[Sequence]) -> bool:
        """Return True if the step in flight, of `seqs`, should be read before the next is planned.

        Sequences that need their last token on the host cannot be in the next step before it is
        read. If they are few, the others go ahead. The masks are then filled while the device is
        busy, and the constrained sequences follow in the step after. If they are many, half-empty
        steps cost more than waiting.

        There are C constrained and F free sequences. A step takes s seconds, and the host keeps the
        device waiting for g seconds. Waiting gives more tokens per second if s / g > 1 + 2 F / C.
        The measured s / g is 4 or more.
        """
        return self.hold_up([seq for seq in seqs if seq.num_pending > 0], len(seqs))

    def hold_up(self, seqs: Seq[Sequence], of: int | None = None) -> bool:
        """Return True if a third of `of` sequences (default: `len(seqs)`) wait for the host."""
        blocked = sum(seq.needs_host_token and seq in self.held for seq in seqs)
        return blocked > 0 and blocked * MANY >= (len(seqs) if of is None else of)

    def cut(self, drafts: Mapping[Sequence, tuple[int, ...]]) -> dict[Sequence, tuple[int, ...]]:
        """Truncate each draft at its first invalid token, and omit empty ones."""
        kept: dict[Sequence, tuple[int, ...]] = {}
        for seq, draft in drafts.items():
            held = self.held.get(seq)
            if held is not None:
                draft = draft[: held.valid_drafts(draft)]
            if draft:
                kept[seq] = draft
        return kept

    def masks(
        self, plan: StepPlan, seqs: Seq[Sequence]
    ) -> tuple[np.ndarray | None, list[tuple[Sequence, ForgeError]]]:
        """Fill the masks of a plan. Rows of sequences that fail may sample anything.

        Args:
          seqs: the plan's sequences, in its order.

        Returns:
          i32[num_rows, mask_width], or None if no row has a constraint, and the sequences that
          cannot continue, each with its error.
        """
        self._dead_ends.clear()
        rows = list(self._rows(plan, seqs))
        if not rows:
            return None, []
        masks = np.full((plan.num_rows, self._words), -1, np.int32)
        # The row of a stopped sequence is void: the sequence ended in the step before.
        rows = [row for row in rows if not row.held.stopped]
        failed: dict[Sequence, ForgeError] = {**self._fill_by_grammars(rows, masks)}
        for row in rows:
            if row.seq not in failed and (error := self._finish(row, masks)) is not None:
                failed[row.seq] = error
        for row in rows:
            if row.seq in failed:
                masks[row.first : row.first + len(row.drafts) + 1] = -1
        return masks, list(failed.items())

    def _rows(self, plan: StepPlan, seqs: Seq[Sequence]) -> Iterator[_Rows]:
        num_decodes = first = len(plan.decodes)
        for index, seq in enumerate(seqs[:num_decodes]):
            held = self.held.get(seq)
            if held is not None:
                yield _Rows(seq, held, index, plan.decodes.num_outputs[index])
        for seq, chunk in zip(seqs[num_decodes:], plan.chunks, strict=True):
            first += chunk.num_rows
            held = self.held.get(seq) if chunk.samples else None
            if held is not None:
                count = chunk.num_drafts
                drafts = chunk.token_ids[len(chunk.token_ids) - count :]
                yield _Rows(seq, held, first - 1 - count, chunk.num_output, drafts)

    def _fill_by_grammars(
        self, rows: list[_Rows], masks: np.ndarray
    ) -> dict[Sequence, GrammarError]:
        """Fill the rows of sequences with a grammar. Return the sequences whose grammar failed."""
        work = {row.held.matcher: row for row in rows if row.held.matcher is not None}
        if not work:
            return {}
        filled = [(matcher, row.first, row.drafts) for matcher, row in work.items()]
        failed: dict[Sequence, GrammarError] = {}
        for matcher in self._pool.fill(filled, masks):
            try:
                matcher.check()
                failed[work[matcher].seq] = GrammarError("no token can continue this output")
            except GrammarError as error:
                failed[work[matcher].seq] = error
        for matcher, row in work.items():
            charge = row.held.charge
            charge.spent_s += matcher.spent_s
            charge.masks += 1 + len(row.drafts)
            matcher.spent_s = 0.0
        for row in work.values():
            if row.held.charge.over:
                failed.setdefault(row.seq, _too_slow(row.held.charge))
        return failed

    def _finish(self, row: _Rows, masks: np.ndarray) -> RequestError | None:
        """Clear the tokens that a sequence's lists exclude, and stop tokens that come too early.

        Returns:
          The error if no token is left. After a draft the error is stored instead, because the
          draft may be rejected.
        """
        seq, follower, matcher = row.seq, row.held.follower, row.held.matcher
        if follower is None and row.held.not_stops is None and not _holds(seq, row.num_output):
            return None
        for ahead in range(len(row.drafts) + 1):
            mask = masks[row.first + ahead]
            if follower is not None:
                mask &= follower.mask(row.drafts[:ahead])
            num_output = row.num_output + ahead
            left = mask
            if matcher is not None and _holds(seq, num_output):
                left = mask & self._not_ends
                if left.any():  # otherwise the grammar is complete and overrides min_tokens
                    mask[:] = left
                left = mask
            elif row.held.not_stops is not None and num_output < seq.params.held_tokens:
                left = mask & row.held.not_stops
            if follower is not None and not left.any():
                if not ahead:
                    return _dead_end(seq, num_output)
                self._dead_ends[seq] = _dead_end(seq, num_output)
                mask[:] = -1  # if the draft is accepted, the token sampled here is invalid
        return None

    def _accept(self, held: _Held, token_ids: Seq[int]) -> None:
        begin_s = self.clock()
        try:
            held.accept(token_ids)
        finally:
            held.charge.spent_s += self.clock() - begin_s

    def follow_early(self, results: Iterable[tuple[Sequence, SequenceResult]]) -> None:
        """Advance by the results of a step of single tokens, before `follow` gets its updates."""
        for seq, got in results:
            held = self.held.get(seq)
            if held is None or got.fault or not got.token_ids:
                continue
            self._followed[seq] = None
            try:
                self._accept(held, got.token_ids)
            except GrammarError as error:
                self._followed[seq] = error

    def follow(self, updates: Iterable[SequenceUpdate]) -> list[tuple[Sequence, ForgeError | None]]:
        """Advance by the updates of a step, and drop the sequences that end with them.

        Returns:
          The sequences whose output is complete, with None, or invalid, with the error.
        """
        over: list[tuple[Sequence, ForgeError | None]] = []
        for seq, got in updates:
            held = self.held.get(seq)
            if held is None:
                continue
            error: ForgeError | None = None
            try:
                if seq not in self._followed:
                    self._accept(held, got.token_ids)
                elif (known := self._followed.pop(seq)) is not None:
                    raise known
                complete = held.stopped
                if held.matcher is not None and seq.finish_reason == "stop" and not complete:
                    raise GrammarError("the output ended before its grammar was complete")
            except GrammarError as failure:
                error, complete = self._dead_ends.get(seq, failure), True
            if complete:
                over.append((seq, error))
            if complete or seq.finished:
                del self.held[seq]
        return over


def _too_slow(charge: _Charge) -> GrammarLimitError:
    return GrammarLimitError(
        f"the grammar's token masks take too long: {charge.masks} masks took "
        f"{1e3 * charge.spent_s:.0f} ms of CPU time. The limit is {1e3 * MASK_BURST_S:.0f} ms plus "
        f"{1e3 * MASK_S:.0f} ms per mask. Simplify the grammar"
    )


def _holds(seq: Sequence, num_output: int) -> bool:
    """Return True if the output may not end yet, unless its grammar is complete."""
    return seq.params.ignore_eos or num_output < seq.params.min_tokens


def _dead_end(seq: Sequence, num_output: int) -> RequestError:
    """Return the error of an output whose constraints leave no valid next token."""
    params = seq.params
    asked = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": num_output < params.held_tokens,
        "the grammar": params.constrained,
    }
    causes = [name for name, is_asked in asked.items() if is_asked]
    return RequestError(
        f"{' and '.join(causes)} leave no token to sample after {num_output} output tokens",
        param=causes[0],
    )
