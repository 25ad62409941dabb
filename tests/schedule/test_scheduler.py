import subprocess
import sys

import pytest
from loop import Loop, output, scheduled

from forge_jax.errors import ContextLengthError, RequestError
from forge_jax.schedule.plan import FED_BACK

# ---- one sequence, one step ahead ---------------------------------------------------------------


def test_prompt_is_computed_and_continued():
    loop = Loop()
    seq = loop.add_one([1, 2, 3], max_tokens=4)
    loop.run()
    assert output(seq) == [4, 5, 6, 7]
    assert (seq.finish_reason, seq.stop_reason) == ("length", None)


def test_unread_token_is_fed_back_on_the_device():
    loop = Loop()
    seq = loop.add_one([1, 2, 3], max_tokens=4)
    prefill, decode = loop.step(), loop.step()
    assert scheduled(prefill, seq).token_ids == (1, 2, 3)
    assert scheduled(decode, seq).token_ids == (FED_BACK,)
    assert scheduled(decode, seq).start == 3
    assert [got.token_ids for _, got in loop.updates] == [(4,)]


def test_no_row_is_scheduled_past_max_tokens():
    loop = Loop()
    loop.add_one([1, 2, 3], max_tokens=4)
    assert sum(plan.num_rows for plan in loop.run()) == 4


def test_no_row_is_scheduled_past_the_context():
    loop = Loop(max_model_len=6)
    seq = loop.add_one([1, 2, 3])
    assert sum(plan.num_rows for plan in loop.run()) == 3
    assert len(seq.tokens) == 6
    assert seq.finish_reason == "length"


def test_stop_wastes_one_row_that_is_discarded():
    loop = Loop(eos_token_ids=frozenset({5}))
    seq = loop.add_one([1, 2, 3])
    rows = sum(plan.num_rows for plan in loop.run())
    assert output(seq) == [4, 5]
    assert rows == 3
    assert loop.pool.num_used == 0


def test_wasted_row_never_reaches_the_slots_next_sequence():
    loop = Loop(max_num_seqs=1, eos_token_ids=frozenset({5}))
    first = loop.add_one([3])
    second = loop.add_one([100, 101], max_tokens=3)
    loop.run()
    assert output(first) == [4, 5]
    assert output(second) == [102, 103, 104]


def test_schedule_returns_none_without_work():
    loop = Loop()
    assert loop.scheduler.schedule() is None
    assert not loop.scheduler.has_work


def test_out_of_order_commit_raises():
    loop = Loop()
    loop.add_one([1], max_tokens=9)
    plans = [loop.scheduler.schedule() for _ in range(2)]
    results = [loop.device.read(loop.device.dispatch(plan)) for plan in plans]
    with pytest.raises(AssertionError, match="in the order"):
        loop.scheduler.commit(plans[1], results[1])


# ---- how a sequence ends -------------------------------------------------------------------------


def test_eos_ends_without_a_stop_reason_and_stays_in_the_tokens():
    loop = Loop(eos_token_ids=frozenset({6}))
    seq = loop.add_one([3])
    loop.run()
    assert output(seq) == [4, 5, 6]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", None)


def test_stop_token_id_is_the_stop_reason():
    loop = Loop()
    seq = loop.add_one([3], stop_token_ids=[5, 9])
    loop.run()
    assert (output(seq), seq.finish_reason, seq.stop_reason) == ([4, 5], "stop", 5)


def test_ignore_eos_keeps_stop_token_ids():
    loop = Loop(eos_token_ids=frozenset({5}))
    seq = loop.add_one([3], stop_token_ids=[7], ignore_eos=True)
    loop.run()
    assert (output(seq), seq.stop_reason) == ([4, 5, 6, 7], 7)


def test_ignored_eos_given_as_stop_token_id_is_the_stop_reason():
    loop = Loop(eos_token_ids=frozenset({5}))
    seq = loop.add_one([3], stop_token_ids=[5], ignore_eos=True)
    loop.run()
    assert (seq.finish_reason, seq.stop_reason) == ("stop", 5)


def test_stop_in_the_last_allowed_token_is_a_stop():
    loop = Loop(eos_token_ids=frozenset({5}))
    seq = loop.add_one([3], max_tokens=2)
    loop.run()
    assert seq.finish_reason == "stop"


