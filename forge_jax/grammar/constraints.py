"""`Constraints`: the grammars of the sequences that have one, between scheduler and device.

A row with a grammar samples under a mask, and the mask follows from all tokens before it. So the
last token of such a sequence must be on the host before its next step; then the masks of a step are
filled together, on threads, without the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq

import numpy as np

from forge_jax.errors import GrammarError
from forge_jax.grammar.build import Grammar
from forge_jax.grammar.compiler import GrammarCompiler
from forge_jax.grammar.masks import mask_width
from forge_jax.grammar.matcher import MaskPool, Matcher
from forge_jax.schedule.plan import SequenceResult, StepPlan
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.scheduler import Gain

MAX_THREADS = 8
MANY = 3  # one in so many


class Constraints:
    """A matcher for each live sequence with a grammar. One thread owns it."""

    def __init__(self, compiler: GrammarCompiler):
        self.compiler = compiler
        self._matchers: dict[Sequence, Matcher] = {}
        self._foreseen: dict[Sequence, GrammarError | None] = {}  # who has had what it will gain
        self._pool = MaskPool(min(os.cpu_count() or 1, MAX_THREADS))
        self._words = mask_width(compiler.vocab_size)
        ends = np.zeros(32 * self._words, np.uint8)
        ends[list(compiler.end_ids)] = 1
        self._not_ends = ~np.packbits(ends, bitorder="little").view(np.int32)

    def __bool__(self) -> bool:
        """Whether any sequence has a grammar."""
        return bool(self._matchers)

    def add(self, seq: Sequence, grammar: Grammar) -> bool:
        """Begins a sequence, after the output that it has; False if that is complete already.

        Raises:
          GrammarError: the output does not follow the grammar.
        """
        matcher = grammar.matcher()
        if seq.num_output:
            matcher.accept(seq.tokens[seq.prompt_len :])
        if matcher.stopped:
            return False
        self._matchers[seq] = matcher
        return True

    def end(self, seq: Sequence) -> None:
        """The sequence has ended, or never had a grammar."""
        self._matchers.pop(seq, None)
        self._foreseen.pop(seq, None)

    def waits(self, seqs: Seq[Sequence]) -> bool:
        """Whether the step in flight, which is of these, should be read before the next begins.

        Without their last tokens the sequences with grammars cannot be part of it. If they are
        few, the others go ahead, and they follow in the step after: the masks are then filled
        while the device is busy. If they are many, half-empty steps would cost more than waiting.
        With C of them beside F others, steps of s seconds and a host that keeps the device waiting
        for g, waiting gives more tokens a second where s / g > 2 F / C + 1; s / g is 4 and more.
        """
        return self.hold_up([seq for seq in seqs if seq.num_pending > 0], len(seqs))

    def hold_up(self, seqs: Seq[Sequence], of: int | None = None) -> bool:
        """Whether those with grammars among `seqs` are many of a step of so many, or of `seqs`."""
        blocked = sum(seq in self._matchers for seq in seqs)
        return blocked > 0 and blocked * MANY >= (len(seqs) if of is None else of)

    def cut(self, drafts: Mapping[Sequence, tuple[int, ...]]) -> dict[Sequence, tuple[int, ...]]:
        """The drafts, each up to what its grammar forbids; without those that have nothing left."""
        kept: dict[Sequence, tuple[int, ...]] = {}
        for seq, draft in drafts.items():
            matcher = self._matchers.get(seq)
            if matcher is not None:
                draft = draft[: matcher.valid_drafts(draft)]
            if draft:
                kept[seq] = draft
        return kept

    def masks(
        self, plan: StepPlan, seqs: Seq[Sequence]
    ) -> tuple[np.ndarray | None, list[Sequence]]:
        """The masks of a plan, and whose could not be told: their rows may sample anything.

        Args:
          seqs: of the plan, in its order.

        Returns:
          i32[num_rows, mask_width], or None if no row has a grammar.
        """
        work: list[tuple[Matcher, int, tuple[int, ...]]] = []
        owners: dict[Matcher, Sequence] = {}
        held: list[int] = []  # rows that must not end yet
        num_decodes = row = len(plan.decodes)
        for index, seq in enumerate(seqs[:num_decodes]):
            matcher = self._matchers.get(seq)
            if matcher is not None:
                owners[matcher] = seq
                if matcher.stopped:  # by the step before: this row is burnt
                    continue
                work.append((matcher, index, ()))
                if _holds(seq, plan.decodes.num_outputs[index]):
                    held.append(index)
        for seq, chunk in zip(seqs[num_decodes:], plan.chunks, strict=True):
            matcher = self._matchers.get(seq) if chunk.samples else None
            if matcher is not None:
                owners[matcher] = seq
                drafts = chunk.token_ids[len(chunk.token_ids) - chunk.num_drafts :]
                first = row + chunk.num_rows - 1 - chunk.num_drafts
                work.append((matcher, first, drafts))
                for ahead in range(chunk.num_drafts + 1):
                    if _holds(seq, chunk.num_output + ahead):
                        held.append(first + ahead)
            row += chunk.num_rows
        if not owners:
            return None, []
        masks = np.full((row, self._words), -1, np.int32)
        failed = [owners[matcher] for matcher in self._pool.fill(work, masks)]
        for index in held:
            kept = masks[index] & self._not_ends
            if kept.any():  # else it is complete: the grammar has the last word
                masks[index] = kept
        if failed:
            for matcher, first, drafts in work:
                if owners[matcher] in failed:
                    masks[first : first + len(drafts) + 1] = -1
        return masks, failed

    def foresee(self, results: Iterable[tuple[Sequence, SequenceResult]]) -> None:
        """Takes the results of a step of single tokens, ahead of the same gains for `follow`."""
        for seq, got in results:
            matcher = self._matchers.get(seq)
            if matcher is None or got.fault or not got.token_ids:
                continue
            self._foreseen[seq] = None
            try:
                matcher.accept(got.token_ids)
            except GrammarError as error:
                self._foreseen[seq] = error

    def follow(self, gains: Iterable[Gain]) -> list[tuple[Sequence, GrammarError | None]]:
        """Takes what sequences have gained; those that end by it, and those that fail, are gone.

        Returns:
          Whose output is complete, with None, and whose breaks its grammar, with why.
        """
        over: list[tuple[Sequence, GrammarError | None]] = []
        for seq, got in gains:
            matcher = self._matchers.get(seq)
            if matcher is None:
                continue
            error = None
            try:
                if seq not in self._foreseen:
                    matcher.accept(got.token_ids)
                elif (known := self._foreseen.pop(seq)) is not None:
                    raise known
                complete = matcher.stopped
                if seq.finish_reason == "stop" and not complete:
                    raise GrammarError("the output ended before its grammar did")
            except GrammarError as failure:
                error, complete = failure, True
            if complete:
                over.append((seq, error))
            if complete or seq.finished:
                del self._matchers[seq]
        return over


def _holds(seq: Sequence, num_output: int) -> bool:
    """Whether the output may not end yet, as far as its grammar lets it go on."""
    return seq.params.ignore_eos or num_output < seq.params.min_tokens
