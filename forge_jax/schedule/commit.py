"""Commit of a step: its results are applied to its sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from forge_jax.schedule.in_flight import Dispatched
from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.live_requests import LiveRequests
from forge_jax.schedule.plan import ScheduledSequence, SequenceResult, StepPlan
from forge_jax.schedule.prefix_cache import PrefixCache
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.slots import Slots

# A sequence's gain from a step. `seq.finish_reason` is set if these were its last tokens. After a
# fault, the sequence has finished with "error" and there are no tokens.
SequenceUpdate = tuple[Sequence, SequenceResult]

_FINISHED = Status.FINISHED


class Committer:
    """The code that appends tokens, finishes sequences, and registers filled blocks.

    Rows of sequences that have finished meanwhile are discarded. A sequence that was preempted
    meanwhile still gets its token, which was sampled from a correct prefix.
    """

    def __init__(
        self,
        eos_token_ids: frozenset[int],
        requests: LiveRequests,
        slots: Slots,
        prefixes: PrefixCache,
    ):
        self._eos_token_ids = eos_token_ids
        self._block_size = slots.pool.block_size
        self._registers = slots.pool.prefix_cache
        self._requests = requests
        self._slots = slots
        self._backlog = slots.backlog
        self._prefixes = prefixes

    def commit(
        self, step: Dispatched, plan: StepPlan, results: Seq[SequenceResult]
    ) -> list[SequenceUpdate]:
        """Commit the results of a step, one for each row of its plan. See `Scheduler.commit`."""
        updates: list[SequenceUpdate] = []
        self._commit_decodes(step, plan.decodes.starts, results, updates)
        if plan.chunks:
            self._commit_rows(step, plan, results, updates)
        return updates

    def _commit_decodes(
        self,
        step: Dispatched,
        starts: Seq[int],
        results: Seq[SequenceResult],
        updates: list[SequenceUpdate],
    ) -> None:
        """Commit the first `len(starts)` rows."""
        block_size, registers = self._block_size, self._registers
        followers = self._backlog.followers
        for start, seq, epoch, got in zip(starts, step.seqs, step.epochs, results, strict=False):
            if seq.status is _FINISHED:
                continue
            seq.num_pending -= 1
            if got.fault:
                updates.append(self._fail(seq))
                continue
            if got.activations is not None:
                _take_activations(seq, got)
            end = start + 1
            if registers and end // block_size > seq.num_registered and epoch == seq.epoch:
                self._prefixes.register(seq, end // block_size, seen=True)
            if followers and end >= seq.prompt_len and epoch == seq.epoch:
                self._backlog.release_followers(seq.request_id)
            tokens = seq.tokens
            (token,) = got.token_ids
            tokens.append(token)
            if token in seq.stop_ids or len(tokens) >= seq.max_len:
                self._end(seq, token)
            updates.append((seq, got))

    def _commit_rows(
        self,
        step: Dispatched,
        plan: StepPlan,
        results: Seq[SequenceResult],
        updates: list[SequenceUpdate],
    ) -> None:
        """Commit the rows after the decodes: drafts and prefill chunks."""
        first = len(plan.decodes)
        seqs, epochs = step.seqs[first:], step.epochs[first:]
        for seq, epoch, row, got in zip(seqs, epochs, plan.chunks, results[first:], strict=True):
            if seq.status is _FINISHED:
                continue
            seq.num_pending -= row.samples
            # True if it still has the blocks that the row wrote
            holds_blocks = epoch == seq.epoch
            if got.fault and row.num_drafts:
                self._retry_without_drafts(seq, holds_blocks)
                continue
            if got.fault:
                updates.append(self._fail(seq))
                continue
            if got.activations is not None:
                _take_activations(seq, got)
            end = row.start + row.num_tokens
            if row.num_drafts:
                end = self._settle(seq, holds_blocks, row, len(got.token_ids) - 1)
            if holds_blocks:
                self._publish(seq, end, row, got)
            if row.samples and not row.scoring:
                updates.append((seq, self._accept(seq, got)))
            else:
                self._commit_prompt(seq, end, row, got, updates)

    def _settle(
        self, seq: Sequence, holds_blocks: bool, row: ScheduledSequence, num_accepted: int
    ) -> int:
        """Count accepted and rejected drafts. Return the number of computed tokens."""
        seq.num_drafted += row.num_drafts
        seq.num_accepted += num_accepted
        if holds_blocks:
            seq.settle(num_accepted)
        return row.start + 1 + num_accepted

    def _retry_without_drafts(self, seq: Sequence, holds_blocks: bool) -> None:
        """Recompute the sequence without drafts: a draft may have caused the fault."""
        seq.takes_drafts = False
        if holds_blocks:
            self._slots.preempt(seq)

    def _publish(
        self, seq: Sequence, end: int, row: ScheduledSequence, got: SequenceResult
    ) -> None:
        """Share the first `end` computed tokens with other sequences."""
        num_full = end // self._block_size
        if self._registers and num_full > seq.num_registered:
            accepted = got.token_ids[:-1]
            self._prefixes.register(seq, num_full, seen=row.num_rows > 0, more=accepted)
        if self._backlog.followers and end >= seq.prompt_len:
            self._backlog.release_followers(seq.request_id)

    def _fail(self, seq: Sequence) -> SequenceUpdate:
        self._requests.finish(seq, "error")
        return seq, SequenceResult(fault=True)

    def _accept(self, seq: Sequence, got: SequenceResult) -> SequenceResult:
        """Append sampled tokens up to the first that ends the sequence, and return those."""
        tokens, stop_ids, max_len = seq.tokens, seq.stop_ids, seq.max_len
        known = len(tokens)
        for token in got.token_ids:
            tokens.append(token)
            if (token in stop_ids or len(tokens) >= max_len) and self._end(seq, token):
                break
        accepted = len(tokens) - known
        if accepted == len(got.token_ids):
            return got
        logprobs = None if got.logprobs is None else got.logprobs[:accepted]
        activations = got.activations
        if activations is not None:
            activations = activations.part(0, len(tokens) - 1)
        return SequenceResult(
            got.token_ids[:accepted],
            False,
            logprobs,
            got.prompt_logprobs,
            activations=activations,
        )

    def _end(self, seq: Sequence, token: int) -> bool:
        """Finish the sequence if `token`, its last, is a stop token or reaches the limit."""
        params = seq.params
        if token in seq.stop_ids and seq.num_output >= params.held_tokens:
            ends = params.constrained or not params.ignore_eos
            eos = ends and token in self._eos_token_ids
            self._requests.finish(seq, "stop", None if eos else token)
        elif len(seq.tokens) >= seq.max_len:
            self._requests.finish(seq, "length")
        return seq.finished

    def _commit_prompt(
        self,
        seq: Sequence,
        end: int,
        row: ScheduledSequence,
        got: SequenceResult,
        updates: list[SequenceUpdate],
    ) -> None:
        """Commit a chunk that scores the prompt, or ends before a token is sampled."""
        seq.num_scored += len(row.targets)
        if row.samples:
            updates.append((seq, self._accept(seq, got)))
            return
        if seq.max_tokens == 0 and end >= seq.prompt_len:
            self._requests.finish(seq, "length" if seq.pooling is None else "stop")
        if seq.finished or got.prompt_logprobs or got.activations is not None:
            updates.append((seq, got))


def _take_activations(seq: Sequence, got: SequenceResult) -> None:
    """Count the positions as read. The planner has left out those that were read before."""
    assert got.activations is not None
    assert got.activations.start == seq.num_returned, f"{seq.key}: not the next position"
    seq.num_returned = got.activations.end