def test_stop_waits_for_min_tokens():
    # The device must not sample an EOS token there, so counting continues without it.
    loop = Loop(eos_token_ids=frozenset({5, 8}))
    seq = loop.add_one([3], min_tokens=3)
    loop.run()
    assert output(seq) == [4, 6, 7, 8]


def test_max_tokens_zero_computes_the_prompt_and_ends():
    loop = Loop()
    seq = loop.add_one(range(10), max_tokens=0)
    loop.run()
    assert (output(seq), seq.finish_reason) == ([], "length")
    assert loop.add_one(range(10), max_tokens=1).request is not None
    loop.run()
    assert loop.pool.hit_tokens == 8  # it can warm the cache


def test_caller_ends_a_sequence_at_a_stop_string():
    loop = Loop()
    seq = loop.add_one([1, 2], max_tokens=50)
    loop.step()
    loop.step()
    loop.scheduler.finish(seq, "stop", "four")
    assert not loop.scheduler.has_work
    assert loop.pool.num_used == 0
    loop.run()
    assert output(seq) == [3]
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "four")


def test_stop_string_in_the_last_token_replaces_the_reason():
    loop = Loop()
    seq = loop.add_one([1, 2], max_tokens=1)
    loop.run()
    loop.scheduler.finish(seq, "stop", "three")
    assert (seq.finish_reason, seq.stop_reason) == ("stop", "three")


# ---- abort ---------------------------------------------------------------------------------------


def test_abort_frees_at_once_and_drops_steps_in_flight():
    loop = Loop()
    seqs = loop.add(range(10), n=3, max_tokens=50)
    for _ in range(3):
        loop.step()
    assert loop.scheduler.abort("r1") == seqs
    assert loop.pool.num_used == 0 and not loop.scheduler.has_work
    lengths = [len(seq.tokens) for seq in seqs]
    loop.step()
    assert loop.updates == []
    assert [len(seq.tokens) for seq in seqs] == lengths
    assert {seq.finish_reason for seq in seqs} == {"abort"}


def test_abort_removes_a_waiting_request_from_the_queue():
    loop = Loop(max_num_seqs=1)
    loop.add_one([1], max_tokens=3)
    waiting = loop.add_one([2], max_tokens=3)
    loop.step()
    loop.scheduler.abort(waiting.request_id)
    assert loop.scheduler.num_waiting == 0
    loop.run()
    assert output(waiting) == []


def test_abort_of_an_unknown_or_finished_request_is_ignored():
    loop = Loop()
    seq = loop.add_one([1], max_tokens=1)
    loop.run()
    assert loop.scheduler.abort(seq.request_id) == loop.scheduler.abort("who") == []
    assert seq.finish_reason == "length"


def test_queue_of_aborted_requests_does_not_grow():
    loop = Loop(max_num_seqs=1)
    loop.add_one([1], max_tokens=100)
    loop.step()
    for _ in range(1000):
        loop.scheduler.abort(loop.add_one([2]).request_id)
    assert loop.scheduler.num_waiting == 0
    assert len(loop.scheduler.backlog.queue._heap) < 200


# ---- rejections ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_len", "params", "param"),
    [
        (20, {}, "prompt"),
        (20, {"max_tokens": 1}, "prompt"),
        (10, {"max_tokens": 11}, "max_tokens"),
    ],
)
def test_prompt_beyond_the_context_is_rejected(prompt_len, params, param):
    loop = Loop(max_model_len=20)
    with pytest.raises(ContextLengthError) as error:
        loop.add_one(range(prompt_len), **params)
    assert error.value.param == param


def test_prompt_that_just_fits_the_context_is_served():
    loop = Loop(max_model_len=20)
    assert len(loop.add_one(range(10), max_tokens=10).tokens) == 10
    loop.add_one(range(19))
    loop.add_one(range(20), max_tokens=0)
    loop.run()


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(13, None), (13, 1), (12, 2), (4, 10)])
def test_request_beyond_the_block_pool_is_rejected(prompt_len, max_tokens):
    loop = Loop(num_blocks=3, block_size=4)
    with pytest.raises(ContextLengthError):
        loop.add_one(range(prompt_len), max_tokens=max_tokens)


