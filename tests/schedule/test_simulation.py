"""The scheduler under everything at once, and proof that the simulation would notice."""

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys

import pytest
from simulation import Simulation, play

from forge_jax.schedule import scheduler as module
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.policy import PrefixQueue, RankedQueue
from forge_jax.schedule.request import Status
from forge_jax.schedule.scheduler import Scheduler

STEPS = 150  # with troubles, per seed; serving the rest takes about a third more
SEEDS = 1_200
AT_ONCE = 100


@pytest.mark.parametrize("first_seed", range(0, SEEDS, AT_ONCE))
@pytest.mark.quick_cases(4)
def test_every_output_is_the_oracles_whatever_happens(first_seed):
    counts = play(range(first_seed, first_seed + AT_ONCE), STEPS)
    assert counts["steps"] * SEEDS / AT_ONCE > 200_000
    # The troubles did occur: a simulation of nothing proves nothing.
    troubles = ("preemptions", "cached", "faults", "refused", "victims", "cache resets")
    troubles += ("restrictions", "releases", "moves", "drafts", "accepted drafts", "masks")
    troubles += ("pooled", "short steps")
    errors = ("error:dispatch", "error:read", "error:after commit")
    clock = ("clock forwards", "clock backwards", "aged", "gave way")
    switches = ("static batches", "cut anyway", "whole prompts")
    for what in (*troubles, *errors, *clock, *switches):
        assert counts[what] > 20, what
    for reason in ("stop", "length", "abort", "error"):
        assert counts[f"ended:{reason}"] > 20, reason


def test_a_seed_is_a_whole_run():
    def log(seed: int) -> str:
        simulation = Simulation(seed)
        simulation.run(STEPS)
        return simulation.log.hexdigest()

    assert log(7) == log(7) != log(8)
    code = f"from simulation import *; s = Simulation(7); s.run({STEPS}); print(s.log.hexdigest())"
    environ = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    other = subprocess.run(
        [sys.executable, "-c", code], env=environ, check=True, capture_output=True, text=True
    )
    assert other.stdout.strip() == log(7)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_million_steps():
    steps = 0
    for seed in itertools.count(10_000):
        steps += play([seed], 300)["steps"]
        if steps >= 10_000_000:
            break


# Planted bugs. Each takes the place of a method, and calls the right one.


def lose_a_reference(monkeypatch):
    right = BlockPool.release
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: right(self, blocks[1:]))


def free_shared_blocks(monkeypatch):
    right = BlockPool.release

    def release(self, blocks):
        for block in blocks:
            self._refs[block] = 1
        right(self, blocks)

    monkeypatch.setattr(BlockPool, "release", release)


def share_without_a_reference(monkeypatch):
    def acquire_cached(self, blocks):
        for block in blocks:
            self._cached.pop(block, None)
            self._refs[block] = max(self._refs[block], 1)

    monkeypatch.setattr(BlockPool, "acquire_cached", acquire_cached)


def evict_a_referenced_block(monkeypatch):
    def evict(self):
        block = next(iter(self._index.values()))
        self._cached.pop(block, None)
        del self._index[self._hashes[block]]
        self._hashes[block] = None
        self._refs[block] = 0
        return block

    monkeypatch.setattr(BlockPool, "_evict", evict)


def keep_an_evicted_hash(monkeypatch):
    right = BlockPool._evict

    def evict(self):
        index = dict(self._index)
        block = right(self)
        self._index = index
        return block

    monkeypatch.setattr(BlockPool, "_evict", evict)
    monkeypatch.setattr(BlockPool, "check", lambda self: None)
    monkeypatch.setattr(BlockPool, "is_registered", lambda self, block: False)


def forget_the_salt(monkeypatch):
    right = BlockPool.hash_block
    monkeypatch.setattr(
        BlockPool, "hash_block", lambda self, parent, tokens, salt: right(self, parent, tokens, "")
    )


def forget_the_parent(monkeypatch):
    right = BlockPool.hash_block
    monkeypatch.setattr(
        BlockPool, "hash_block", lambda self, parent, tokens, salt: right(self, None, tokens, salt)
    )


def register_a_block_before_it_is_full(monkeypatch):
    right = Scheduler._register

    def register(self, seq, num_full, *, seen, more=()):
        right(self, seq, num_full, seen=seen, more=more)
        if seen and len(seq.blocks) > num_full and self.pool.prefix_cache:
            block = seq.blocks[num_full]
            if not self.pool.is_registered(block):
                self.pool.register(block, b"%d" % self.pool._num_registered)

    monkeypatch.setattr(Scheduler, "_register", register)


