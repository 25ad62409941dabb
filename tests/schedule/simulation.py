"""A deterministic simulation of the scheduler: one seed determines a whole run.

Each seed draws its own limits and a random subset of troubles:

- tiny pools, changing chunk sizes, a latency target, an emptied prefix cache
- aborts, stop strings, faults, random preemption, moved requests
- failing dispatches and reads, recovery of a few sequences first, late results
- a clock that jumps in both directions
- copies in host memory, which take a random number of steps

The fake device checks the content of every cache slot. `Simulation.check` checks the state of
scheduler and pool, and `_check_order` the order of service. Each output is compared with the fake
device's continuation of the prompt alone.

Some requests have a grammar. For the scheduler this means only that each next token depends on the
one before. Here the grammar is a rule that the fake device receives as masks.

Drafts come from an oracle that spoils them as the run decides: all right, all wrong, or right up to
a random position. They are for random sequences, and may be longer than there is room for.

Some requests have their hidden states pooled, and the device counts each position once. Some return
activations, and each requested position must be returned once.

Waiting is bounded in two ways. While there are troubles, only the sequence of the last rank is
preempted. No sequence is admitted before one of a better rank, or before an earlier one beyond the
aging bound. After they stop, see `_longest_stretch`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
import struct
from collections import Counter, deque
from collections.abc import Iterable
from functools import partial

from forge_jax.config import Pooling
from forge_jax.errors import ContextLengthError
from forge_jax.grammar import GrammarSpec
from forge_jax.sampling_params import ReturnActivations, SamplingParams
from forge_jax.schedule.activations import joined
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.host_tier import HostTier
from forge_jax.schedule.lifecycle import Status
from forge_jax.schedule.plan import (
    FED_BACK,
    ScheduledSequence,
    SequenceResult,
    StepPlan,
    StepResult,
)
from forge_jax.schedule.request import Request, Sequence, sequence_seed
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.schedule.token_budget import TokenBudget
from forge_jax.testing import FakeDevice, FakeHostMemory

EOS = 1
GRAMMAR = GrammarSpec.regex("x")  # stands for any grammar


def mask_after(tokens: list[int]) -> list[int]:
    """Return the tokens of 64 that may follow: EOS, and those whose sum with the last is even."""
    odd = 0x55555555 << (tokens[-1] & 1)
    return [(odd | 1 << EOS) & 0xFFFFFFFF, odd & 0xFFFFFFFF]


class StepError(Exception):
    """An error raised by the device."""


@dataclasses.dataclass
class Expected:
    """The required outcome of one sequence."""

    seq: Sequence
    tokens: list[int]  # the whole continuation, up to its natural end
    reason: str  # the reason of that end
    stop_reason: int | str | None
    stop_string_at: int | None  # output tokens that contain the stop string
    known: list[int]  # the prompt and the output so far
    rank: tuple[int, int]  # by class and arrival, the first to be served first
    seen: int = 0
    logprobs: int = 0
    prompt_logprobs: list = dataclasses.field(default_factory=list)
    activations: list = dataclasses.field(default_factory=list)
    aborted: bool = False


class Simulation:
    def __init__(self, seed: int):
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.now_s = 0.0
        contiguous = rng.random() < 0.1
        chunked = rng.random() < 0.8
        max_model_len = rng.randint(6, 60)
        block_size = max_model_len + rng.randint(0, 3) if contiguous else rng.randint(1, 8)
        # From less than one longest sequence needs to plenty; mostly too little.
        num_blocks = 1 + int(max_model_len / block_size * rng.choice((0.7, 1.0, 1.5, 2.0, 6.0)))
        self.pool = BlockPool(
            num_blocks, block_size, rng.random() < 0.85, rng.choice(("lru", "fifo"))
        )
        self.host_rng = random.Random(f"host {seed}")
        if self.pool.prefix_cache and self.host_rng.random() < 0.6:
            capacity, max_saving = self.host_rng.choice(((2, 1), (30, 9), (999, 99), (999, 99)))
            self.pool.host = HostTier(capacity, block_size, max_saving)
        self.config = SchedulerConfig(
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=rng.choice((1, 2, 5, 16, 64)),
            max_rows=rng.choice((1, 3, 8, 64)),
            prefill_chunk_size=rng.choice((None, None, 1, 4, 16)) if chunked else None,
            chunked_prefill=chunked,
            batching="continuous" if rng.random() < 0.8 else "static",
            max_model_len=max_model_len,
            policy=rng.choice(("fcfs", "priority", "prefix")),
            eos_token_ids=frozenset((EOS,)),
            aging_s=rng.choice((0.0, 20.0, 20.0, 1e9)),
        )
        self.times = random.Random(f"times {seed}")  # durations of steps
        self.budget = None
        if chunked and self.times.random() < 0.4:
            sizes = self.times.choice((None, (4, 16, 64)))
            self.budget = TokenBudget(self.times.choice((0.01, 0.1)), sizes)
        self.scheduler = Scheduler(
            self.config, self.pool, clock=lambda: self.now_s, rng=rng, budget=self.budget
        )
        self.vocab_size = rng.choice((2, 5, 50))
        self.device = FakeDevice(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=self.config.max_num_seqs,
            vocab_size=self.vocab_size,
            eos_token_id=EOS,
            eos_probability=rng.choice((0.0, 0.1)),
            pool=self.pool,
            fault=self._faults,
        )
        self.transfer_speed = self.host_rng.choice((0.1, 0.5, 1.0))
        self.host = None
        if self.pool.host is not None:
            self.host = FakeHostMemory(self.device, self._transfer_finishes)
        # The troubles of this run; each occurs in about half of all runs.
        self.arrivals = rng.choice((0.05, 0.3, 1.0))
        self.aborts = rng.choice((0.0, 0.05))
        self.stop_strings = rng.choice((0.0, 0.2))
        self.faults = rng.choice((0.0, 0.02))
        self.errors = rng.choice((0.0, 0.04))  # at a dispatch, at a read, and after a commit
        if self.host is not None:
            self.errors /= 8  # most of them while blocks are loaded: each drops all copies
        self.jitter = rng.choice((0.0, 0.3))
        self.scoring = rng.choice((0.0, 0.3))
        self.victims = rng.choice((0.0, 0.1))
        self.restrictions = rng.choice((0.0, 0.6))  # share of recoveries that restrict
        self.moves = rng.choice((0.0, 0.2))
        self.cache_resets = rng.choice((0.0, 0.05))
        self.clock_jumps = rng.choice((0.0, 0.2))
        self.drafts = rng.choice((0.0, 0.0, 0.3, 1.0))  # share of verifiable sequences with drafts
        self.right_drafts = rng.choice((0.0, 0.5, 0.9, 1.0))  # share of right tokens in drafts
        self.salts = ("", "a") if rng.random() < 0.5 else ("",)
        self.own_rng = random.Random(~seed)
        self.grammars = self.own_rng.choice((0.0, 0.2, 0.8))
        self.pooling_rng = random.Random(f"pooling {seed}")
        self.pooling = self.pooling_rng.choice((0.0, 0.0, 0.3))
        self.returning_rng = random.Random(f"returning {seed}")
        self.returning = self.returning_rng.choice((0.0, 0.5))
        # Steps in flight when the next is scheduled: as in the engine, or later each time.
        self.depths = rng.choice(((0,), (1,), (1,), (2,), (0, 1), (0, 1, 2, 3)))
        self.slots = list(range(self.config.max_num_seqs))
        self.stems = [
            [rng.randrange(self.vocab_size) for _ in range(max_model_len)] for _ in range(3)
        ]
        self.expected: dict[Sequence, Expected] = {}
        self.device_s = 0.0  # when the last step that was read has ended
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.faulted: set[tuple[str, int]] = set()
        self.contents: dict[bytes, list[int]] = {}  # by block hash: the KV that it represents
        self.only: set[Sequence] | None = None  # sequences that may be admitted
        self.last_progress = 0  # the last step with lasting progress
        self.statuses: set[Status] = set()  # that sequences have had
        self.log = hashlib.sha256()
        self.counts: Counter[str] = Counter()

    def run(self, steps: int) -> None:
        """Run `steps` with troubles, then without until everything is served."""
        try:
            for _ in range(steps):
                self.step()
            self.arrivals = self.aborts = self.faults = self.errors = 0.0
            self.victims = self.cache_resets = self.moves = 0.0
            self._restrict(None)
            self.last_progress = self.counts["steps"]
            while self.scheduler.has_work:
                self.step()
                self.last_progress += self.scheduler.loads  # there are few, see `MAX_LOADS`
                stretch = self.counts["steps"] - self.last_progress
                assert stretch <= self._longest_stretch(), "somebody starves"
            while self.in_flight:
                self._commit()
            while self.scheduler.loads:  # their sequences were aborted
                self._finish_transfers()
            assert not self.expected and self.pool.num_used == 0
            assert self.scheduler.num_running == self.scheduler.num_waiting == 0
            self.counts.update(f"runs with {status.value}" for status in self.statuses)
        except BaseException as error:
            error.add_note(f"Simulation({self.seed}), step {self.counts['steps']}")
            raise

    def step(self) -> None:
        rng = self.rng
        self.counts["steps"] += 1
        self._turn_the_clock()
        if rng.random() < self.jitter:
            self._change_limits()
        while rng.random() < self.arrivals and self.scheduler.num_waiting < 20:
            self._arrive()
        if rng.random() < self.aborts and self.expected:
            self._abort(self.rng.choice(list(self.expected)))
        loading = list(self.scheduler.backlog.loading)
        if loading and self.aborts and self.host_rng.random() < 0.2:
            self._note("aborted loads")
            self._abort(loading[0])
        if rng.random() < self.moves and self.expected:
            self._move()
        if self.only is not None and rng.random() < 0.1:
            self._restrict(None)
        if rng.random() < self.victims and self.scheduler.num_running:
            self._preempt_somebody()
        if rng.random() < self.cache_resets:
            self._empty_the_cache()
        try:
            self._schedule_and_commit()
        except StepError:
            self.in_flight.clear()
            ran = list(self.scheduler.running)
            self.scheduler.recover()
            self.device.reset()
            if self.host is not None:
                self.host.reset()
            if ran and rng.random() < self.restrictions:
                self._restrict(set(rng.sample(ran, rng.randint(1, len(ran)))))
            self.check()

    def _schedule_and_commit(self) -> None:
        self._finish_transfers()
        before = Before(self)
        plan = self.scheduler.schedule(self._drafts())
        self.check()
        self._check_order(plan, before)
        if plan is not None:
            self._check_plan(plan)
            self._check_switches(plan, before.num_running)
            plan = self._masked(plan)
            self._may_raise("dispatch")
        self._start_transfers()
        if plan is not None:
            self.in_flight.append((plan, self.device.read(self.device.dispatch(plan))))
        depth = self.rng.choice(self.depths)
        while self.in_flight and (plan is None or len(self.in_flight) > depth):
            self._may_raise("read")
            self._commit()
            self.check()
            self._may_raise("after commit")
            if plan is None:
                break

    def _start_transfers(self) -> None:
        if self.host is not None:
            transfers = self.scheduler.transfers()
            self.counts["loads"] += len(transfers.loads)
            self.log.update(repr(transfers).encode())
            self.host.start(transfers)

    def _finish_transfers(self) -> None:
        if self.host is not None:
            self.scheduler.finish_transfers(self.host.finished())
            self.check()

    def _transfer_finishes(self) -> bool:
        return self.host_rng.random() < self.transfer_speed

    def _masked(self, plan: StepPlan) -> StepPlan:
        """Return the plan with a mask for each row of a sequence with a grammar."""
        seqs = self.scheduler.sequences_of(plan)
        if not any(seq.needs_host_token for seq in seqs):
            return plan
        masks: list[list[int]] = []
        for seq, row in zip(seqs, plan.sequences, strict=True):
            if not seq.needs_host_token or not row.samples:
                masks += [[0xFFFFFFFF] * 2] * row.num_rows
                continue
            assert FED_BACK not in row.token_ids, f"{seq.key}: runs ahead of its grammar"
            self.counts["masks"] += 1
            tokens = [*seq.tokens[: row.start], *row.token_ids]
            last = len(tokens) - row.num_rows + 1
            masks += [mask_after(tokens[:end]) for end in range(last, last + row.num_rows)]
        return dataclasses.replace(plan, masks=masks)

    def _drafts(self) -> dict[Sequence, list[int]]:
        drafts = {}
        for seq in self.scheduler.verifiable():
            if self.rng.random() < self.drafts:
                right = self.expected[seq].tokens[seq.num_output :][: self.rng.randint(1, 9)]
                drafts[seq] = [
                    token
                    if self.rng.random() < self.right_drafts
                    else self.rng.randrange(self.vocab_size)
                    for token in right
                ]
        return drafts

    def _longest_stretch(self) -> int:
        """Return the maximum steps without a token, score or end after the troubles stop.

        A step without a decode gives the first running sequence at least one token. It needs at
        most a whole context of them, and its blocks are not taken. Only sequences admitted with a
        better rank can precede it: once if admissions follow the ranks, otherwise as often as there
        are slots. Then the computed steps must be read.
        """
        config = self.config
        times = 1 + (config.max_num_seqs if config.policy == "prefix" else 1)
        return times * config.max_model_len + max(self.depths) + 1

    def check(self) -> None:
        pool, scheduler = self.pool, self.scheduler
        pool.check()
        owners = Counter(block for seq in scheduler.running for block in seq.blocks)
        if pool.host is not None and scheduler.loading is not None:
            pool.host.check()
            owners.update(scheduler.loading.held_blocks)
        for block in range(pool.num_blocks):
            refs = pool.ref_count(block)
            assert refs == owners[block], (
                f"block {block}: {refs} references, {owners[block]} owners"
            )
        for block_hash, block in pool._index.items():
            kv = self.device.kv(block)
            if self.contents.setdefault(block_hash, kv) != kv:
                raise AssertionError(f"block {block} is in the prefix cache as something else")
        slots = [seq.slot for seq in scheduler.running]
        assert sorted([*slots, *scheduler.slots.free]) == self.slots, "slots"
        ranks = [self._rank(seq) for seq in scheduler.running]
        assert ranks == sorted(ranks), "who runs is not in the order of ranks"
        waiting = 0
        for seq, expected in self.expected.items():
            waiting += not seq.running
            self._check_status(seq)
            assert seq.num_computed <= seq.num_tokens <= seq.max_len, f"{seq.key}: counts"
            assert len(seq.blocks) <= seq.max_blocks, f"{seq.key}: more blocks than it can fill"
            assert seq.tokens == expected.known, f"{seq.key}: tokens that had come have changed"
        assert waiting == scheduler.num_waiting, "the queue has lost or doubled somebody"
        assert len(slots) == scheduler.num_running == len(self.expected) - waiting

    def _check_status(self, seq: Sequence) -> None:
        """Check that the status agrees with the counts, and why a sequence without a slot waits."""
        assert not seq.finished, f"{seq.key}: ended, and nobody was told"
        assert seq.running == (seq.slot is not None), f"{seq.key}: a slot for who runs, and only"
        self.statuses.add(seq.status)
        if seq.slot is None:
            assert not seq.blocks and not seq.num_computed, "a waiting sequence holds something"
            held = self.only is not None and seq not in self.only
            followers = self.scheduler.backlog.followers.get(seq.request_id, ())
            if seq in self.scheduler.backlog.loading:
                assert seq.status is Status.LOADING and self.scheduler.loads, f"{seq.key}: waits"
            elif seq in followers:
                assert seq.status is Status.FOLLOWING, f"{seq.key}: follows nobody"
            else:
                assert seq.status is (Status.HELD if held else Status.QUEUED), f"{seq.key}: waits"
            return
        if seq.status is Status.VERIFYING:
            assert seq.num_pending == 1 and seq.num_computed == len(seq.tokens), "drafts in flight"
            return
        if seq.num_tokens < seq.max_len:
            left = seq.num_tokens - seq.num_computed
            status = Status.DECODING if left == 1 else Status.PREFILLING
            assert left >= 1, f"{seq.key}: nothing to compute, and its output is not complete"
        else:
            done = seq.num_computed >= seq.prompt_len
            status = Status.DRAINING if done else Status.PREFILLING
        assert seq.status is status, f"{seq.key}: {seq.status}, its counts say {status}"

    # ---- troubles ------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self.rng
        self.counts["requests"] += 1
        length = rng.randint(1, max(1, self.config.max_model_len * 2 // 3))
        prompt = rng.choice(self.stems)[:length]
        # Only prompts that come again are loaded from host memory.
        if rng.random() < 0.5 and (self.host is None or self.host_rng.random() < 0.2):
            prompt = [*prompt[: length // 2], *(rng.randrange(self.vocab_size) for _ in range(4))]
        max_tokens = rng.choice((None, None, None, 0, 1, 2, 10, 20))
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 1, 3)),
            max_tokens=max_tokens,
            min_tokens=min(rng.choice((0, 0, 3)), 40 if max_tokens is None else max_tokens),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=(2,) if rng.random() < 0.1 and self.vocab_size > 4 else (),
            logprobs=rng.choice((None, None, 2)),
            prompt_logprobs=1 if rng.random() < self.scoring else None,
        )
        if self.own_rng.random() < self.grammars:
            params = dataclasses.replace(params, structured_outputs=GRAMMAR)
        if self.returning_rng.random() < self.returning:
            tokens = self.returning_rng.choice(("output", "all"))
            returned = ReturnActivations(names=("a",), tokens=tokens)
            params = dataclasses.replace(params, return_activations=returned)
        pooling: Pooling | None = None
        if self.pooling_rng.random() < self.pooling:
            pooling = self.pooling_rng.choice(("last", "mean"))
            params, max_tokens = SamplingParams(max_tokens=0), 0
        request = Request(
            request_id=f"r{self.counts['requests']}",
            prompt_token_ids=prompt,
            pooling=pooling,
            params=params,
            priority=rng.randint(0, 2),
            cache_salt=rng.choice(self.salts),
            seed=rng.getrandbits(64),
        )
        try:
            seqs = self.scheduler.add(request)
        except ContextLengthError:
            self.counts["refused"] += 1
            output = 1 if max_tokens is None else max_tokens
            kv = len(prompt) + max(output - 1, 0)
            pool_tokens = self.pool.num_blocks * self.pool.block_size
            assert len(prompt) + output > self.config.max_model_len or kv > pool_tokens
            return
        assert request.seed is not None
        for index, seq in enumerate(seqs):
            seed = sequence_seed(request.seed, index)
            self.expected[seq] = self._expect(seq, seed)

    def _expect(self, seq: Sequence, seed: int) -> Expected:
        params, rng = seq.params, self.rng
        prompt = list(seq.request.prompt_token_ids)
        room = self.config.max_model_len - len(prompt)
        room = min(room, self.pool.num_blocks * self.pool.block_size + 1 - len(prompt))
        count = room if params.max_tokens is None else params.max_tokens
        eos = () if params.ignore_eos and not params.constrained else (EOS,)
        stop_ids = eos if params.constrained else (*eos, *params.stop_token_ids)
        mask = mask_after if params.constrained else None
        tokens = self.device.continuation(prompt, params, seed, stop_ids, count, mask)
        reason, stop_reason = "length" if seq.pooling is None else "stop", None
        for index, token in enumerate(tokens, 1):
            if token in stop_ids and index >= params.held_tokens:
                tokens = tokens[:index]
                reason, stop_reason = "stop", None if token in eos else token
                break
        stop_string_at = None
        if tokens and rng.random() < self.stop_strings:
            stop_string_at = rng.randint(1, len(tokens))
            tokens = tokens[:stop_string_at]
            reason, stop_reason = "stop", "STOP"
        self.counts["sequences"] += 1
        priority = seq.request.priority if self.config.policy == "priority" else 0
        rank = (priority, self.counts["sequences"])
        return Expected(seq, tokens, reason, stop_reason, stop_string_at, prompt, rank)

    def _move(self) -> None:
        """Move a request to another one that continues from its tokens so far."""
        request = self.rng.choice(list(self.expected)).request
        self.counts["requests"] += 1
        self._note("moves", request.request_id)
        moved = {seq.index: self._gone(seq) for seq in self.scheduler.abort(request.request_id)}
        outputs = {index: e.tokens[: e.seen] for index, e in moved.items()}
        request_id = f"r{self.counts['requests']}"
        request = dataclasses.replace(request, request_id=request_id, outputs=outputs)
        for seq in self.scheduler.add(request):
            expected = moved.pop(seq.index)
            self.counts["sequences"] += 1
            expected.seq, expected.rank = seq, (expected.rank[0], self.counts["sequences"])
            if not expected.seen:
                expected.prompt_logprobs.clear()
                expected.activations.clear()
            self.expected[seq] = expected
        assert not moved, "a sample has not moved"

    def _gone(self, seq: Sequence) -> Expected:
        if self.only is not None:
            self.only.discard(seq)
            if not self.only:
                self._restrict(None)
        return self.expected.pop(seq)

    def _restrict(self, only: set[Sequence] | None) -> None:
        self._note("restrictions" if only else "releases")
        self.only = only
        self.scheduler.restrict(only)

    def _abort(self, seq: Sequence) -> None:
        request_id = seq.request_id
        aborted = self.scheduler.abort(request_id)
        assert aborted and not self.scheduler.abort(request_id)
        for seq in aborted:
            self.expected[seq].aborted = True
            self._ended(seq)

    def _may_raise(self, when: str) -> None:
        loads = self.errors and self.scheduler.loads and self.host_rng.random() < 0.2
        if self.rng.random() >= self.errors and not loads:
            return
        self._note(f"error:{when}")
        if when != "read" and self.rng.random() < 0.3:  # readable results are read first
            while self.in_flight:
                self._commit()
        raise StepError

    def _preempt_somebody(self) -> None:
        seq = self.rng.choice(self.scheduler.running)
        self._note("victims", seq.key)
        self.scheduler.slots.preempt(seq)

    def _empty_the_cache(self) -> None:
        """Evict all unused blocks; blocks in use stay registered."""
        if self.host_rng.random() < 0.3:
            self._note("cleared")
            self.scheduler.empty_prefix_cache()
            return
        blocks = self.pool.allocate(self.pool.num_free)
        assert blocks is not None
        self._note("cache resets", len(blocks))
        self.pool.release(blocks)
        assert not self.pool.num_cached

    def _turn_the_clock(self) -> None:
        self.now_s += self.rng.choice((0.0, 1.0, 30.0))
        if self.rng.random() < self.clock_jumps:
            jump_s = self.rng.choice((-1e6, -40.0, 40.0, 1e6))
            self._note("clock backwards" if jump_s < 0 else "clock forwards", jump_s)
            self.now_s += jump_s

    def _note(self, what: str, *details: object) -> None:
        self.counts[what] += 1
        self.log.update(f"{what} {details}".encode())

    def _change_limits(self) -> None:
        rng = self.rng
        self.config = self.scheduler.config = dataclasses.replace(
            self.config,
            max_num_batched_tokens=rng.randint(1, 40),
            max_rows=rng.randint(1, 20),
            prefill_chunk_size=rng.choice((None, rng.randint(1, 10)))
            if self.config.chunked_prefill
            else None,
        )

    def _faults(self, scheduled: ScheduledSequence) -> bool:
        if self.rng.random() >= self.faults:
            return False
        self.faulted.add(scheduled.seq_key)
        return True

    # ---- results -------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        self.log.update(repr(plan).encode())
        config = self.config
        assert plan.num_tokens <= config.max_num_batched_tokens, "the token budget"
        assert plan.num_rows <= config.max_rows, "the row budget"
        assert plan.num_sequences <= config.max_num_seqs, "the budget of sequences"
        chunk = config.prefill_chunk_size
        assert chunk is None or all(s.num_tokens - s.num_drafts <= chunk for s in plan.sequences), (
            "chunk size"
        )
        self.counts["cached"] = self.pool.hit_tokens
        if self.pool.host is not None:
            self.counts["loaded"] = self.pool.host.hit_tokens
            self.counts["lost"] = self.pool.host.num_lost
        self.counts["preemptions"] = self.scheduler.num_preemptions
        self.counts["rows"] += plan.num_rows
        self.counts["drafts"] += plan.num_drafts

    def _check_order(self, plan: StepPlan | None, before: Before) -> None:
        """Check the order of preemptions, admissions and tokens."""
        rank = self._rank
        preempted = [seq for seq in before.running if not seq.running and not seq.finished]
        if preempted:
            self.counts["gave way"] += len(preempted)
            assert plan is None or not plan.admissions, "admitted what another gave way to"
            last = max((rank(seq) for seq in self.scheduler.running), default=(-1, -1))
            assert last < min(rank(seq) for seq in preempted), "not the last rank gave way"
        if plan is None:
            return
        if plan.admissions:
            only = self.only
            keys = {admission.seq_key for admission in plan.admissions}
            assert only is None or keys <= {seq.key for seq in only}, "admitted who may not be"
            admitted = [seq for seq in before.queue if seq.running]
            overtaken = [seq for seq in before.queue if seq.status is Status.QUEUED]
            assert len(admitted) == len(plan.admissions)
            self._check_overtaking(before, admitted, overtaken)
        keys = {row.seq_key for row in plan.chunks if row.num_rows}
        took_rows = [s for s in self.expected if s.key in keys and s not in before.ready]
        if not took_rows:
            return
        served = {row.seq_key for row in plan.sequences}
        for seq in before.ready:
            assert not seq.running or seq.key in served, f"{seq.key}: a decode waits for a prompt"
        last = max(rank(seq) for seq in took_rows)
        for seq in before.prompts if not preempted else ():
            assert seq.key in served or last < rank(seq), f"{seq.key}: its prompt was overtaken"

    def _check_overtaking(
        self, before: Before, admitted: list[Sequence], overtaken: list[Sequence]
    ) -> None:
        rank, aged = self._rank, self._has_aged
        if self.config.policy != "prefix":
            last = max(rank(seq) for seq in admitted)
            assert all(last < rank(seq) for seq in overtaken), "a better rank was overtaken"
            return
        for seq in overtaken:
            self.counts["aged"] += aged(seq)
            cached = self.scheduler.prefixes.cached_tokens(seq)
            for other in admitted:
                if aged(seq):
                    assert aged(other) and rank(other) < rank(seq), "the aged were overtaken"
                elif not aged(other):
                    # Cached blocks can only have decreased in the meantime.
                    assert before.cached[other] >= cached, "a longer prefix was overtaken"

    def _rank(self, seq: Sequence) -> tuple[int, int]:
        return self.expected[seq].rank

    def _has_aged(self, seq: Sequence) -> bool:
        return self.now_s - seq.queued_s > self.config.aging_s

    def _check_switches(self, plan: StepPlan, ran_before: int) -> None:
        if self.config.batching == "static" and plan.admissions:
            assert not ran_before, "somebody joined a static batch"
            self.counts["static batches"] += 1
        if self.config.chunked_prefill:
            return
        seqs = {seq.key: seq for seq in self.expected}
        rows = {row.slot: row for row in plan.sequences}
        for admission in plan.admissions:
            seq, row = seqs[admission.seq_key], rows[admission.slot]
            rest = len(seq.tokens) - row.start
            if row.num_tokens < rest:
                # One row for each token that is scored, or one at the end.
                scoring = seq.scores_prompt and seq.num_scored < seq.prompt_len - 1
                unscored = len(seq.tokens) - max(row.start, seq.num_scored)
                num_rows = unscored if scoring else 1
                fits = rest <= self.config.max_num_batched_tokens
                assert not fits or num_rows > self.config.max_rows, "cut, and a step would hold it"
                self.counts["cut anyway"] += 1
            else:
                self.counts["whole prompts"] += 1

    def _commit(self) -> None:
        plan, result = self.in_flight.popleft()
        if self.budget is not None:
            self._time(self.budget, plan)
        for seq, got in self.scheduler.commit(plan, result):
            self._gained(seq, got)

    def _time(self, budget: TokenBudget, plan: StepPlan) -> None:
        """Record a time in proportion to the tokens, or any other."""
        begin_s = self.device_s
        self.device_s += self.times.choice((0.001 * plan.num_tokens, self.times.random()))
        budget.record(plan, begin_s, self.device_s)
        self.counts["short steps"] += (
            self.scheduler.token_budget < self.config.max_num_batched_tokens
        )

    def _gained(self, seq: Sequence, got: SequenceResult) -> None:
        expected = self.expected[seq]  # a KeyError means that it has already ended
        self.last_progress = self.counts["steps"]
        self.counts["accepted drafts"] += max(len(got.token_ids) - 1, 0)
        if got.fault:
            assert seq.key in self.faulted, "a fault has spread to another request"
            assert seq.finish_reason == "error"
            self.counts["faults"] += 1
            self._ended(seq)
            return
        assert (got.pooled is not None) == (seq.pooling is not None), f"{seq.key}: pooled"
        if got.pooled is not None and seq.pooling is not None:
            self.counts["pooled"] += 1
            right = self.device.pooled(seq.request.prompt_token_ids, seq.pooling)
            vector = struct.unpack(f"<{len(right)}f", got.pooled)
            assert all(map(partial(math.isclose, abs_tol=1e-4), vector, right)), (
                f"{seq.key}: pooled something else"
            )
        expected.prompt_logprobs += got.prompt_logprobs or ()
        token_ids, logprobs, activations = got.token_ids, got.logprobs or (), got.activations
        if expected.stop_string_at is not None:  # tokens accepted after it are dropped
            token_ids = token_ids[: expected.stop_string_at - expected.seen]
            logprobs = logprobs[: len(token_ids)]
            if activations is not None:
                end = activations.end - len(got.token_ids) + len(token_ids)
                activations = activations.part(0, end)
        if activations is not None:
            expected.activations.append(activations)
        expected.logprobs += len(logprobs)
        new = tuple(expected.tokens[expected.seen : expected.seen + len(token_ids)])
        assert token_ids == new, f"{seq.key}: output differs from the oracle"
        expected.seen += len(new)
        expected.known += new
        if expected.seen == expected.stop_string_at:
            self.scheduler.finish(seq, "stop", "STOP")
        if seq.finished:
            self._ended(seq)

    def _ended(self, seq: Sequence) -> None:
        expected = self._gone(seq)
        assert seq.slot is None and not seq.blocks
        known = seq.tokens
        if seq.stop_reason == "STOP":
            known = known[: len(expected.known)]
        assert known == expected.known, f"{seq.key}: other tokens than have come"
        block_size, parent = self.pool.block_size, None
        for index, block_hash in enumerate(seq.block_hashes):
            block = seq.tokens[index * block_size : (index + 1) * block_size]
            if len(block) == block_size:
                parent = self.pool.hash_block(parent, block, seq.salt)
                assert block_hash == parent, f"{seq.key}: block {index} has another's hash"
        self.log.update(f"{seq.key} {seq.tokens} {seq.finish_reason}".encode())
        self.counts[f"ended:{seq.finish_reason}"] += 1
        if expected.aborted or seq.finish_reason == "error":
            return
        assert expected.seen == len(expected.tokens), f"{seq.key}: ended too early"
        assert (seq.finish_reason, seq.stop_reason) == (expected.reason, expected.stop_reason)
        if seq.params.logprobs is not None:
            assert expected.logprobs == expected.seen
        prompt = list(seq.request.prompt_token_ids)
        scored = [logprob.token_id for logprob in expected.prompt_logprobs]
        wanted = prompt[1:] if seq.params.prompt_logprobs is not None and seq.index == 0 else []
        assert scored == wanted, f"{seq.key}: prompt logprobs"
        self._check_activations(expected, prompt)

    def _check_activations(self, expected: Expected, prompt: list[int]) -> None:
        """Check that each requested position was returned once, with its own activations."""
        seq, returned = expected.seq, expected.seq.params.return_activations
        whole = returned is not None and returned.tokens == "all" and seq.index == 0
        if returned is None or not (whole or expected.tokens):
            assert not expected.activations, f"{seq.key}: unasked activations"
            return
        start, tokens = 0 if whole else len(prompt) - 1, [*prompt, *expected.tokens[:-1]]
        right = self.device.activations(tokens, start, ("a",))
        self.counts["activations"] += len(right)
        found = joined(expected.activations)
        assert found.start == start, f"{seq.key}: activations start at {found.start}"
        assert found.arrays["a"].tobytes() == right.arrays["a"].tobytes(), f"{seq.key}: activations"


class Before:
    """The running and waiting sequences before a step was scheduled."""

    def __init__(self, simulation: Simulation):
        scheduler = simulation.scheduler
        self.running = list(scheduler.running)
        self.num_running = len(self.running)
        self.queue = [seq for seq in simulation.expected if seq.status is Status.QUEUED]
        # Sequences that need only one token, the next to sample from.
        self.ready = [
            seq
            for seq in self.running
            if seq.status is Status.DECODING and not (seq.needs_host_token and seq.num_pending)
        ]
        self.prompts = [seq for seq in self.running if seq.status is Status.PREFILLING]
        self.cached: dict[Sequence, int] = {}
        if simulation.config.policy == "prefix":
            self.cached = {seq: scheduler.prefixes.cached_tokens(seq) for seq in self.queue}


def play(seeds: Iterable[int], steps: int) -> Counter[str]:
    """Run each seed with `steps` of troubles and return the counts of all events."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        simulation = Simulation(seed)
        simulation.run(steps)
        counts += simulation.counts
    return counts