def test_max_tokens_defaults_to_the_rest_of_context_and_pool():
    assert Loop(max_model_len=20).add_one(range(5)).max_tokens == 15
    # The last token needs no KV, because nothing comes after it.
    loop = Loop(num_blocks=3, block_size=4)
    seq = loop.add_one(range(5))
    assert seq.max_tokens == 8
    loop.run()
    assert seq.num_output == 8


def test_empty_prompt_is_rejected():
    with pytest.raises(RequestError, match="empty"):
        Loop().add_one([])


def test_request_id_is_unique_among_unfinished_requests():
    loop = Loop()
    loop.add_one([1], request_id="x", max_tokens=1)
    with pytest.raises(RequestError, match="in use"):
        loop.add_one([1], request_id="x")
    loop.run()
    loop.add_one([1], request_id="x")


def test_output_may_use_the_rest_of_the_context():
    loop = Loop(max_model_len=20)
    assert loop.add_one([1]).max_tokens == 19
    assert loop.scheduler.request_ids() == ["r1"]


# ---- budgets and chunks --------------------------------------------------------------------------


def test_long_prompt_is_cut_to_the_token_budget():
    loop = Loop(max_num_batched_tokens=8)
    seq = loop.add_one(range(20), max_tokens=1)
    rows = [scheduled(plan, seq) for plan in loop.run()]
    assert [(row.start, row.num_tokens, row.num_rows) for row in rows] == [
        (0, 8, 0),
        (8, 8, 0),
        (16, 4, 1),
    ]


def test_prompt_takes_at_most_the_chunk_size_per_step():
    loop = Loop(prefill_chunk_size=5)
    first, second = loop.add_one(range(12), max_tokens=1), loop.add_one(range(12), max_tokens=1)
    plan = loop.step()
    assert [scheduled(plan, seq).num_tokens for seq in (first, second)] == [5, 5]


def test_decodes_come_first_and_never_wait_for_a_prompt():
    loop = Loop(max_num_batched_tokens=8, prefix_cache=False)
    decoding = [loop.add_one([i], max_tokens=30) for i in range(4)]
    loop.step()
    prompt = loop.add_one(range(100), max_tokens=1)
    for _ in range(5):
        plan = loop.step()
        assert [row.num_tokens for row in plan.sequences] == [1, 1, 1, 1, 4]
        assert all(scheduled(plan, seq) for seq in decoding)
        assert plan.sequences[-1].seq_key == prompt.key


def test_single_prompt_token_is_placed_with_the_decodes():
    loop = Loop(max_num_batched_tokens=10, prefix_cache=False)
    loop.add_one(range(18), max_tokens=1)
    loop.step()
    loop.add_one([7], max_tokens=2)
    plan = loop.step()
    assert [row.num_tokens for row in plan.sequences] == [1, 8]


def test_rows_are_limited():
    loop = Loop(max_rows=2)
    seqs = [loop.add_one([i, i], max_tokens=3) for i in range(5)]
    assert max(plan.num_rows for plan in loop.run()) == 2
    assert all(len(output(seq)) == 3 for seq in seqs)


def test_slots_are_limited():
    loop = Loop(max_num_seqs=2)
    for i in range(5):
        loop.add_one([i], max_tokens=5)
    loop.step()
    assert (loop.scheduler.num_running, loop.scheduler.num_waiting) == (2, 3)


# ---- blocks --------------------------------------------------------------------------------------


def test_blocks_come_with_admission_and_then_one_by_one():
    loop = Loop(block_size=4)
    seq = loop.add_one(range(6), max_tokens=5)
    plans = loop.run()
    assert len(plans[0].admissions[0].block_table) == 2
    additions = [scheduled(plan, seq).new_blocks for plan in plans]
    assert [len(new) for new in additions] == [0, 0, 0, 1, 0]
    assert additions[3][0][0] == 2


def test_chunked_prompt_gets_blocks_as_needed():
    loop = Loop(block_size=4, prefill_chunk_size=4)
    loop.add_one(range(12), max_tokens=1)
    plans = loop.run()
    assert len(plans[0].admissions[0].block_table) == 1
    assert [len(plan.sequences[0].new_blocks) for plan in plans] == [0, 1, 1]