def register_before_logits_were_seen(monkeypatch):
    right = Scheduler._register
    monkeypatch.setattr(
        Scheduler,
        "_register",
        lambda self, seq, full, *, seen, more=(): right(self, seq, full, seen=True, more=more),
    )


def register_what_a_step_in_flight_fills(monkeypatch):
    right = Scheduler._plan

    def plan(self, *args):
        made = right(self, *args)
        for seq in self._running:
            self._register(
                seq, min(seq.num_computed, len(seq.tokens)) // self.pool.block_size, seen=True
            )
        return made

    monkeypatch.setattr(Scheduler, "_plan", plan)


def register_the_blocks_of_an_earlier_admission(monkeypatch):
    monkeypatch.setattr(Scheduler, "_preempt", _with_epoch_kept(Scheduler._preempt))


def _with_epoch_kept(right):
    def preempt(self, seq):
        epoch = seq.epoch
        right(self, seq)
        seq.epoch = epoch

    return preempt


def take_the_whole_prompt_from_the_cache(monkeypatch):
    monkeypatch.setattr(
        Scheduler,
        "_cacheable_blocks",
        lambda self, seq: len(seq.tokens) // self.pool.block_size,
    )


def take_prompts_to_score_from_the_cache(monkeypatch):
    monkeypatch.setattr(
        Scheduler,
        "_cacheable_blocks",
        lambda self, seq: (len(seq.tokens) - 1) // self.pool.block_size,
    )


def skip_a_token_after_a_hit(monkeypatch):
    right = Scheduler._admit

    def admit(self, seq, *args):
        admitted = right(self, seq, *args)
        if admitted is not None and 0 < seq.num_computed < len(seq.tokens) - admitted[0]:
            seq.num_computed += 1
        return admitted

    monkeypatch.setattr(Scheduler, "_admit", admit)


def keep_a_burnt_row(monkeypatch):
    monkeypatch.setattr(module, "_FINISHED", Status.WAITING)


def drop_the_token_of_a_preempted_sequence(monkeypatch):
    right = Scheduler._preempt

    def preempt(self, seq):
        right(self, seq)
        seq.num_pending = 0

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def resume_before_the_last_token_is_read(monkeypatch):
    right = Scheduler._preempt

    def preempt(self, seq):
        right(self, seq)
        seq.resume_after = -1

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def preempt_without_taking_the_row_back(monkeypatch):
    right = Scheduler._preempt

    def preempt(self, seq):
        slot = seq.slot
        right(self, seq)
        seq.status, seq.slot = Status.RUNNING, slot

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def run_past_max_tokens(monkeypatch):
    right = Scheduler.add

    def add(self, request):
        seqs = right(self, request)
        for seq in seqs:
            seq.max_len += 1
        return seqs

    monkeypatch.setattr(Scheduler, "add", add)


def ignore_the_row_budget(monkeypatch):
    right = Scheduler._chunk
    monkeypatch.setattr(
        Scheduler,
        "_chunk",
        lambda self, seq, start, tokens, rows: right(self, seq, start, tokens, 99),
    )


def admit_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(BlockPool, "num_unreferenced", lambda self, blocks: -1)


def cut_prompts_that_a_step_would_hold(monkeypatch):
    monkeypatch.setattr(Scheduler, "_is_cut_needlessly", lambda self, *args: False)


def join_a_static_batch(monkeypatch):
    right = Scheduler.schedule

    def schedule(self, drafts=None):
        static = self.config
        self.config = dataclasses.replace(static, batching="continuous")
        plan = right(self)
        self.config = static
        return plan

    monkeypatch.setattr(Scheduler, "schedule", schedule)


def leave_the_followers_waiting(monkeypatch):
    monkeypatch.setattr(Scheduler, "_release_followers", lambda self, request_id: None)


def give_a_slot_out_twice(monkeypatch):
    right = Scheduler._unschedule

    def unschedule(self, seq):
        slot = seq.slot
        right(self, seq)
        if len(self._free_slots) > 2:
            self._free_slots[0] = slot

    monkeypatch.setattr(Scheduler, "_unschedule", unschedule)


