"""The scheduler under all events at once, and planted bugs that the simulation must detect."""

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys

import pytest
from simulation import Simulation, play

from forge_jax.schedule import live_requests, planner
from forge_jax.schedule.admission import AdmissionPart
from forge_jax.schedule.backlog import Backlog
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.commit import Committer
from forge_jax.schedule.decodes import DecodePart
from forge_jax.schedule.drafts import DraftPart
from forge_jax.schedule.host_tier import HostTier
from forge_jax.schedule.in_flight import InFlight
from forge_jax.schedule.lifecycle import RUNNING, WAITING, Status
from forge_jax.schedule.loading import Loading
from forge_jax.schedule.policy import PrefixQueue, RankedQueue
from forge_jax.schedule.prefill import PrefillPart
from forge_jax.schedule.prefix_cache import PrefixCache
from forge_jax.schedule.request import Sequence
from forge_jax.schedule.scheduler import Scheduler
from forge_jax.schedule.slots import Slots
from forge_jax.schedule.step_budget import StepBudget

STEPS = 150  # with troubles, per seed; serving the rest takes about a third more
SEEDS = 1_200
AT_ONCE = 100


@pytest.mark.parametrize("first_seed", range(0, SEEDS, AT_ONCE))
@pytest.mark.quick_cases(4)
def test_every_output_matches_the_oracle_under_all_events(first_seed):
    counts = play(range(first_seed, first_seed + AT_ONCE), STEPS)
    assert counts["steps"] * SEEDS / AT_ONCE > 200_000
    # The troubles occurred; otherwise the simulation would prove nothing.
    troubles = ("preemptions", "cached", "faults", "refused", "victims", "cache resets")
    troubles += ("restrictions", "releases", "moves", "drafts", "accepted drafts", "masks")
    troubles += ("pooled", "activations", "short steps", "loads", "loaded", "lost")
    errors = ("error:dispatch", "error:read", "error:after commit")
    clock = ("clock forwards", "clock backwards", "aged", "gave way")
    switches = ("static batches", "cut anyway", "whole prompts")
    for what in (*troubles, *errors, *clock, *switches):
        assert counts[what] > 20, what
    for reason in ("stop", "length", "abort", "error"):
        assert counts[f"ended:{reason}"] > 20, reason
    for status in RUNNING | WAITING:
        assert counts[f"runs with {status.value}"] > 5, status


def test_seed_determines_a_whole_run():
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
def test_ten_million_steps_keep_the_invariants():
    steps = 0
    for seed in itertools.count(10_000):
        steps += play([seed], 300)["steps"]
        if steps >= 10_000_000:
            break


# Planted bugs. Each replaces a method, which is its first argument `right`.

BUGS = []


def in_place_of(owner, name):
    """Return a decorator that adds to BUGS a replacement of `owner.name`."""

    def add(bug):
        def plant(monkeypatch):
            right = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *args, **kwargs: bug(right, *args, **kwargs))

        plant.__name__ = bug.__name__
        BUGS.append(plant)
        return plant

    return add


def together(*plants):
    """Add a bug that consists of several replacements."""

    def plant(monkeypatch):
        for each in plants:
            each(monkeypatch)

    plant.__name__ = plants[0].__name__
    BUGS[:] = [bug for bug in BUGS if bug not in plants] + [plant]


# ---- the block pool ------------------------------------------------------------------------------


@in_place_of(BlockPool, "release")
def lose_a_reference(right, self, blocks):
    right(self, blocks[1:])


@in_place_of(BlockPool, "release")
def free_shared_blocks(right, self, blocks):
    for block in blocks:
        self._refs[block] = 1
    right(self, blocks)


@in_place_of(BlockPool, "acquire_cached")
def share_without_a_reference(right, self, blocks):
    for block in blocks:
        self._cached.pop(block, None)
        self._refs[block] = max(self._refs[block], 1)


@in_place_of(BlockPool, "_evict")
def evict_a_referenced_block(right, self):
    block = next(iter(self._index.values()))
    self._cached.pop(block, None)
    del self._index[self._hashes[block]]
    self._hashes[block] = None
    self._refs[block] = 0
    return block