def test_contiguous_kv_gives_each_sequence_one_block():
    loop = Loop(num_blocks=4, block_size=64, max_model_len=64, max_num_seqs=4)
    seqs = [loop.add_one(range(i, i + 20)) for i in range(4)]
    loop.step()
    assert loop.scheduler.num_running == 4
    loop.run()
    assert all(len(seq.tokens) == 64 for seq in seqs)
    assert loop.scheduler.num_preemptions == 0


def test_newest_sequence_is_preempted_without_losing_tokens():
    loop = Loop(num_blocks=6, block_size=4, prefix_cache=False)
    old, new = (loop.add_one([first, first], max_tokens=20) for first in (0, 500))
    loop.run()
    assert output(old) == list(range(1, 21))
    assert output(new) == list(range(501, 521))
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert loop.scheduler.num_preemptions == 1


def test_token_in_flight_at_preemption_is_kept():
    loop = Loop(num_blocks=6, block_size=4, prefix_cache=False)
    loop.add_one([0, 0], max_tokens=20)
    new = loop.add_one([500, 500], max_tokens=20)
    while not loop.scheduler.num_preemptions:
        before = new.num_output
        loop.step()
    assert new.slot is None and not new.blocks
    assert (new.num_output, new.num_pending) == (before + 1, 0)


def test_preempted_sequence_returns_through_the_prefix_cache():
    loop = Loop(num_blocks=7, block_size=4)
    old = loop.add_one([0, 0], max_tokens=16)
    new = loop.add_one([500, 500], max_tokens=16)
    plans = loop.run()
    assert new.num_preemptions == 1
    (again,) = [a for plan in plans[1:] for a in plan.admissions]
    assert again.seq_key == new.key
    assert list(again.tokens) == new.tokens[: len(again.tokens)]
    assert loop.pool.hit_tokens > 0
    assert new.num_cached == 0  # found at the first admission
    assert len(output(old)) == len(output(new)) == 16


def test_priority_preempts_the_lowest_class_even_if_it_came_first():
    loop = Loop(num_blocks=6, block_size=4, prefix_cache=False, policy="priority")
    low = loop.add_one([0, 0], max_tokens=20, priority=1)
    high = loop.add_one([500, 500], max_tokens=20, priority=0)
    loop.run()
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)


def test_decode_yields_to_an_older_prompt_within_the_same_step():
    loop = Loop(num_blocks=6, block_size=4, prefix_cache=False, prefill_chunk_size=4)
    old = loop.add_one(range(20), max_tokens=1)
    loop.step()
    # Force a newer one in: admission would have reserved the blocks for the prompt.
    loop.scheduler.slots.reserved_blocks = lambda: 0
    new = loop.add_one([500, 501, 502], max_tokens=9)
    loop.run()
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert output(new) == list(range(503, 512))


def test_prompt_preempted_by_an_older_one_skips_that_step():
    loop = Loop(num_blocks=6, block_size=4, prefix_cache=False, prefill_chunk_size=4)
    old = loop.add_one(range(20), max_tokens=1)
    loop.step()
    loop.scheduler.slots.reserved_blocks = lambda: 0
    new = loop.add_one(range(500, 516), max_tokens=1)
    plans = loop.run()
    assert (old.num_preemptions, new.num_preemptions) == (0, 1)
    assert (output(old), output(new)) == ([20], [516])
    assert [len(plan.sequences) for plan in plans][:3] == [2, 2, 1]


def test_admission_leaves_each_running_sequence_a_block_to_grow():
    loop = Loop(num_blocks=4, block_size=4, prefix_cache=False)
    loop.add_one(range(8), max_tokens=8)
    loop.step()
    second = loop.add_one(range(8), max_tokens=1)
    loop.step()
    assert second.slot is None  # two blocks are free, and the first will need one of them
    loop.run()
    assert loop.scheduler.num_preemptions == 0


def test_admission_leaves_a_running_prompt_its_remaining_blocks():
    loop = Loop(num_blocks=6, block_size=4, prefill_chunk_size=4, prefix_cache=False)
    loop.add_one(range(20), max_tokens=1)
    loop.step()
    second = loop.add_one(range(8), max_tokens=1)
    loop.run()
    assert second.num_preemptions == loop.scheduler.num_preemptions == 0