def recover_without_clearing_the_cache(monkeypatch):
    right = Scheduler.recover

    def recover(self):
        reset, self.pool.reset = self.pool.reset, lambda: None
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, self.pool, "reset", reset)
            right(self)

    monkeypatch.setattr(Scheduler, "recover", recover)


def recover_and_hope_for_what_was_in_flight(monkeypatch):
    right = Scheduler.recover

    def recover(self):
        pending = {seq: seq.num_pending for seqs in self._requests.values() for seq in seqs}
        right(self)
        for seq, num_pending in pending.items():
            seq.num_pending = num_pending

    monkeypatch.setattr(Scheduler, "recover", recover)


def recover_without_counting_steps_as_read(monkeypatch):
    right = Scheduler.recover

    def recover(self):
        last_read = self._last_read
        right(self)
        self._last_read = last_read

    monkeypatch.setattr(Scheduler, "recover", recover)


def recover_without_the_steps_in_flight(monkeypatch):
    right = Scheduler.recover

    def recover(self):
        in_flight = self._in_flight.copy()
        right(self)
        self._in_flight.extend(in_flight)

    monkeypatch.setattr(Scheduler, "recover", recover)


def recover_by_forgetting_the_last_token(monkeypatch):
    right = Scheduler.recover

    def recover(self):
        for seq in self._running:
            if seq.num_output:
                seq.tokens.pop()
        right(self)

    monkeypatch.setattr(Scheduler, "recover", recover)


def resume_a_step_too_early(monkeypatch):
    right = Scheduler._preempt

    def preempt(self, seq):
        right(self, seq)
        seq.resume_after = self._last_step - 2

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def take_back_a_token_at_preemption(monkeypatch):
    right = Scheduler._preempt

    def preempt(self, seq):
        right(self, seq)
        if seq.num_output and not seq.num_pending:
            seq.tokens.pop()

    monkeypatch.setattr(Scheduler, "_preempt", preempt)


def preempt_the_first(monkeypatch):
    right = Scheduler._grow

    def grow(self, seq, num_tokens):
        missing = self._num_blocks(num_tokens) - len(seq.blocks)
        while missing > self.pool.num_free and self._running[0] is not seq:
            self._preempt(self._running[0])
        return right(self, seq, num_tokens)

    monkeypatch.setattr(Scheduler, "_grow", grow)


def queue_the_preempted_last(monkeypatch):
    right = RankedQueue.push

    def push(self, seq):
        if seq.num_preemptions:
            seq.order += 1_000
        right(self, seq)

    monkeypatch.setattr(RankedQueue, "push", push)


def admit_the_newest_first(monkeypatch):
    _admit_in_order_of(monkeypatch, lambda seq: -seq.order)


def admit_the_shortest_first(monkeypatch):
    _admit_in_order_of(monkeypatch, lambda seq: seq.prompt_len)


def _admit_in_order_of(monkeypatch, key):
    def in_order(self, now_s):
        while waiting := [s for _, s in self._heap if s.status is Status.WAITING]:
            yield min(waiting, key=key)

    def remove(self, seq):
        self._heap = sorted(entry for entry in self._heap if entry[1] is not seq)

    monkeypatch.setattr(RankedQueue, "in_order", in_order)
    monkeypatch.setattr(RankedQueue, "remove", remove)


def let_a_popular_prefix_go_first_for_ever(monkeypatch):
    right = PrefixQueue.in_order
    monkeypatch.setattr(PrefixQueue, "in_order", lambda self, now_s: right(self, float("-inf")))


def age_by_a_clock_that_was_read_once(monkeypatch):
    right = PrefixQueue.in_order

    def in_order(self, now_s):
        self._now_s = getattr(self, "_now_s", now_s)
        return right(self, self._now_s)

    monkeypatch.setattr(PrefixQueue, "in_order", in_order)


def never_believe_that_time_goes_back(monkeypatch):
    right = PrefixQueue.in_order

    def in_order(self, now_s):
        self._now_s = max(getattr(self, "_now_s", now_s), now_s)
        return right(self, self._now_s)

    monkeypatch.setattr(PrefixQueue, "in_order", in_order)


def remember_where_a_prefix_was(monkeypatch):
    right = BlockPool.match

    def match(self, hashes):
        memory = self.__dict__.setdefault("memory", {})
        hashes = tuple(hashes)
        found = right(self, hashes)
        if found:
            memory[hashes] = found
        return memory.get(hashes, found)

    monkeypatch.setattr(BlockPool, "match", match)


