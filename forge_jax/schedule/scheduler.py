"""The scheduler: decides which sequences each step computes, how many tokens, in which blocks.

There are no prefill and decode phases. A sequence has tokens that exist and tokens whose KV has
been computed. A step computes part of the difference. The caller runs one step ahead:

    plan = scheduler.schedule()          # from counts: the last token may still be unread
    pending = device.dispatch(plan)
    result = device.read(the step before)
    updates = scheduler.commit(the plan before, result)

Two properties make this safe. First, the device executes steps in order. The slot and blocks of a
finished sequence can therefore be reused at once, even while a step that uses them is in flight.
Second, a block enters the prefix cache only in `commit`, up to the tokens whose step has been read.
If a sequence stopped in the step before, its row is discarded. The row writes past those tokens,
into a block that is neither shared nor registered.

A step that verifies drafts computes them after the last known token and samples at each. `commit`
gets the number of accepted drafts. The KV of rejected drafts is past the sequence's end, like that
of a discarded row, and is overwritten later. The sequence's new length is unknown until the step is
read, so the sequence cannot be scheduled before that. Either the caller reads the step first, or
the next step omits the sequence. The same holds for a sequence with a grammar or bad words, because
its last token determines the allowed next tokens.

    config.py           limits and switches
    request.py          requests and sequences; lifecycle.py: the statuses of a sequence
    live_requests.py    the unfinished requests
    backlog.py          sequences without a slot; policy.py: the order of their queue
    slots.py            sequences with a slot: blocks and preemption; block_pool.py: the blocks
    host_tier.py        copies of evicted blocks in host memory; loading.py: their way back
    prefix_cache.py     finds and registers the blocks of sequences; cache_events.py: its changes
    planner.py          one step, from decodes.py, prefill.py, admission.py and drafts.py
    step_budget.py      remaining capacity of a step; token_budget.py: its size for a latency target
    plan.py             the plan of a step, and its result
    in_flight.py        steps that have not been committed
    commit.py           results

The package handles ints only. It has no device, no clock and no random source.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial

from forge_jax.schedule.backlog import Backlog
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.commit import Committer, SequenceUpdate
from forge_jax.schedule.config import SchedulerConfig
from forge_jax.schedule.drafts import Drafts, verifiable
from forge_jax.schedule.host_tier import Finished, Transfers
from forge_jax.schedule.in_flight import InFlight
from forge_jax.schedule.live_requests import LiveRequests
from forge_jax.schedule.loading import Loading
from forge_jax.schedule.plan import StepPlan, StepResult
from forge_jax.schedule.planner import Planner
from forge_jax.schedule.policy import make_queue
from forge_jax.schedule.prefix_cache import PrefixCache
from forge_jax.schedule.request import FinishReason, Request, Sequence
from forge_jax.schedule.slots import Slots
from forge_jax.schedule.token_budget import TokenBudget


class Scheduler:
    """The facade that admits, schedules, preempts and finishes sequences.

    Order. Each step takes decodes first, then the prompts of running sequences, then waiting
    sequences in the order of the policy. A decode never waits for a prompt. A waiting sequence that
    cannot be admitted is not overtaken.

    If there is a `budget` and a sequence waits for its next token, the step takes only as many
    prompt tokens as the budget allows. The order of the prompts stays the same.

    Two switches disable these gains, so that they can be measured. Static batching admits sequences
    only when none is running. If chunked prefill is off, a waiting sequence that would fit an empty
    step is not cut, but waits. A sequence that fits no step is still cut, so all are served.

    Progress. `add` rejects requests that would not fit the pool alone. The running sequence of the
    first rank can take blocks from all others, so it always gets its tokens, and ends.

    Args:
      config: the limits of a step. It may be replaced between steps by one with the same slots,
        policy, aging and EOS tokens.
      pool: the blocks. Only this scheduler allocates from it. If it has a `host`, the caller must
        perform the `transfers` of each step.
      clock: seconds, for the aging of waiting requests.
      rng: draws the seeds of requests that have none.
      budget: limits the size of steps that contain both prompts and decodes. None: no such limit.

    Attributes:
      running: the sequences with a slot, by rank. Read-only.
      slots, backlog, prefixes, loading: internal parts, exposed for tests and tools.
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
        assert budget is None or config.chunked_prefill, "a token budget needs chunked prefill"
        self.config = config
        self.pool = pool
        self.budget = budget
        self.prefixes = prefixes = PrefixCache(pool)
        self.backlog = Backlog(
            partial(
                make_queue,
                config.policy,
                aging_s=config.aging_s,
                cached_tokens=prefixes.cached_tokens,
            )
        )
        self._in_flight = InFlight()
        self.slots = Slots(config.max_num_seqs, pool, self.backlog, self._in_flight)
        self.running: Seq[Sequence] = self.slots.running
        self._requests = LiveRequests(self.slots, rng)
        self.loading = None
        if pool.host is not None:
            self.loading = Loading(pool, pool.host, prefixes, self.backlog, clock)
        self._planner = Planner(self.slots, prefixes, clock, budget, self.loading)
        self.admission = self._planner.admission
        self._committer = Committer(config.eos_token_ids, self._requests, self.slots, prefixes)
        self._clock = clock
        self._pools_next = False  # with `pools_apart`: True if the next step is a pooling step

    # ---- requests ------------------------------------------------------------------------------

    def add(self, request: Request) -> list[Sequence]:
        """Queue a request: one sequence for each of its `params.n` samples, or of its `outputs`.

        Raises:
          ContextLengthError: if it can never fit the context or the KV cache.
          RequestError: if the id is in use, or the prompt is empty.
        """
        return self._requests.add(request, self.config, self._clock())

    def abort(self, request_id: str) -> list[Sequence]:
        """End the unfinished sequences of a request with "abort", and return them.

        Their slots and blocks are free at once, and results in flight are dropped. An unknown or
        finished id is not an error, because a request may finish before its abort arrives.
        """
        return self._requests.abort(request_id)

    def finish(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence for a reason that only the caller can detect, such as a stop string.

        If the sequence has already finished (the stop string ended in its last token), only the
        reason changes.
        """
        if seq.finished:
            seq.finish_reason, seq.stop_reason = reason, stop_reason
        else:
            self._requests.finish(seq, reason, stop_reason)

    def request_ids(self) -> list[str]:
        """Return the ids of the unfinished requests, in order of arrival."""
        return list(self._requests.by_id)

    def requests(self) -> list[Request]:
        """Return the unfinished requests, in order of arrival."""
        return [seqs[0].request for seqs in self._requests.by_id.values()]

    def unread_prompts(self) -> list[Sequence]:
        """Return the sequences that return parts of their prompts and have no output yet."""
        return [
            seq
            for seq in self._requests.sequences()
            if (seq.scores_prompt or seq.num_returned is not None) and not seq.num_output
        ]

    def waiting(self) -> Iterator[Sequence]:
        """Yield unfinished sequences without a slot, in order of arrival."""
        return self._requests.waiting()

    def restrict(self, only: Iterable[Sequence] | None) -> None:
        """Admit only these sequences from now on, or all if None. Running ones keep running."""
        self.backlog.restrict(only, self._requests.waiting())

    # ---- counts, which any thread may read -----------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._requests.by_id)

    @property
    def num_waiting(self) -> int:
        return len(self.backlog)

    @property
    def num_deferred(self) -> int:
        """Sequences that wait for another sequence or for host memory, not for a slot or blocks."""
        return self.backlog.num_deferred

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_preemptions(self) -> int:
        return self.slots.num_preemptions

    @property
    def num_in_flight(self) -> int:
        """Steps that have been scheduled and not committed."""
        return len(self._in_flight)

    @property
    def token_budget(self) -> int:
        """Token limit of the latest step that could take prompts."""
        latest = None if self.budget is None else self.budget.latest
        return self.config.max_num_batched_tokens if latest is None else latest

    # ---- steps ---------------------------------------------------------------------------------

    def verifiable(self) -> list[Sequence]:
        """Return the sequences whose next step could verify drafts, by rank."""
        return verifiable(self.running)

    def schedule(
        self, drafts: Drafts | None = None, *, masks_late: bool = False
    ) -> StepPlan | None:
        """Return the next step. Dispatch it before any other call of this scheduler.

        None if there is no work, a step in flight must be committed first, or all work waits for
        loads from host memory.

        Args:
          drafts: draft tokens of `verifiable` sequences. They get the capacity that remains after
            all other scheduling, in the order of the mapping, and only free blocks that are not
            reserved.
          masks_late: the caller reads the steps in flight before it dispatches this one. The step
            may then include sequences whose next token depends on the last.
        """
        if not self.config.pools_apart:
            plan = self._planner.plan(self.config, drafts, masks_late=masks_late, pools=None)
        else:
            for turn in (self._pools_next, not self._pools_next):
                plan = self._planner.plan(self.config, drafts, masks_late=masks_late, pools=turn)
                if plan is not None:
                    self._pools_next = not turn
                    break
        if plan is None:
            stuck = self.has_work and not self._in_flight and not self.loads
            assert not stuck, "there is work, but none of it can run"
        return plan

    @property
    def loads(self) -> bool:
        """True while blocks are being loaded from host memory."""
        return bool(self.loading)

    def transfers(self) -> Transfers:
        """Return the copies to start now: after `schedule`, and before its step is dispatched.

        The step may overwrite the blocks that are copied to the host.
        """
        assert self.loading is not None
        return self.loading.host.take()

    def finish_transfers(self, finished: Finished) -> None:
        """Use what has been copied. Later steps may read the blocks of finished loads."""
        assert self.loading is not None
        self.loading.host.saved(finished.saves)
        self.loading.finish(finished.loads)

    def empty_prefix_cache(self) -> None:
        """Empty the prefix cache, also on the host, except for blocks of running sequences."""
        self.pool.evict_all()
        if self.loading is not None:
            self.loading.void()

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceUpdate]:
        """Commit the result of the oldest step in flight.

        Sequences that have finished meanwhile get nothing. A preempted one still gets its token.

        Returns:
          One update for each sequence that gained tokens or logprobs, or ended, in plan order.
        """
        step = self._in_flight.take_oldest()
        assert plan.step == result.step == step.step, (
            "steps must be committed in the order of their plans"
        )
        assert len(step.seqs) == len(result.sequences) == plan.num_sequences
        return self._committer.commit(step, plan, result.sequences)

    def sequences_of(self, plan: StepPlan) -> list[Sequence]:
        """Return the sequences of an uncommitted plan, in its order."""
        return self._in_flight.sequences_of(plan.step)

    def recover(self) -> None:
        """Drop every step in flight and all device state, and requeue the running sequences.

        Call it when a step has raised. Tokens that were sampled but not read are sampled again,
        with the same values, because their noise depends on seed and position alone. The caller
        rebuilds the device's KV.
        """
        self._in_flight.forget()
        for seq in self._requests.sequences():
            seq.num_pending = 0
        self.slots.requeue_all()
        if self.loading is not None:
            self.loading.forget()