def test_waiting_sequence_that_does_not_fit_is_not_overtaken():
    loop = Loop(num_blocks=4, block_size=4, prefix_cache=False)
    loop.add_one(range(8), max_tokens=8)
    loop.step()
    big, small = loop.add_one(range(12), max_tokens=1), loop.add_one([1], max_tokens=1)
    loop.step()
    assert big.slot is None and small.slot is None


# ---- prefix cache --------------------------------------------------------------------------------


def test_repeated_prompt_is_computed_from_its_first_uncached_token():
    loop = Loop(block_size=4)
    loop.add_one(range(10), max_tokens=1)
    loop.run()
    again = loop.add_one(range(10), max_tokens=1)
    row = scheduled(loop.step(), again)
    assert (row.start, row.token_ids, again.num_cached) == (8, (8, 9), 8)
    assert loop.pool.hit_tokens == 8
    assert loop.pool.queried_tokens == 20


def test_last_token_is_computed_even_if_all_is_cached():
    loop = Loop(block_size=4)
    for _ in range(2):
        seq = loop.add_one(range(8), max_tokens=1)
        plans = loop.run()
    assert (seq.num_cached, plans[0].num_tokens) == (4, 4)


def test_output_is_cached():
    loop = Loop(block_size=4)
    first = loop.add_one(range(4), max_tokens=6)
    loop.run()
    again = loop.add_one(first.tokens, max_tokens=1)
    loop.run()
    assert again.num_cached == 8


def test_blocks_of_another_salt_are_not_used():
    loop = Loop(block_size=4)
    for salt in ("a", "b"):
        seq = loop.add_one(range(10), max_tokens=1, salt=salt)
        loop.run()
        assert seq.num_cached == 0


def test_blocks_in_use_are_shared():
    loop = Loop(block_size=4)
    first = loop.add_one(range(10), max_tokens=20)
    loop.step()
    loop.step()
    second = loop.add_one(range(10), max_tokens=20)
    loop.step()
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert loop.pool.ref_count(first.blocks[0]) == 2


def test_blocks_are_found_only_after_their_step_was_read():
    loop = Loop(block_size=4)
    loop.add_one(range(10), max_tokens=20)
    loop.step()
    second = loop.add_one(range(10), max_tokens=20)
    loop.step()
    assert second.num_cached == 0


def test_numerical_fault_ends_only_its_request():
    loop = Loop(fault=lambda scheduled: scheduled.seq_key == ("r1", 0) and scheduled.start == 4)
    bad, good = loop.add_one([1, 2, 3], max_tokens=9), loop.add_one([7, 8, 9], max_tokens=9)
    faults = []
    while loop.scheduler.has_work:
        loop.step()
        faults += [seq for seq, got in loop.updates if got.fault]
    assert faults == [bad]
    assert bad.finish_reason == "error"
    assert (output(bad), len(output(good))) == ([4, 5], 9)
    assert loop.pool.num_used == 0


def test_blocks_of_a_faulty_prompt_are_never_found():
    # The fault is in the first chunk, which has no logits that would show it.
    loop = Loop(prefill_chunk_size=4, fault=lambda scheduled: scheduled.seq_key == ("r1", 0))
    bad = loop.add_one(range(12), max_tokens=2)
    loop.run()
    assert bad.finish_reason == "error"
    good = loop.add_one(range(12), max_tokens=2)
    loop.run()
    assert (good.num_cached, good.finish_reason) == (0, "length")


# ---- several samples -----------------------------------------------------------------------------


def test_full_step_does_not_look_at_the_queue(monkeypatch):
    loop = Loop(policy="prefix", max_num_batched_tokens=8)
    looked = []
    match = loop.pool.match
    monkeypatch.setattr(loop.pool, "match", lambda hashes: looked.append(1) or match(hashes))
    loop.add_one(range(40), max_tokens=1)
    loop.step()
    admission = len(looked)
    for _ in range(3):
        loop.add_one(range(40), max_tokens=1)
    for _ in range(3):  # the prompt takes all tokens of four steps
        loop.step()
    assert len(looked) == admission
    loop.step()
    loop.step()
    assert len(looked) > admission