@in_place_of(BlockPool, "_evict")
def keep_an_evicted_hash(right, self):
    index = dict(self._index)
    block = right(self)
    self._index = index
    return block


@in_place_of(BlockPool, "check")
def check_nothing(right, self):
    pass


@in_place_of(BlockPool, "is_registered")
def call_all_blocks_unregistered(right, self, block):
    return False


together(keep_an_evicted_hash, check_nothing, call_all_blocks_unregistered)


@in_place_of(BlockPool, "hash_block")
def forget_the_salt(right, self, parent, tokens, salt):
    return right(self, parent, tokens, "")


@in_place_of(BlockPool, "hash_block")
def forget_the_parent(right, self, parent, tokens, salt):
    return right(self, None, tokens, salt)


@in_place_of(BlockPool, "num_unreferenced")
def admit_what_does_not_fit(right, self, blocks):
    return -1


@in_place_of(BlockPool, "match")
def remember_where_a_prefix_was(right, self, hashes):
    memory = self.__dict__.setdefault("memory", {})
    hashes = tuple(hashes)
    found = right(self, hashes)
    if found:
        memory[hashes] = found
    return memory.get(hashes, found)


@in_place_of(BlockPool, "register")
def register_under_the_hash_of_the_block_before(right, self, block, block_hash):
    if block_hash not in self._index and self._num_registered % 5 == 4:
        block_hash = self.__dict__.get("last_hash", block_hash)
    right(self, block, block_hash)
    self.__dict__["last_hash"] = block_hash


# ---- the prefix cache ----------------------------------------------------------------------------


@in_place_of(PrefixCache, "register")
def register_a_block_before_it_is_full(right, self, seq, num_full, *, seen, more=()):
    right(self, seq, num_full, seen=seen, more=more)
    pool = self._pool
    if seen and len(seq.blocks) > num_full and pool.prefix_cache:
        block = seq.blocks[num_full]
        if not pool.is_registered(block):
            pool.register(block, b"%d" % pool._num_registered)


@in_place_of(PrefixCache, "register")
def register_before_logits_were_seen(right, self, seq, num_full, *, seen, more=()):
    right(self, seq, num_full, seen=True, more=more)


@in_place_of(Scheduler, "schedule")
def register_what_a_step_in_flight_fills(right, self, drafts=None):
    plan = right(self, drafts)
    for seq in self.running:
        full = min(seq.num_computed, len(seq.tokens)) // self.pool.block_size
        self.prefixes.register(seq, full, seen=True)
    return plan


@in_place_of(PrefixCache, "cacheable_blocks")
def take_the_whole_prompt_from_the_cache(right, self, seq):
    return len(seq.tokens) // self._pool.block_size


@in_place_of(PrefixCache, "cacheable_blocks")
def take_prompts_to_score_from_the_cache(right, self, seq):
    return (len(seq.tokens) - 1) // self._pool.block_size


@in_place_of(PrefixCache, "cacheable_blocks")
def leave_cached_tokens_out_of_a_mean(right, self, seq):
    limit = seq.num_scored if seq.scoring else len(seq.tokens) - 1
    return limit // self._pool.block_size


@in_place_of(PrefixCache, "cacheable_blocks")
def leave_cached_tokens_out_of_activations(right, self, seq):
    num_returned, seq.num_returned = seq.num_returned, None
    try:
        return right(self, seq)
    finally:
        seq.num_returned = num_returned


@in_place_of(PrefillPart, "row")
def return_activations_again_after_a_preemption(right, self, chunk):
    row = right(self, chunk)
    if row.num_returned and chunk.seq.num_output:
        row.num_returned = row.num_tokens
    return row


@in_place_of(PrefixCache, "hash_next_block")
def hash_right_drafts_without_their_place(right, self, seq, more=()):
    if more and (len(seq.block_hashes) + 1) * self._pool.block_size > len(seq.tokens):
        more = more[-1:] * len(more)
    right(self, seq, more)


# ---- host memory ---------------------------------------------------------------------------------


@in_place_of(Scheduler, "transfers")
def reuse_a_block_before_its_copy_is_taken(right, self):
    transfers = right(self)
    late, self.late = getattr(self, "late", []), transfers.saves
    transfers.saves = late
    return transfers


