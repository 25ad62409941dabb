"""Decides what each step computes: which sequences run, how many tokens of each, in which blocks.

There are no prefill and decode phases. A sequence has tokens that exist and tokens whose KV has
been computed; a step computes some of the difference. The caller runs one step ahead:

    plan = scheduler.schedule()          # from counts: the last token may not have been read yet
    pending = device.dispatch(plan)
    result = device.read(the step before)
    gains = scheduler.commit(the plan before, result)

Two things make that safe. The device executes steps in order, so that a slot or a block which a
finished sequence gives back can be given out again at once, even while a step that uses it is in
flight. And a block enters the prefix cache only in `commit`, up to the tokens whose step has come
back: a row that turns out to be burnt (its sequence stopped in the step before) writes behind
them, into a block that is neither shared nor registered.

Drafts are tokens that somebody guesses a sequence will go on with. A step computes them behind the
last known token, and samples at each; `commit` learns how many were right. What was written for the
others lies behind the sequence's tokens, like a burnt row, and is written over. Until then nobody
knows the sequence's length, so it cannot be scheduled: steps with drafts are read before the next
is scheduled, or their sequences stay out of it. The same holds for a sequence with a grammar or
with bad words: which tokens may come depends on the one before.

The module knows ints only: no device, no clock and no random source of its own.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from forge_jax.config import Batching, Policy
from forge_jax.errors import RequestError
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.plan import (
    FED_BACK,
    Admission,
    Decodes,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
)
from forge_jax.schedule.policy import WaitingQueue, make_queue
from forge_jax.schedule.request import (
    FinishReason,
    Request,
    Sequence,
    Status,
    output_room,
    sequence_seed,
)
from forge_jax.schedule.token_budget import TokenBudget

_FINISHED = Status.FINISHED


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # of one step
    max_rows: int  # that get logits in one step
    max_model_len: int  # prompt and output
    prefill_chunk_size: int | None = None  # most tokens of one prompt in one step
    chunked_prefill: bool = True  # else only prompts that no step can hold are cut
    batching: Batching = "continuous"  # static: admissions only when nothing runs
    policy: Policy = "fcfs"
    pools_apart: bool = False  # requests with `pooling` get steps and cached blocks of their own
    eos_token_ids: frozenset[int] = frozenset()
    aging_s: float = 5.0  # after which a waiting request goes first, whatever its prefix

    def __post_init__(self) -> None:
        limits = (self.max_num_seqs, self.max_num_batched_tokens, self.max_rows)
        assert min(limits) > 0 and self.max_model_len > 0
        assert self.prefill_chunk_size is None or self.prefill_chunk_size > 0
        assert self.prefill_chunk_size is None or self.chunked_prefill


# What a sequence gained in a step that has been read. `seq.finish_reason` is set if these were its
# last tokens; with a fault it has been finished with "error", and there are no tokens.
SequenceUpdate = tuple[Sequence, SequenceResult]


class _InFlight(NamedTuple):
    """A step that has been scheduled and not committed."""

    step: int
    seqs: list[Sequence]  # of its rows
    epochs: list[int]  # theirs, when it was scheduled


class _Standing(NamedTuple):
    """What the plans of the same decodes have in common: nearly every plan is like the last."""

    seqs: list[Sequence]
    slots: list[int]
    keys: list[tuple[str, int]]
    salts: list[str]
    epochs: list[int]


class Scheduler:
    """Admits, schedules, preempts and finishes sequences; owns the slots and uses the block pool.

    Order. Decodes come first in every step, then the prompts of running sequences, then
    waiting sequences in the order of the policy; a decode never waits for a prompt. A waiting
    sequence that cannot be admitted is not overtaken.

    Blocks are allocated as tokens need them. When none is left, the running sequence of the last
    rank gives back all of its own and waits; it is recomputed later, from the prefix cache where
    that still has its blocks. To avoid thrash a sequence is admitted only if the blocks for all its
    known tokens are free, besides what running prompts still need and one block for each running
    sequence that can still grow. No sequence is ever admitted in a step that preempted one.

    With a `budget`, a step in which a sequence waits for its next token takes only as many prompt
    tokens as the budget allows. The order of the prompts stays the same.

    Two switches take back what that gains, to measure it. Static batching admits only when nothing
    runs. Without chunked prefill a waiting sequence that an empty step would hold is not admitted
    to a step that would cut it; one that no step can hold is cut as ever, so all are served.

    Progress. `add` refuses what does not fit the pool alone, and the first running sequence in rank
    can take blocks from every other, so it always gets its tokens, and ends.

    Args:
      config: the limits of a step; may be replaced between steps by one with the same slots.
      pool: the blocks; nobody else allocates from it.
      clock: seconds, for the aging of waiting requests.
      rng: draws the seeds of requests that have none.
      budget: the size of steps in which prompts and decodes meet; None: they are full, too.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        budget: TokenBudget | None = None,
    ):
        assert budget is None or config.chunked_prefill, "it cuts prompts"
        self.config = config
        self.pool = pool
        self.budget = budget
        self.num_preemptions = 0
        self.cached_prompt_tokens = 0  # of admitted requests: found in the prefix cache, or not
        self.computed_prompt_tokens = 0
        self._clock = clock
        self._rng = rng
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._requests: dict[str, list[Sequence]] = {}
        self._followers: dict[str, list[Sequence]] = {}  # wait for sequence 0 to fill the cache
        self._num_followers = 0
        self._only: frozenset[Sequence] | None = None  # who may be admitted; None: everybody
        self._held: list[Sequence] = []  # who may not
        self._waiting = self._make_queue()
        self._running: list[Sequence] = []  # by rank
        self._orders = itertools.count()
        self._steps = itertools.count()
        self._in_flight: deque[_InFlight] = deque()  # oldest first
        self._last_step = -1  # dispatched
        self._standing: _Standing | None = None  # as long as nobody got or lost a slot
        self._last_read = -1
        self._pools_next = False  # with `pools_apart`: whose turn it is

    # ---- requests ------------------------------------------------------------------------------

    def check(self, request: Request) -> int:
        """Refuses what can never be served; returns how many tokens each output may have.

        Depends on the configuration only: any thread may call it.

        Raises:
          ContextLengthError: it can never fit the context or the KV cache.
          RequestError: the prompt is empty.
        """
        kv_tokens = self.pool.num_blocks * self.pool.block_size
        return output_room(request, self.config.max_model_len, kv_tokens)

    def add(self, request: Request) -> list[Sequence]:
        """Queues a request: one sequence for each of its `params.n` samples, or of its `outputs`.

        Raises:
          ContextLengthError: it can never fit the context or the KV cache.
          RequestError: the id is in use, or the prompt is empty.
        """
        max_tokens = self.check(request)
        params = request.params
        prompt_len = len(request.prompt_token_ids)
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use", param="request_id")
        outputs = request.outputs
        if outputs is None:
            outputs = {index: () for index in range(params.n)}
        seed = request.seed if request.seed is not None else params.seed
        if seed is None:
            seed = self._rng.getrandbits(64)
        ends = params.constrained or not params.ignore_eos  # a grammar says where its end may be
        stop_ids = self.config.eos_token_ids if ends else frozenset()
        if params.stop_token_ids and not params.constrained:
            stop_ids = stop_ids.union(params.stop_token_ids)  # else one object for all sequences
        now_s = self._clock()
        seqs = [
            Sequence(
                request=request,
                index=index,
                seed=sequence_seed(seed, index),
                stop_ids=stop_ids,
                max_tokens=max_tokens,
                tokens=[*request.prompt_token_ids, *output],
                max_blocks=self._num_blocks(max(prompt_len, prompt_len + max_tokens - 1)),
                scores_prompt=params.prompt_logprobs is not None and index == 0,
                # The scores of a prompt come before its first output.
                num_scored=prompt_len if output else 0,
                order=next(self._orders),
                queued_s=now_s,
            )
            for index, output in outputs.items()
        ]
        if self.config.pools_apart and request.pooling is not None:
            for seq in seqs:
                seq.salt += "\0pooling"  # other executables have written its blocks
        self._requests[request.request_id] = seqs
        self._queue(seqs[0])
        shares_blocks = self.pool.prefix_cache and (prompt_len - 1) // self.pool.block_size
        # A static batch takes all samples at once: who waited would come into the batch after it.
        if len(seqs) > 1 and shares_blocks and self.config.batching == "continuous":
            self._followers[request.request_id] = seqs[1:]
            self._num_followers += len(seqs) - 1
        else:
            for seq in seqs[1:]:
                self._queue(seq)
        return list(seqs)

    def abort(self, request_id: str) -> list[Sequence]:
        """Ends what is left of a request with "abort"; returns the sequences that this ended.

        Slots and blocks are free at once; results that are still in flight are dropped. An unknown
        id, or one that has finished, is no error: the two may cross on their way.
        """
        live = [seq for seq in self._requests.get(request_id, ()) if not seq.finished]
        for seq in live:
            self._finish(seq, "abort", None)
        return live

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Ends one sequence, for a reason that only the caller can see (a stop string).

        A sequence that has just finished by itself (the stop string ended in its very last token)
        only takes the new reason.
        """
        if seq.finished:
            seq.finish_reason, seq.stop_reason = reason, stop_reason
        else:
            self._finish(seq, reason, stop_reason)

    def request_ids(self) -> list[str]:
        """The unfinished requests, in order of arrival."""
        return list(self._requests)

    def requests(self) -> list[Request]:
        """The unfinished requests themselves, likewise."""
        return [seqs[0].request for seqs in self._requests.values()]

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._num_followers + len(self._held)

    @property
    def num_deferred(self) -> int:
        """Those of `num_waiting` that wait for another sequence, and not for room."""
        return self._num_followers + len(self._held)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def token_budget(self) -> int:
        """Tokens of the latest step that could take prompts, at most; any thread may ask."""
        latest = None if self.budget is None else self.budget.latest
        return self.config.max_num_batched_tokens if latest is None else latest

    @property
    def running(self) -> Seq[Sequence]:
        """Who has a slot, by rank; not to be changed."""
        return self._running

    def waiting(self) -> Iterator[Sequence]:
        """Who has no slot and is not finished, by arrival."""
        for seqs in self._requests.values():
            for seq in seqs:
                if seq.status is Status.WAITING:
                    yield seq

    @property
    def num_in_flight(self) -> int:
        """Steps that have been scheduled and not committed."""
        return len(self._in_flight)

    # ---- scheduling ----------------------------------------------------------------------------

    def verifiable(self) -> list[Sequence]:
        """Sequences whose next step could verify drafts, by rank.

        All of their tokens have been read, the last is all that has to be computed, and there is
        room for an output token after the next.
        """
        return [
            seq
            for seq in self._running
            if not seq.num_pending
            and len(seq.tokens) == seq.num_computed + 1 < seq.max_len - 1
            and seq.takes_drafts
        ]

    def schedule(
        self, drafts: Mapping[Sequence, Seq[int]] | None = None, *, masks_late: bool = False
    ) -> StepPlan | None:
        """The next step, to be dispatched before anything else is asked of this scheduler.

        None if nothing can run before a step in flight is committed, or there is no work.

        Args:
          drafts: guesses for what `verifiable` sequences go on with. They get what is left of the
            step when everything else has been scheduled, in the order of the mapping, and only free
            blocks: never one that is reserved, let alone another's.
          masks_late: the caller reads what is in flight before it dispatches this step, so that
            stepwise sequences may be part of it.
        """
        if not self.config.pools_apart:
            return self._schedule(drafts, masks_late, None)
        for turn in (self._pools_next, not self._pools_next):
            plan = self._schedule(drafts, masks_late, turn)
            if plan is not None:
                self._pools_next = not turn
                return plan
        assert self._in_flight or not self._requests, "there is work, and none of it can run"
        return None

    def _schedule(  # noqa: C901, PLR0915
        self, drafts: Mapping[Sequence, Seq[int]] | None, masks_late: bool, pools: bool | None
    ) -> StepPlan | None:
        """As `schedule`: of sequences that pool, or of the others; of all if `pools` is None."""
        config, running = self.config, self._running
        block_size = self.pool.block_size
        tokens_left, rows_left = config.max_num_batched_tokens, config.max_rows
        decodes: list[Sequence] = []
        chunks: list[tuple[Sequence, int, int]] = []  # sequence, tokens, rows
        new_blocks: dict[Sequence, tuple[tuple[int, int], ...]] = {}  # of the chunks
        grown: list[tuple[int, int, int]] = []  # of the decodes: row, index, block
        preemptions_before = self.num_preemptions

        # Preemption takes from the end of `running`, where this loop has not been: what is taken is
        # never in `decodes`, and the loop ends at the shortened end.
        prompts: list[Sequence] = []
        awaited = False  # whether somebody waits for its next token
        for seq in () if pools else running:  # what pools never decodes
            known, computed = len(seq.tokens) + seq.num_pending, seq.num_computed
            if known != computed + 1 or known >= seq.max_len:
                if (known < seq.max_len or computed < seq.prompt_len) and not seq.num_verifying:
                    prompts.append(seq)
                continue  # or its last tokens have been sampled and only need to be read
            awaited = True
            if seq.needs_host_token and seq.num_pending and not masks_late:
                continue
            if not tokens_left or not rows_left:
                continue
            if not computed % block_size:  # else its last block has room
                added = self._grow(seq, known)
                if added is None:
                    continue
                for index, block in added:
                    grown.append((len(decodes), index, block))
            decodes.append(seq)
            tokens_left -= 1
            rows_left -= 1

        if pools:
            unfinished = (seq for seq in running if seq.num_computed < seq.prompt_len)
            prompts = [seq for seq in unfinished if seq.pooling is not None]
        elif pools is not None:
            prompts = [seq for seq in prompts if seq.pooling is None]
        held_back = 0  # tokens that prompts may not have
        if self.budget is not None and (prompts or len(self._waiting)):
            num_drafts = sum(map(len, drafts.values())) if drafts else 0
            held_back = self._held_back(len(decodes) + num_drafts, tokens_left, awaited)
            tokens_left -= held_back
        for seq in prompts:
            if not tokens_left:
                break
            if seq.status is not Status.RUNNING:
                continue  # preempted by one before it
            num_tokens, num_rows = self._chunk(seq, seq.num_computed, tokens_left, rows_left)
            if not num_tokens:
                continue
            num_running = len(running)
            added = self._grow(seq, seq.num_computed + num_tokens)
            if len(running) < num_running:
                # The preempted ones may have a row already: decodes stand by rank, as `running`.
                while decodes and decodes[-1].status is not Status.RUNNING:
                    decodes.pop()
                    tokens_left += 1
                    rows_left += 1
                while grown and grown[-1][0] >= len(decodes):
                    grown.pop()
            if added is None:
                continue
            new_blocks[seq] = added
            chunks.append((seq, num_tokens, num_rows))
            tokens_left -= num_tokens
            rows_left -= num_rows

        admissions: list[Admission] = []
        may_admit = self.num_preemptions == preemptions_before and (
            config.batching == "continuous" or not running
        )
        if may_admit and tokens_left and self._free_slots and len(self._waiting):
            reserved = self._reserved_blocks()
            # Everybody needs a block; a queue that is not asked need not be put in order.
            hopeful = reserved < self.pool.num_free
            for seq in self._waiting.in_order(self._clock()) if hopeful else ():
                if not self._free_slots or not tokens_left:
                    break
                if pools is not None and (seq.pooling is not None) != pools:
                    break  # its turn comes, and nobody overtakes it
                admitted = self._admit(seq, tokens_left, rows_left, reserved)
                if admitted is None:
                    break
                num_tokens, num_rows = admitted
                chunks.append((seq, num_tokens, num_rows))
                tokens_left -= num_tokens
                rows_left -= num_rows
                needed = self._num_blocks(len(seq.tokens))
                reserved += needed - len(seq.blocks) + (needed < seq.max_blocks)
                admissions.append(self._admission(seq))

        if not decodes and not chunks:
            assert self._in_flight or not self._requests or pools is not None, (
                "there is work, and none of it can run"
            )
            return None
        verified: dict[Sequence, ScheduledSequence] = {}
        tokens_left += held_back
        if drafts and decodes and tokens_left and rows_left:
            room = min(tokens_left, rows_left)
            decodes, grown, verified = self._verify(drafts, decodes, grown, room)
        return self._plan(decodes, grown, verified, chunks, new_blocks, admissions)

    def _held_back(self, num_decodes: int, tokens_left: int, awaited: bool) -> int:
        """How many of the tokens that are left must not go to prompts; never all of them."""
        assert self.budget is not None
        most = self.config.max_num_batched_tokens
        size = self.budget.choose(max(num_decodes, 1) if awaited else 0, most)
        return 0 if size == most else max(tokens_left - max(size - num_decodes, 1), 0)

    def _verify(
        self,
        drafts: Mapping[Sequence, Seq[int]],
        decodes: list[Sequence],
        grown: list[tuple[int, int, int]],
        room: int,
    ) -> tuple[list[Sequence], list[tuple[int, int, int]], dict[Sequence, ScheduledSequence]]:
        """Has some of the decodes verify drafts, at most `room` of them together.

        Returns the decodes that are left with their new blocks, and the rows of the others.
        """
        row_of = {seq: row for row, seq in enumerate(decodes)}
        blocks_of = {row: ((index, block),) for row, index, block in grown}
        verified: dict[Sequence, ScheduledSequence] = {}
        for seq, guesses in drafts.items():
            row = row_of.get(seq)
            count = min(len(guesses), room, seq.max_len - len(seq.tokens) - 1)
            if row is None or seq.num_pending or count < 1:
                continue
            computed = len(seq.tokens)
            missing = self._num_blocks(computed + count) - len(seq.blocks)
            added: tuple[tuple[int, int], ...] = ()
            if missing > 0 and self.pool.num_free >= missing + self._reserved_blocks():
                added = self._grow(seq, computed + count) or ()
            count = min(count, len(seq.blocks) * self.pool.block_size - computed)
            if count < 1:
                continue
            assert seq.slot is not None
            verified[seq] = ScheduledSequence(
                slot=seq.slot,
                start=seq.num_computed,
                token_ids=(seq.tokens[-1], *guesses[:count]),
                num_rows=1 + count,
                samples=True,
                new_blocks=(*blocks_of.get(row, ()), *added),
                num_output=seq.num_output,
                seq_key=seq.key,
                salt=seq.salt,
            )
            room -= count
            if not room:
                break
        rest = [seq for seq in decodes if seq not in verified]
        row_of = {seq: row for row, seq in enumerate(rest)}
        grown = [
            (row_of[decodes[row]], index, block)
            for row, index, block in grown
            if decodes[row] in row_of
        ]
        return rest, grown, verified

    def _chunk(
        self, seq: Sequence, start: int, tokens_left: int, rows_left: int
    ) -> tuple[int, int]:
        """How many tokens to compute from `start` on, and how many of them get logits."""
        known = len(seq.tokens)
        num_tokens = min(known - start, tokens_left)
        if self.config.prefill_chunk_size is not None:
            num_tokens = min(num_tokens, self.config.prefill_chunk_size)
        if self._is_scoring(seq):
            # A row for each token that has not been scored; what was scored before a preemption
            # is only recomputed.
            scored = max(seq.num_scored - start, 0)
            num_tokens = min(num_tokens, scored + rows_left)
            return num_tokens, max(num_tokens - scored, 0)
        if start + num_tokens < known:
            return num_tokens, 0
        if not rows_left:
            return num_tokens - 1, 0
        return num_tokens, 1

    def _is_cut_needlessly(self, seq: Sequence, start: int, num_tokens: int) -> bool:
        """Whether an empty step would hold the rest of the tokens, and this one does not."""
        rest = len(seq.tokens) - start
        if num_tokens == rest:
            return False
        config = self.config
        return self._chunk(seq, start, config.max_num_batched_tokens, config.max_rows)[0] == rest

    def _grow(self, seq: Sequence, num_tokens: int) -> tuple[tuple[int, int], ...] | None:
        """Gives `seq` the blocks for its first `num_tokens`, preempting if it must.

        Returns the new (index, block) pairs; None if the sequence itself had to give way.
        """
        held = len(seq.blocks)
        missing = self._num_blocks(num_tokens) - held
        if missing <= 0:
            return ()
        while (blocks := self.pool.allocate(missing)) is None:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return None
        seq.blocks += blocks
        return tuple(enumerate(blocks, held))

    def _preempt(self, seq: Sequence) -> None:
        """Back to the queue with all its tokens; those in flight are still valid and still come."""
        self._unschedule(seq)
        seq.status = Status.WAITING
        seq.num_preemptions += 1
        seq.resume_after = self._last_step
        self.num_preemptions += 1
        self._queue(seq)

    def _admit(
        self, seq: Sequence, tokens_left: int, rows_left: int, reserved: int
    ) -> tuple[int, int] | None:
        """Gives a waiting sequence a slot and the blocks of its first chunk: (tokens, rows).

        None if that cannot be now: the blocks are not there, or its tokens are not all read.
        """
        if seq.resume_after > self._last_read:
            return None
        pool = self.pool
        hit = pool.match(self._hashes(seq, self._cacheable_blocks(seq)))
        start = len(hit) * pool.block_size
        num_tokens, num_rows = self._chunk(seq, start, tokens_left, rows_left)
        if not num_tokens:
            return None
        if not self.config.chunked_prefill and self._is_cut_needlessly(seq, start, num_tokens):
            return None
        missing = self._num_blocks(len(seq.tokens)) - len(hit)
        if missing + reserved > pool.num_free - pool.num_unreferenced(hit):
            return None
        pool.acquire_cached(hit)
        pool.record_lookup(len(seq.tokens), start)
        blocks = pool.allocate(self._num_blocks(start + num_tokens) - len(hit))
        assert blocks is not None
        if seq.epoch == 0:
            seq.num_cached = start
            seq.queue_s = max(self._clock() - seq.queued_s, 0.0)
            if self._requests[seq.request_id][0] is seq:  # a prompt counts once, whatever n is
                cached = min(start, seq.prompt_len)
                self.cached_prompt_tokens += cached
                self.computed_prompt_tokens += seq.prompt_len - cached
        seq.blocks = hit + blocks
        seq.num_computed = start
        seq.num_registered = len(hit)
        seq.slot = self._free_slots.pop()
        seq.status = Status.RUNNING
        self._standing = None
        self._waiting.remove(seq)
        insort(self._running, seq, key=self._waiting.rank)
        return num_tokens, num_rows

    def _reserved_blocks(self) -> int:
        """Free blocks that running sequences need soon: the rest of a prompt, and one to grow."""
        reserved, block_size = 0, self.pool.block_size
        for seq in self._running:
            held, most = len(seq.blocks), seq.max_blocks
            if held < most:
                needed = -(-(len(seq.tokens) + seq.num_pending) // block_size)
                if needed > held:
                    reserved += needed - held
                    held = needed
                reserved += held < most
        return reserved

    def _plan(
        self,
        decodes: list[Sequence],
        grown: list[tuple[int, int, int]],
        verified: dict[Sequence, ScheduledSequence],
        chunks: list[tuple[Sequence, int, int]],
        new_blocks: dict[Sequence, tuple[tuple[int, int], ...]],
        admissions: list[Admission],
    ) -> StepPlan:
        """Writes the decision down, and counts its tokens as computed and sampled."""
        seqs, standing = decodes, self._standing_of(decodes)
        epochs, columns = standing.epochs, self._decodes(standing, grown)
        for seq in decodes:
            seq.num_computed += 1
            seq.num_pending += 1
        rows: list[ScheduledSequence] = []
        if chunks or verified:
            others = {
                seq: self._chunk_row(seq, num_tokens, num_rows, new_blocks.get(seq, ()))
                for seq, num_tokens, num_rows in chunks
            }
            for seq, row in verified.items():
                seq.num_computed += row.num_rows
                seq.num_verifying = row.num_drafts
                seq.num_pending += 1
            # Single tokens first, as the decodes; drafts before prompts. The sort is stable.
            others = verified | others
            ordered = sorted(others, key=lambda seq: others[seq].num_tokens > 1)
            rows = [others[seq] for seq in ordered]
            seqs = decodes + ordered
            epochs = [seq.epoch for seq in seqs]
        self._last_step = next(self._steps)
        self._in_flight.append(_InFlight(self._last_step, seqs, epochs))
        return StepPlan(self._last_step, tuple(admissions), tuple(rows), columns)

    def _standing_of(self, seqs: list[Sequence]) -> _Standing:
        standing = self._standing
        if standing is None or standing.seqs != seqs:
            standing = self._standing = _Standing(
                seqs,
                [seq.slot for seq in seqs],  # type: ignore[misc]
                [seq.key for seq in seqs],
                [seq.salt for seq in seqs],
                [seq.epoch for seq in seqs],
            )
        return standing

    def _decodes(self, standing: _Standing, grown: list[tuple[int, int, int]]) -> Decodes:
        seqs = standing.seqs
        return Decodes(
            slots=standing.slots,
            starts=[seq.num_computed for seq in seqs],
            tokens=[FED_BACK if seq.num_pending else seq.tokens[-1] for seq in seqs],
            num_outputs=[seq.num_computed + 1 - seq.prompt_len for seq in seqs],
            new_blocks=grown,
            seq_keys=standing.keys,
            salts=standing.salts,
        )

    def _chunk_row(
        self,
        seq: Sequence,
        num_tokens: int,
        num_rows: int,
        new_blocks: tuple[tuple[int, int], ...],
    ) -> ScheduledSequence:
        assert seq.slot is not None
        start, end = seq.num_computed, seq.num_computed + num_tokens
        samples = end == len(seq.tokens) and seq.max_tokens > 0
        targets: tuple[int, ...] = ()
        if num_rows and self._is_scoring(seq):
            targets = tuple(seq.tokens[end - num_rows + 1 : end + 1])
        seq.num_computed = end
        seq.num_pending += samples
        return ScheduledSequence(
            slot=seq.slot,
            start=start,
            token_ids=tuple(seq.tokens[start:end]),
            num_rows=num_rows,
            samples=samples,
            new_blocks=new_blocks,
            num_output=len(seq.tokens) - seq.prompt_len,
            scoring=bool(targets),
            targets=targets,
            seq_key=seq.key,
            salt=seq.salt,
            pooling=seq.pooling,
        )

    def _admission(self, seq: Sequence) -> Admission:
        assert seq.slot is not None
        prompt = seq.request.prompt_token_ids
        return Admission(
            slot=seq.slot,
            seed=seq.seed,
            params=seq.params,
            stop_ids=tuple(seq.stop_ids),
            prompt_len=seq.prompt_len,
            block_table=tuple(seq.blocks),
            tokens=tuple(seq.tokens) if seq.num_output else prompt,
            seq_key=seq.key,
            lora=0 if seq.request.lora is None else seq.request.lora.place,
        )

    # ---- results -------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Takes the result of the oldest step in flight.

        Sequences that have finished meanwhile get nothing: their rows were burnt. A preempted one
        still gets its token, which was sampled from a correct prefix.

        Returns one for each sequence that gained tokens or logprobs, or ended, in plan order.
        """
        step, seqs, epochs = self._in_flight.popleft()
        assert plan.step == result.step == step, "steps are committed in the order of their plans"
        assert len(seqs) == len(result.sequences) == plan.num_sequences
        self._last_read = step
        updates: list[SequenceUpdate] = []
        self._commit_decodes(seqs, epochs, plan.decodes.starts, result.sequences, updates)
        num_decodes = len(plan.decodes)
        self._commit_chunks(
            seqs[num_decodes:],
            epochs[num_decodes:],
            plan.chunks,
            result.sequences[num_decodes:],
            updates,
        )
        return updates

    def _commit_decodes(
        self,
        seqs: list[Sequence],
        epochs: list[int],
        starts: Seq[int],
        results: Seq[SequenceResult],
        updates: list[SequenceUpdate],
    ) -> None:
        """Commits as many of the first as there are `starts`."""
        block_size, registers = self.pool.block_size, self.pool.prefix_cache
        followers = self._followers
        for start, seq, epoch, got in zip(starts, seqs, epochs, results, strict=False):
            if seq.status is _FINISHED:
                continue
            seq.num_pending -= 1
            if got.fault:
                updates.append(self._fail(seq))
                continue
            end = start + 1
            if registers and end // block_size > seq.num_registered and epoch == seq.epoch:
                self._register(seq, end // block_size, seen=True)
            if followers and end >= seq.prompt_len and epoch == seq.epoch:
                self._release_followers(seq.request_id)
            tokens = seq.tokens
            (token,) = got.token_ids
            tokens.append(token)
            if token in seq.stop_ids or len(tokens) >= seq.max_len:
                self._ends(seq, token)
            updates.append((seq, got))

    def _commit_chunks(
        self,
        seqs: list[Sequence],
        epochs: list[int],
        chunks: Seq[ScheduledSequence],
        results: Seq[SequenceResult],
        updates: list[SequenceUpdate],
    ) -> None:
        block_size, registers = self.pool.block_size, self.pool.prefix_cache
        for seq, epoch, row, got in zip(seqs, epochs, chunks, results, strict=True):
            if seq.status is _FINISHED:
                continue
            seq.num_pending -= row.samples
            if got.fault and row.num_drafts:
                self._verify_nothing(seq, epoch)
                continue
            if got.fault:
                updates.append(self._fail(seq))
                continue
            end = row.start + len(row.token_ids)
            if row.num_drafts:
                end = self._settle(seq, epoch, row, len(got.token_ids) - 1)
            if epoch == seq.epoch:
                if registers and end // block_size > seq.num_registered:
                    seen, accepted = row.num_rows > 0, got.token_ids[:-1]
                    self._register(seq, end // block_size, seen=seen, more=accepted)
                if self._followers and end >= seq.prompt_len:
                    self._release_followers(seq.request_id)
            if row.samples and not row.scoring:
                updates.append((seq, self._accept(seq, got)))
            else:
                self._commit_prompt(seq, end, row, got, updates)

    def _settle(self, seq: Sequence, epoch: int, row: ScheduledSequence, accepted: int) -> int:
        """Takes back the drafts that were wrong; returns how many tokens have been computed."""
        end = row.start + 1 + accepted
        seq.num_drafted += row.num_drafts
        seq.num_accepted += accepted
        if epoch == seq.epoch:
            seq.num_computed, seq.num_verifying = end, 0
        return end

    def _verify_nothing(self, seq: Sequence, epoch: int) -> None:
        """The sequence begins anew, without drafts: one of them may have been the fault."""
        seq.takes_drafts = False
        if epoch == seq.epoch:
            self._preempt(seq)

    def _fail(self, seq: Sequence) -> SequenceUpdate:
        self._finish(seq, "error", None)
        return seq, SequenceResult(fault=True)

    def _accept(self, seq: Sequence, got: SequenceResult) -> SequenceResult:
        """Appends sampled tokens up to the first that ends the sequence, and returns those."""
        tokens, stop_ids, max_len = seq.tokens, seq.stop_ids, seq.max_len
        known = len(tokens)
        for token in got.token_ids:
            tokens.append(token)
            if (token in stop_ids or len(tokens) >= max_len) and self._ends(seq, token):
                break
        accepted = len(tokens) - known
        if accepted == len(got.token_ids):
            return got
        logprobs = None if got.logprobs is None else got.logprobs[:accepted]
        return SequenceResult(got.token_ids[:accepted], False, logprobs, got.prompt_logprobs)

    def _ends(self, seq: Sequence, token: int) -> bool:
        """Finishes the sequence if `token`, its last, ends it or is the last it may have."""
        params = seq.params
        if token in seq.stop_ids and seq.num_output >= params.held_tokens:
            ends = params.constrained or not params.ignore_eos
            eos = ends and token in self.config.eos_token_ids
            self._finish(seq, "stop", None if eos else token)
        elif len(seq.tokens) >= seq.max_len:
            self._finish(seq, "length", None)
        return seq.finished

    def _commit_prompt(
        self,
        seq: Sequence,
        end: int,
        row: ScheduledSequence,
        got: SequenceResult,
        updates: list[SequenceUpdate],
    ) -> None:
        seq.num_scored += len(row.targets)
        if row.samples:
            updates.append((seq, self._accept(seq, got)))
            return
        if seq.max_tokens == 0 and end >= seq.prompt_len:
            self._finish(seq, "length" if seq.pooling is None else "stop", None)
        if seq.finished or got.prompt_logprobs:
            updates.append((seq, got))

    def _register(self, seq: Sequence, num_full: int, *, seen: bool, more: Seq[int] = ()) -> None:
        """Puts the blocks that a step has filled into the prefix cache.

        Only when logits that depend on them were `seen` to be finite: a chunk in the middle of a
        prompt has none, so its blocks wait for the prompt's last. Hashing them does not wait.
        `more` are tokens in them that `seq` has yet to take: drafts that were right.
        """
        while len(seq.block_hashes) < num_full:
            self._hash_next_block(seq, more)
        if seen:
            for index in range(seq.num_registered, num_full):
                self.pool.register(seq.blocks[index], seq.block_hashes[index])
            seq.num_registered = num_full

    def _release_followers(self, request_id: str) -> None:
        released = self._followers.pop(request_id, ())
        self._num_followers -= len(released)
        for seq in released:
            self._queue(seq)

    def sequences_of(self, plan: StepPlan) -> list[Sequence]:
        """The sequences of a plan that has not been committed, in its order."""
        return next(step.seqs for step in self._in_flight if step.step == plan.step).copy()

    def recover(self) -> None:
        """Forgets every step in flight and everything on the device: all is computed anew.

        For a step that raised. Tokens that were sampled but not read are sampled again, to the same
        values: their noise depends on seed and position alone. The caller rebuilds the device's KV.
        """
        self._in_flight.clear()
        self._last_read = self._last_step
        for seqs in self._requests.values():
            for seq in seqs:
                seq.num_pending = seq.num_verifying = 0
        for seq in reversed(self._running.copy()):
            self._unschedule(seq)
            seq.status = Status.WAITING
            self._queue(seq)
        self.pool.reset()

    def restrict(self, only: Iterable[Sequence] | None) -> None:
        """Admits none but these from now on; None: everybody. What runs goes on running."""
        self._only = None if only is None else frozenset(only)
        followers = {seq for seqs in self._followers.values() for seq in seqs}
        self._waiting, self._held = self._make_queue(), []
        for seqs in self._requests.values():
            for seq in seqs:
                if seq.status is Status.WAITING and seq not in followers:
                    self._queue(seq)

    # ---- helpers -------------------------------------------------------------------------------

    def _make_queue(self) -> WaitingQueue:
        config = self.config
        return make_queue(config.policy, aging_s=config.aging_s, cached_tokens=self._cached_tokens)

    def _queue(self, seq: Sequence) -> None:
        if self._only is None or seq in self._only:
            self._waiting.push(seq)
        else:
            self._held.append(seq)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _is_scoring(self, seq: Sequence) -> bool:
        return seq.scores_prompt and seq.num_scored < seq.prompt_len - 1

    def _cacheable_blocks(self, seq: Sequence) -> int:
        """Leading blocks that may come from the cache: tokens that need logits are computed."""
        if seq.pooling == "mean":
            return 0  # each of its tokens counts
        limit = seq.num_scored if self._is_scoring(seq) else len(seq.tokens) - 1
        return limit // self.pool.block_size

    def _cached_tokens(self, seq: Sequence) -> int:
        blocks = self.pool.match(self._hashes(seq, self._cacheable_blocks(seq)))
        return len(blocks) * self.pool.block_size

    def _hashes(self, seq: Sequence, count: int) -> Iterator[bytes]:
        """The hashes of the first `count` blocks, computed when they are first needed."""
        for index in range(count):
            if index == len(seq.block_hashes):
                self._hash_next_block(seq)
            yield seq.block_hashes[index]

    def _hash_next_block(self, seq: Sequence, more: Seq[int] = ()) -> None:
        hashes, block_size, known = seq.block_hashes, self.pool.block_size, len(seq.tokens)
        start = len(hashes) * block_size
        tokens = seq.tokens[start : start + block_size]
        if len(tokens) < block_size:
            tokens += more[max(start - known, 0) : max(start + block_size - known, 0)]
        assert len(tokens) == block_size, "only full blocks have a hash"
        parent = hashes[-1] if hashes else None
        hashes.append(self.pool.hash_block(parent, tokens, seq.salt))

    def _finish(self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        request_id = seq.request_id
        followers = self._followers.get(request_id)
        if seq.status is Status.RUNNING:
            self._unschedule(seq)
            seq.status = _FINISHED
        else:
            seq.status = _FINISHED
            if followers and seq in followers:
                followers.remove(seq)
                self._num_followers -= 1
            elif seq in self._held:
                self._held.remove(seq)
            else:
                self._waiting.forget(seq)
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        if followers and seq is self._requests[request_id][0]:
            self._release_followers(request_id)
        if all(other.status is _FINISHED for other in self._requests[request_id]):
            del self._requests[request_id]
            self._followers.pop(request_id, None)

    def _unschedule(self, seq: Sequence) -> None:
        """Takes slot and blocks away. What a step in flight writes there comes before any reuse."""
        ranks = self._waiting.rank
        index = bisect_left(self._running, ranks(seq), key=ranks)
        assert self._running[index] is seq and seq.slot is not None
        del self._running[index]
        self._standing = None
        self._free_slots.append(seq.slot)
        self.pool.release(seq.blocks)
        seq.slot = None
        seq.blocks = []
        seq.num_computed = seq.num_verifying = 0
        seq.num_registered = 0
        seq.epoch += 1