def test_samples_wait_for_the_first_to_compute_the_shared_prompt():
    loop = Loop(block_size=4, next_token=None)
    seqs = loop.add(range(10), n=3, max_tokens=5)
    assert loop.step().num_tokens == 10
    assert loop.scheduler.num_waiting == 2
    plan = loop.step()
    assert [row.seq_key[1] for row in plan.sequences] == [0]
    plan = loop.step()
    assert [row.num_tokens for row in plan.sequences] == [1, 2, 2]
    loop.run()
    assert [seq.num_cached for seq in seqs] == [0, 8, 8]
    assert len({tuple(output(seq)) for seq in seqs}) == 3  # each has its own noise


@pytest.mark.parametrize(("prompt_len", "prefix_cache"), [(4, True), (10, False)])
def test_samples_without_a_shareable_prompt_start_at_once(prompt_len, prefix_cache):
    loop = Loop(block_size=4, prefix_cache=prefix_cache)
    loop.add(range(prompt_len), n=3, max_tokens=5)
    assert len(loop.step().sequences) == 3


def test_sample_may_be_aborted_before_it_starts():
    loop = Loop()
    seqs = loop.add(range(10), n=3, max_tokens=5)
    loop.step()
    loop.scheduler.finish(seqs[1], "abort")
    assert loop.scheduler.num_waiting == 1
    loop.run()
    assert [len(output(seq)) for seq in seqs] == [5, 0, 5]


def test_samples_continue_if_the_first_one_fails():
    loop = Loop(fault=lambda scheduled: scheduled.seq_key == ("r1", 0))
    seqs = loop.add(range(10), n=3, max_tokens=5)
    loop.run()
    assert [seq.finish_reason for seq in seqs] == ["error", "length", "length"]


def test_request_without_a_seed_draws_one():
    seeds = set()
    loop = Loop()
    for _ in range(2):
        seeds |= {seq.seed for seq in loop.add([1], n=2, request_seed=None)}
    assert len(seeds) == 4


def test_seed_parameter_fixes_every_samples_seed():
    loop = Loop()
    seqs = [loop.add([1], n=2, seed=seed, request_seed=None) for seed in (7, 7, 8)]
    first, same, other = ([seq.seed for seq in of_request] for of_request in seqs)
    assert first == same != other


# ---- scoring -------------------------------------------------------------------------------------


def score(loop, seq):
    scores = []
    while loop.scheduler.has_work:
        loop.step()
        scores += [s for of, got in loop.updates if of is seq for s in got.prompt_logprobs or ()]
    return [logprob.token_id for logprob in scores]


def test_scoring_gives_a_logprob_for_each_prompt_token_but_the_first():
    loop = Loop(max_rows=4)
    seq = loop.add_one(range(10), prompt_logprobs=1, max_tokens=0)
    assert score(loop, seq) == list(range(1, 10))
    assert seq.finish_reason == "length"


def test_scoring_can_be_combined_with_sampling():
    loop = Loop(max_rows=4)
    seq = loop.add_one(range(10), prompt_logprobs=0, max_tokens=3)
    assert score(loop, seq) == list(range(1, 10))
    assert output(seq) == [10, 11, 12]


def test_scoring_takes_a_row_per_token_after_the_decodes():
    loop = Loop(max_rows=4, prefix_cache=False)
    decoding = loop.add_one([1], max_tokens=30)
    loop.step()
    loop.add_one(range(10), prompt_logprobs=1, max_tokens=1)
    for _ in range(3):
        plan = loop.step()
        assert scheduled(plan, decoding)
        assert plan.num_rows == 4


def test_scoring_recomputes_a_cached_prefix():
    loop = Loop()
    loop.add_one(range(10), max_tokens=1)
    loop.run()
    seq = loop.add_one(range(10), prompt_logprobs=1, max_tokens=1)
    assert score(loop, seq) == list(range(1, 10))
    assert seq.num_cached == 0


def test_preempted_scoring_request_gives_each_logprob_once():
    loop = Loop(num_blocks=8, block_size=4, max_rows=3, policy="priority", prefix_cache=False)
    scored = loop.add_one(range(20), prompt_logprobs=1, max_tokens=2, priority=1)
    scores = []
    for _ in range(4):
        loop.step()
        scores += [s.token_id for _, got in loop.updates for s in got.prompt_logprobs or ()]
    assert len(scores) == 9 and scored.num_scored == 9
    loop.scheduler.slots.preempt(scored)
    scores += score(loop, scored)
    assert scores == list(range(1, 20))