@in_place_of(HostTier, "has")
def hit_before_a_copy_has_finished(right, self, block_hash):
    return block_hash in self._copies


@in_place_of(Loading, "begin")
def use_blocks_before_they_are_loaded(right, self, seq, hit):
    waits = right(self, seq, hit)
    if waits and self._loads:
        number = next(reversed(self._loads))
        self._prefixes.register_loaded(seq, len(hit), self._loads[number].blocks)
    return waits


@in_place_of(Loading, "finish")
def lose_the_blocks_of_an_aborted_load(right, self, numbers):
    for number in numbers:
        if self._loads[number].seq.finished:
            self._loads[number].blocks = []
    right(self, numbers)


@in_place_of(Loading, "forget")
def wait_for_loads_that_a_recovery_dropped(right, self):
    self._loads.clear()


@in_place_of(HostTier, "saved")
def use_the_copy_of_another_block(right, self, numbers):
    right(self, numbers)
    stored = [copy for copy in self._copies.values() if copy.stored]
    if len(stored) > 1:
        stored[0].number, stored[1].number = stored[1].number, stored[0].number


# ---- requests, and the backlog -----------------------------------------------------------------


@in_place_of(Scheduler, "add")
def run_past_max_tokens(right, self, request):
    seqs = right(self, request)
    for seq in seqs:
        seq.max_len += 1
    return seqs


@in_place_of(Scheduler, "add")
def score_the_prompt_of_a_moved_request_again(right, self, request):
    seqs = right(self, request)
    for seq in seqs:
        seq.num_scored = 0
    return seqs


@in_place_of(live_requests, "first_returned")
def return_the_prompt_of_a_moved_request_again(right, request, index, num_output):
    return right(request, index, 0)


@in_place_of(Scheduler, "add")
def begin_a_moved_request_anew(right, self, request):
    seqs = right(self, request)
    for seq in seqs:
        del seq.tokens[seq.prompt_len :]
    return seqs


@in_place_of(Backlog, "release_followers")
def leave_the_followers_waiting(right, self, request_id):
    pass


@in_place_of(Backlog, "push")
def let_everybody_in_at_once(right, self, seq):
    self.queue.push(seq)


@in_place_of(Backlog, "restrict")
def keep_out_for_ever(right, self, only, waiting):
    waiting = list(waiting)
    held = [seq for seq in waiting if seq.status is Status.HELD]
    right(self, only, [seq for seq in waiting if only is not None or seq not in held[:1]])


@in_place_of(RankedQueue, "push")
def queue_the_preempted_last(right, self, seq):
    if seq.num_preemptions:
        seq.order += 1_000
    right(self, seq)


def _queued(queue):
    return [seq for _, seq in queue._heap if seq.status is Status.QUEUED]


@in_place_of(RankedQueue, "in_order")
def admit_the_newest_first(right, self, now_s):
    while queued := _queued(self):
        yield min(queued, key=lambda seq: -seq.order)


@in_place_of(RankedQueue, "in_order")
def admit_the_shortest_first(right, self, now_s):
    while queued := _queued(self):
        yield min(queued, key=lambda seq: seq.prompt_len)


@in_place_of(RankedQueue, "remove")
def remove_from_anywhere(right, self, seq):
    self._heap = sorted(entry for entry in self._heap if entry[1] is not seq)


together(admit_the_newest_first, remove_from_anywhere)
together(admit_the_shortest_first, remove_from_anywhere)


@in_place_of(PrefixQueue, "in_order")
def let_a_popular_prefix_go_first_for_ever(right, self, now_s):
    return right(self, float("-inf"))


@in_place_of(PrefixQueue, "in_order")
def age_by_a_clock_that_was_read_once(right, self, now_s):
    self._now_s = getattr(self, "_now_s", now_s)
    return right(self, self._now_s)


@in_place_of(PrefixQueue, "in_order")
def never_believe_that_time_goes_back(right, self, now_s):
    self._now_s = max(getattr(self, "_now_s", now_s), now_s)
    return right(self, self._now_s)