def register_under_the_hash_of_the_block_before(monkeypatch):
    right = BlockPool.register

    def register(self, block, block_hash):
        if block_hash not in self._index and self._num_registered % 5 == 4:
            block_hash = self.__dict__.get("last_hash", block_hash)
        right(self, block, block_hash)
        self.__dict__["last_hash"] = block_hash

    monkeypatch.setattr(BlockPool, "register", register)


def let_a_decode_wait_for_a_prompt(monkeypatch):
    right = Scheduler._plan

    def plan(self, decodes, chunks, *args):
        if decodes and any(rows for _, _, rows in chunks):
            decodes = decodes[:-1]
        return right(self, decodes, chunks, *args)

    monkeypatch.setattr(Scheduler, "_plan", plan)


def starve_the_first(monkeypatch):
    right = Scheduler._chunk

    def chunk(self, seq, start, tokens_left, rows_left):
        if len(self._running) > 1 and seq is self._running[0] and not seq.num_output:
            return 0, 0
        return right(self, seq, start, tokens_left, rows_left)

    monkeypatch.setattr(Scheduler, "_chunk", chunk)


def begin_cut_prompts_again(monkeypatch):
    right = Scheduler.commit

    def commit(self, plan, result):
        updates = right(self, plan, result)
        if self._running and 0 < self._running[-1].num_computed < self._running[-1].prompt_len:
            self._preempt(self._running[-1])
        return updates

    monkeypatch.setattr(Scheduler, "commit", commit)


def let_everybody_in_at_once(monkeypatch):
    monkeypatch.setattr(Scheduler, "_queue", lambda self, seq: self._waiting.push(seq))


def keep_out_for_ever(monkeypatch):
    right = Scheduler.restrict

    def restrict(self, only):
        held = self._held
        right(self, only)
        if only is None and held:
            self._waiting.forget(held[0])
            self._waiting = type(self)._make_queue(self)
            self._held = held

    monkeypatch.setattr(Scheduler, "restrict", restrict)


def score_the_prompt_of_a_moved_request_again(monkeypatch):
    right = Scheduler.add

    def add(self, request):
        seqs = right(self, request)
        for seq in seqs:
            seq.num_scored = 0
        return seqs

    monkeypatch.setattr(Scheduler, "add", add)


def begin_a_moved_request_anew(monkeypatch):
    right = Scheduler.add

    def add(self, request):
        seqs = right(self, request)
        for seq in seqs:
            del seq.tokens[seq.prompt_len :]
        return seqs

    monkeypatch.setattr(Scheduler, "add", add)


def keep_wrong_drafts(monkeypatch):
    def settle(self, seq, epoch, row, accepted):
        return right(self, seq, epoch, row, row.num_drafts)

    right = Scheduler._settle
    monkeypatch.setattr(Scheduler, "_settle", settle)


def take_right_drafts_back(monkeypatch):
    right = Scheduler._settle
    monkeypatch.setattr(
        Scheduler,
        "_settle",
        lambda self, seq, epoch, row, accepted: right(self, seq, epoch, row, 0),
    )


def take_drafts_back_from_a_preempted_sequence(monkeypatch):
    right = Scheduler._settle
    monkeypatch.setattr(
        Scheduler,
        "_settle",
        lambda self, seq, epoch, row, accepted: right(self, seq, seq.epoch, row, accepted),
    )


def register_wrong_drafts(monkeypatch):
    right = Scheduler._settle

    def settle(self, seq, epoch, row, accepted):
        right(self, seq, epoch, row, accepted)
        return row.start + row.num_tokens

    monkeypatch.setattr(Scheduler, "_settle", settle)


def hash_right_drafts_without_their_place(monkeypatch):
    right = Scheduler._hash_next_block

    def hash_next_block(self, seq, more=()):
        known = len(seq.tokens)
        if more and (len(seq.block_hashes) + 1) * self.pool.block_size > known:
            more = more[-1:] * len(more)
        right(self, seq, more)

    monkeypatch.setattr(Scheduler, "_hash_next_block", hash_next_block)


def schedule_while_drafts_are_in_flight(monkeypatch):
    right = Scheduler.schedule

    def schedule(self, drafts=None):
        for seq in self._running:
            if seq.num_verifying:
                seq.num_computed -= seq.num_verifying
                seq.num_verifying = 0
        return right(self, drafts)

    monkeypatch.setattr(Scheduler, "schedule", schedule)


