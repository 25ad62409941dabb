"""`Constraints`: the masks that grammars and token lists apply to the rows of a step.

A constrained row samples under a mask. The mask of a grammar depends on all tokens before it, and
the mask of bad words on the last ones. So the last token of such a sequence must be on the host
before its next step. The masks of a step are filled together, in threads, without the GIL. A list
of allowed tokens alone has the same mask at each step, and waits for nothing.
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
MASK_BURST_S, MASK_S = 0.5, 0.01  # CPU time of a request's masks: at once, and for each mask
MANY = 3  # one in so many


@dataclass(slots=True, weakref_slot=True)
class _Charge:
    """The CPU time that the masks of a request have taken, for all of its samples together."""

    spent_s: float = 0.0  # CPU time
    masks: int = 0

    @property
    def over(self) -> bool:
        """True if it is more than one request may cost."""
        return self.spent_s > MASK_BURST_S + MASK_S * self.masks


@dataclass(frozen=True, slots=True)
class _Held:
    """The constraints of one sequence: a grammar, token lists, or both."""

    matcher: Matcher | None
    follower: Follower | None
    charge: _Charge
    not_stops: np.ndarray | None = None  # the mask of min_tokens, if the step applies one

    @property
    def stopped(self) -> bool:
        """True if the output is complete and nothing can be added."""
        return self.matcher is not None and self.matcher.stopped

    def accept(self, token_ids: Seq[int]) -> None:
        """Follow the output by some tokens.

        Raises:
          GrammarError: one of them is not allowed there.
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
    """The rows of one sequence that sample: `first`, and one more after each draft."""

    seq: Sequence
    held: _Held
    first: int
    num_output: int  # before the first
    drafts: tuple[int, ...] = ()


class Constraints:
    """The constraints of all live sequences. One thread owns it.

    Args:
      vocab_size: the model's output width.
      end_ids: the tokens that end an output.
      clock: CPU seconds of the calling thread, charged to requests for their masks.
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
        self._followed: dict[Sequence, GrammarError | None] = {}  # their next update is known
        self._dead_ends: dict[Sequence, RequestError] = {}  # behind drafts of the step in flight
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
        """True if any sequence has a constraint."""
        return bool(self.held)

    def add(self, seq: Sequence, grammar: Grammar | None, tokens: TokenFilter | None) -> bool:
        """Begin a sequence after the output that it has; return False if that is complete.

        Raises:
          GrammarError: its constraints do not allow the output.
        """
        held = _Held(
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

    def end(self, seq: Sequence) -> None:
        """Drop a sequence that has ended, whether it has a constraint or not."""
        for known in (self.held, self._followed, self._dead_ends):
            known.pop(seq, None)

    def waits(self, seqs: Seq[Sequence]) -> bool:
        """True if the step in flight, which is of `seqs`, should be read before the next begins.

        Sequences that need their last token on the host cannot be in the next step before that. If
        they are few, the others go ahead, and the masks are filled while the device is busy: they
        follow in the step after. If they are many, half-empty steps cost more than waiting. With C
        of them beside F others, steps of s seconds and a host that keeps the device waiting for g,
        waiting gives more tokens per second if s / g > 2 F / C + 1; s / g is 4 and more.
        """
        return self.hold_up([seq for seq in seqs if seq.num_pending > 0], len(seqs))

    def hold_up(self, seqs: Seq[Sequence], of: int | None = None) -> bool:
        """True if sequences that need the host are a third of a step of `of`, or of `seqs`."""
        blocked = sum(seq.needs_host_token and seq in self.held for seq in seqs)
        return blocked > 0 and blocked * MANY >= (len(seqs) if of is None else of)

    def cut(self, drafts: Mapping[Sequence, tuple[int, ...]]) -> dict[Sequence, tuple[int, ...]]:
        """Return the drafts, each cut at its first invalid token, without empty ones."""
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
          seqs: of the plan, in its order.

        Returns:
          i32[num_rows, mask_width], or None if no row has a constraint; and the sequences that
          cannot go on, each with its error.
        """
        self._dead_ends.clear()
        rows = list(self._rows(plan, seqs))
        if not rows:
            return None, []
        masks = np.full((plan.num_rows, self._words), -1, np.int32)
        rows = [row for row in rows if not row.held.stopped]  # else void: it ended the step before
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
        """Fill the rows of sequences with a grammar; return the sequences whose grammar failed."""
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
          The error if no token is left. Behind a draft it is kept instead: the draft may be wrong.
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
                if left.any():  # else it is complete: the grammar has the last word
                    mask[:] = left
                left = mask
            elif row.held.not_stops is not None and num_output < seq.params.held_tokens:
                left = mask & row.held.not_stops
            if follower is not None and not left.any():
                if not ahead:
                    return _dead_end(seq, num_output)
                self._dead_ends[seq] = _dead_end(seq, num_output)
                mask[:] = -1  # if the draft is right, the token is not valid
        return None

    def _accept(self, held: _Held, token_ids: Seq[int]) -> None:
        begin_s = self.clock()
        try:
            held.accept(token_ids)
        finally:
            held.charge.spent_s += self.clock() - begin_s

    def follow_early(self, results: Iterable[tuple[Sequence, SequenceResult]]) -> None:
        """Follow the results of a step of single tokens before `follow` gets its updates."""
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
        """Follow the updates of a step, and drop the sequences that end with them.

        Returns:
          Sequences whose output is complete, with None, or not allowed, with the error.
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
                    raise GrammarError("the output ended before its grammar did")
            except GrammarError as failure:
                error, complete = self._dead_ends.get(seq, failure), True
            if complete:
                over.append((seq, error))
            if complete or seq.finished:
                del self.held[seq]
        return over


def _too_slow(charge: _Charge) -> GrammarLimitError:
    return GrammarLimitError(
        f"the grammar takes too long to follow: {charge.masks} masks took "
        f"{1e3 * charge.spent_s:.0f} ms of CPU time, at most {1e3 * MASK_BURST_S:.0f} ms and "
        f"{1e3 * MASK_S:.0f} ms for each mask: send a simpler one"
    )


def _holds(seq: Sequence, num_output: int) -> bool:
    """True if the output may not end yet, unless its grammar is complete."""
    return seq.params.ignore_eos or num_output < seq.params.min_tokens


def _dead_end(seq: Sequence, num_output: int) -> RequestError:
    """Return the error of an output with no valid next token: its constraints contradict."""
    params = seq.params
    asked = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words),
        "min_tokens": num_output < params.held_tokens,
        "the grammar": params.constrained,
    }
    causes = [name for name, is_asked in asked.items() if is_asked]
    return RequestError(
        f"{' and '.join(causes)} leave no token that may come after {num_output} of the output",
        param=causes[0],
    )