# ---- slots, preemption and recovery --------------------------------------------------------------


@in_place_of(Slots, "preempt")
def register_the_blocks_of_an_earlier_admission(right, self, seq):
    epoch = seq.epoch
    right(self, seq)
    seq.epoch = epoch


@in_place_of(Slots, "preempt")
def drop_the_token_of_a_preempted_sequence(right, self, seq):
    right(self, seq)
    seq.num_pending = 0


@in_place_of(Slots, "preempt")
def resume_before_the_last_token_is_read(right, self, seq):
    right(self, seq)
    seq.resume_after = -1


@in_place_of(Slots, "preempt")
def resume_a_step_too_early(right, self, seq):
    right(self, seq)
    seq.resume_after = self.in_flight.last_scheduled - 2


@in_place_of(Slots, "preempt")
def preempt_without_taking_the_row_back(right, self, seq):
    slot, status = seq.slot, seq.status
    right(self, seq)
    seq.status, seq.slot = status, slot


@in_place_of(Slots, "preempt")
def take_back_a_token_at_preemption(right, self, seq):
    right(self, seq)
    if seq.num_output and not seq.num_pending:
        seq.tokens.pop()


@in_place_of(Slots, "grow")
def preempt_the_first(right, self, seq, num_tokens):
    missing = self.blocks_for(num_tokens) - len(seq.blocks)
    while missing > self.pool.num_free and self.running[0] is not seq:
        self.preempt(self.running[0])
    return right(self, seq, num_tokens)


@in_place_of(Slots, "reserved_blocks")
def preempt_for_drafts(right, self):
    return -(10**6)


@in_place_of(Slots, "admit")
def give_a_slot_out_twice(right, self, seq, blocks, *, num_shared):
    right(self, seq, blocks, num_shared=num_shared)
    if len(self.free) > 2:
        self.free[0] = seq.slot


@in_place_of(Scheduler, "commit")
def begin_cut_prompts_again(right, self, plan, result):
    updates = right(self, plan, result)
    if self.running and 0 < self.running[-1].num_computed < self.running[-1].prompt_len:
        self.slots.preempt(self.running[-1])
    return updates


@in_place_of(Scheduler, "recover")
def recover_without_clearing_the_cache(right, self):
    reset, self.pool.reset = self.pool.reset, lambda: None
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, self.pool, "reset", reset)
        right(self)


@in_place_of(Scheduler, "recover")
def recover_and_hope_for_what_was_in_flight(right, self):
    pending = {seq: seq.num_pending for seq in (*self.running, *self.waiting())}
    right(self)
    for seq, num_pending in pending.items():
        seq.num_pending = num_pending


@in_place_of(InFlight, "forget")
def recover_without_counting_steps_as_read(right, self):
    last_read = self.last_read
    right(self)
    self.last_read = last_read


@in_place_of(InFlight, "forget")
def recover_without_the_steps_in_flight(right, self):
    self.last_read = self.last_scheduled


@in_place_of(Scheduler, "recover")
def recover_by_forgetting_the_last_token(right, self):
    for seq in self.running:
        if seq.num_output:
            seq.tokens.pop()
    right(self)


# ---- the lifecycle of a sequence -----------------------------------------------------------------


@in_place_of(Sequence, "requeue")
def recover_with_drafts_still_in_flight(right, self):
    verifying = self.status is Status.VERIFYING
    right(self)
    if verifying:
        self.num_computed = 1


@in_place_of(Sequence, "prefill")
def decode_before_the_prompt_is_computed(right, self, num_tokens):
    samples = right(self, num_tokens)
    if self.status is Status.PREFILLING and self.num_computed + 2 == self.num_tokens:
        self.status = Status.DECODING
    return samples


@in_place_of(Sequence, "settle")
def stop_after_drafts(right, self, num_accepted):
    right(self, num_accepted)
    self.status = Status.DRAINING


@in_place_of(Sequence, "settle")
def take_right_drafts_back(right, self, num_accepted):
    right(self, 0)


@in_place_of(planner, "decode")
def sample_one_token_too_many(right, seqs):
    draining = [seq for seq in seqs if seq.num_computed + 2 >= seq.max_len]
    right(seqs)
    for seq in draining:
        seq.status = Status.DECODING