def draft_past_the_end(monkeypatch):
    right = Scheduler._verify

    def verify(self, drafts, *rest):
        for seq in drafts:
            seq.max_len += 3
        try:
            return right(self, drafts, *rest)
        finally:
            for seq in drafts:
                seq.max_len -= 3

    monkeypatch.setattr(Scheduler, "_verify", verify)


def preempt_for_drafts(monkeypatch):
    monkeypatch.setattr(Scheduler, "_reserved_blocks", lambda self: -(10**6))


def draft_beyond_the_step(monkeypatch):
    right = Scheduler._verify

    def verify(self, drafts, decodes, grown, room):
        return right(self, drafts, decodes, grown, room + 4)

    monkeypatch.setattr(Scheduler, "_verify", verify)


def recover_with_drafts_still_in_flight(monkeypatch):
    right = Scheduler._unschedule

    def unschedule(self, seq):
        verifying = seq.num_verifying
        right(self, seq)
        seq.num_verifying = verifying

    monkeypatch.setattr(Scheduler, "_unschedule", unschedule)


def run_ahead_of_a_grammar(monkeypatch):
    right = Scheduler.schedule

    def schedule(self, drafts=None):
        return right(self, drafts, masks_late=True)

    monkeypatch.setattr(Scheduler, "schedule", schedule)


def leave_cached_tokens_out_of_a_mean(monkeypatch):
    def cacheable(self, seq):
        limit = seq.num_scored if self._is_scoring(seq) else len(seq.tokens) - 1
        return limit // self.pool.block_size

    monkeypatch.setattr(Scheduler, "_cacheable_blocks", cacheable)


BUGS = [
    lose_a_reference,
    free_shared_blocks,
    share_without_a_reference,
    evict_a_referenced_block,
    keep_an_evicted_hash,
    forget_the_salt,
    forget_the_parent,
    register_a_block_before_it_is_full,
    register_before_logits_were_seen,
    register_what_a_step_in_flight_fills,
    register_the_blocks_of_an_earlier_admission,
    take_the_whole_prompt_from_the_cache,
    take_prompts_to_score_from_the_cache,
    skip_a_token_after_a_hit,
    keep_a_burnt_row,
    drop_the_token_of_a_preempted_sequence,
    resume_before_the_last_token_is_read,
    preempt_without_taking_the_row_back,
    run_past_max_tokens,
    ignore_the_row_budget,
    admit_what_does_not_fit,
    cut_prompts_that_a_step_would_hold,
    join_a_static_batch,
    leave_the_followers_waiting,
    give_a_slot_out_twice,
    recover_without_clearing_the_cache,
    recover_and_hope_for_what_was_in_flight,
    recover_without_counting_steps_as_read,
    recover_without_the_steps_in_flight,
    recover_by_forgetting_the_last_token,
    resume_a_step_too_early,
    take_back_a_token_at_preemption,
    preempt_the_first,
    queue_the_preempted_last,
    admit_the_newest_first,
    admit_the_shortest_first,
    let_a_popular_prefix_go_first_for_ever,
    age_by_a_clock_that_was_read_once,
    never_believe_that_time_goes_back,
    remember_where_a_prefix_was,
    register_under_the_hash_of_the_block_before,
    let_a_decode_wait_for_a_prompt,
    starve_the_first,
    begin_cut_prompts_again,
    let_everybody_in_at_once,
    keep_out_for_ever,
    score_the_prompt_of_a_moved_request_again,
    begin_a_moved_request_anew,
    keep_wrong_drafts,
    take_right_drafts_back,
    take_drafts_back_from_a_preempted_sequence,
    register_wrong_drafts,
    hash_right_drafts_without_their_place,
    schedule_while_drafts_are_in_flight,
    draft_past_the_end,
    preempt_for_drafts,
    draft_beyond_the_step,
    recover_with_drafts_still_in_flight,
    run_ahead_of_a_grammar,
    leave_cached_tokens_out_of_a_mean,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.quick_cases(15)
def test_the_simulation_catches_a_planted_bug(bug, monkeypatch):
    bug(monkeypatch)
    steps = 0
    for seed in itertools.count():
        simulation = Simulation(seed)
        try:
            simulation.run(60)
        except (AssertionError, IndexError, KeyError):
            return
        steps += simulation.counts["steps"]
        assert steps < 30_000, "nobody noticed"