def test_only_the_first_sample_scores_the_prompt():
    loop = Loop()
    seqs = loop.add(range(10), n=2, prompt_logprobs=1, max_tokens=1)
    assert score(loop, seqs[0]) == list(range(1, 10))
    assert seqs[1].num_cached == 8


# ---- recovery ------------------------------------------------------------------------------------


def test_recomputation_after_a_failed_step_gives_the_same_tokens():
    def serve(fails: bool):
        loop = Loop(next_token=None)
        seqs = [*loop.add(range(10), n=2, max_tokens=12), loop.add_one([3], max_tokens=12)]
        for _ in range(5):
            loop.step()
        if fails:
            loop._in_flight = None
            loop.scheduler.recover()
            loop.device.reset()
            assert loop.scheduler.num_waiting == 3
        loop.run()
        return [seq.tokens for seq in seqs]

    assert serve(fails=True) == serve(fails=False)


# ---- dependencies -------------------------------------------------------------------------------


def test_scheduling_imports_no_jax():
    code = (
        "import sys, forge_jax.schedule.scheduler, forge_jax.testing;"
        "sys.exit('jax' in sys.modules or 'asyncio' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---- the switches --------------------------------------------------------------------------------


def test_static_batching_admits_only_when_nothing_runs():
    loop = Loop(batching="static", max_num_seqs=2)
    seqs = [loop.add_one([10 * i], max_tokens=3 + i) for i in range(5)]
    batches, ran_before = [], 0
    while loop.scheduler.has_work:
        plan = loop.step()
        if plan is not None and plan.admissions:
            assert ran_before == 0
            batches.append([admission.seq_key for admission in plan.admissions])
        ran_before = loop.scheduler.num_running
    keys = [seq.key for seq in seqs]
    assert batches == [keys[:2], keys[2:4], keys[4:]]
    assert [len(output(seq)) for seq in seqs] == [3, 4, 5, 6, 7]


def test_continuous_batching_fills_a_free_slot_at_once():
    loop = Loop(batching="continuous", max_num_seqs=2)
    for i in range(3):
        loop.add_one([10 * i], max_tokens=3 + 10 * (i == 0))
    plans = loop.run()
    joined = [len(plan.sequences) for plan in plans if plan.admissions]
    assert joined == [2, 2]  # the third joined a running batch


def test_samples_of_a_request_are_one_static_batch():
    loop = Loop(batching="static")
    loop.add(range(30), n=3, max_tokens=4)
    assert len(loop.step().admissions) == 3


def test_unchunked_prompt_waits_for_a_step_that_holds_it():
    loop = Loop(chunked_prefill=False, max_num_batched_tokens=20)
    loop.add_one(range(100, 112), max_tokens=3)
    second = loop.add_one(range(12), max_tokens=3)
    third = loop.add_one([500], max_tokens=3)
    plans = loop.run()
    assert [[row.num_tokens for row in plan.sequences] for plan in plans[:2]] == [[12], [1, 1, 12]]
    assert scheduled(plans[1], third) is not None
    assert output(second) == [12, 13, 14]


def test_unchunked_prompt_at_the_head_is_not_overtaken():
    loop = Loop(chunked_prefill=False, max_num_batched_tokens=20)
    loop.add_one([100], max_tokens=6)
    whole = loop.add_one(range(20), max_tokens=2)  # needs a separate step
    late = loop.add_one([200], max_tokens=2)
    plans = loop.run()
    rows = [[row.seq_key for row in plan.sequences] for plan in plans if scheduled(plan, whole)]
    assert rows[0] == [whole.key]
    assert plans.index(next(p for p in plans if scheduled(p, late))) > 5
    assert (output(whole), output(late)) == ([20, 21], [201, 202])


def test_unchunked_prompt_larger_than_any_step_is_cut():
    loop = Loop(chunked_prefill=False, max_num_batched_tokens=8)
    seq = loop.add_one(range(20), max_tokens=2)
    plans = loop.run()
    assert [plan.num_tokens for plan in plans] == [8, 8, 4, 1]
    assert output(seq) == [20, 21]