@in_place_of(planner, "decode")
def drain_a_token_too_early(right, seqs):
    right(seqs)
    for seq in seqs:
        if seq.num_computed + 2 == seq.max_len:
            seq.status = Status.DRAINING


# ---- plans ---------------------------------------------------------------------------------------


@in_place_of(AdmissionPart, "fill")
def skip_a_token_after_a_hit(right, self, plan, *args):
    running = len(plan.chunks)
    right(self, plan, *args)
    for seq, num_tokens, _, _ in plan.chunks[running:]:
        if 0 < seq.num_computed < len(seq.tokens) - num_tokens:
            seq.num_computed += 1


@in_place_of(PrefillPart, "chunk_size")
def ignore_the_row_budget(right, self, seq, start, budget, config):
    many = StepBudget(dataclasses.replace(config, max_rows=99))
    many.tokens = budget.tokens
    return right(self, seq, start, many, config)


@in_place_of(PrefillPart, "chunk_size")
def starve_the_first(right, self, seq, start, budget, config):
    running = self._slots.running
    if len(running) > 1 and seq is running[0] and not seq.num_output:
        return 0, 0
    return right(self, seq, start, budget, config)


@in_place_of(PrefillPart, "is_cut_needlessly")
def cut_prompts_that_a_step_would_hold(right, self, *args):
    return False


@in_place_of(Scheduler, "schedule")
def join_a_static_batch(right, self, drafts=None):
    static = self.config
    self.config = dataclasses.replace(static, batching="continuous")
    plan = right(self)
    self.config = static
    return plan


@in_place_of(DecodePart, "columns")
def let_a_decode_wait_for_a_prompt(right, self, plan):
    if plan.decodes and any(chunk.num_rows for chunk in plan.chunks):
        plan.decodes.pop()
        plan.grown = [new for new in plan.grown if new[0] < len(plan.decodes)]
    return right(self, plan)


@in_place_of(Scheduler, "schedule")
def run_ahead_of_a_grammar(right, self, drafts=None):
    return right(self, drafts, masks_late=True)


@in_place_of(StepBudget, "hold_back")
def hold_back_tokens_that_decodes_have_taken(right, self, tokens):
    right(self, -tokens)


# ---- drafts and results --------------------------------------------------------------------------


@in_place_of(Scheduler, "schedule")
def schedule_while_drafts_are_in_flight(right, self, drafts=None):
    for seq in self.running:
        if seq.status is Status.VERIFYING:
            seq.status = Status.DECODING
    return right(self, drafts)


@in_place_of(DraftPart, "fill")
def draft_past_the_end(right, self, plan, drafts):
    for seq in drafts:
        seq.max_len += 3
    try:
        right(self, plan, drafts)
    finally:
        for seq in drafts:
            seq.max_len -= 3


@in_place_of(DraftPart, "fill")
def draft_beyond_the_step(right, self, plan, drafts):
    plan.budget.give_back(4, 4)
    right(self, plan, drafts)


@in_place_of(Committer, "commit")
def keep_a_burnt_row(right, self, step, plan, results):
    burnt = [seq for seq in step.seqs if seq.finished]
    for seq in burnt:
        seq.status = Status.QUEUED
    updates = right(self, step, plan, results)
    for seq in burnt:
        seq.status = Status.FINISHED
    return updates


@in_place_of(Committer, "_settle")
def keep_wrong_drafts(right, self, seq, holds_blocks, row, num_accepted):
    return right(self, seq, holds_blocks, row, row.num_drafts)


@in_place_of(Committer, "_settle")
def take_drafts_back_from_a_preempted_sequence(right, self, seq, holds_blocks, row, num_accepted):
    return right(self, seq, True, row, num_accepted)


@in_place_of(Committer, "_settle")
def register_wrong_drafts(right, self, seq, holds_blocks, row, num_accepted):
    right(self, seq, holds_blocks, row, num_accepted)
    return row.start + row.num_tokens


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.quick_cases(15)
def test_simulation_detects_a_planted_bug(bug, monkeypatch):
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
