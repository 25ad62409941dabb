"""The fake device's checks: each wrong plan is rejected."""

import dataclasses
import struct

import pytest
from loop import Loop

from forge_jax import testing
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.plan import FED_BACK, Admission, ScheduledSequence, StepPlan
from forge_jax.testing import POOLED_SIZE, FakeDevice

PARAMS = SamplingParams(max_tokens=10)


def device(**options) -> FakeDevice:
    defaults = {"num_blocks": 8, "block_size": 2, "max_num_seqs": 2}
    return FakeDevice(**{**defaults, **options})


def admission(slot=0, blocks=(0, 1), tokens=(5, 6, 7), key="a") -> Admission:
    return Admission(slot, 1, PARAMS, (), len(tokens), blocks, tokens, (key, 0))


def row(slot=0, start=0, tokens=(5, 6, 7), samples=True, new_blocks=(), key="a", salt=""):
    return ScheduledSequence(
        slot=slot,
        start=start,
        token_ids=tokens,
        num_rows=int(samples),
        samples=samples,
        new_blocks=new_blocks,
        num_output=max(0, start + len(tokens) - 3),
        seq_key=(key, 0),
        salt=salt,
    )


def run(fake: FakeDevice, *sequences, admissions=()):
    return fake.read(fake.dispatch(StepPlan(0, tuple(admissions), sequences))).sequences


def test_next_token_depends_only_on_prefix_and_seed():
    whole, chunked = device(), device()
    (first,) = run(whole, row(), admissions=[admission()])
    run(chunked, row(tokens=(5, 6), samples=False), admissions=[admission()])
    (second,) = run(chunked, row(start=2, tokens=(7,)))
    assert first.token_ids == second.token_ids
    assert list(first.token_ids) == device().continuation((5, 6, 7), PARAMS, 1, (), 1)
    assert device().continuation((5, 6, 7), PARAMS, 2, (), 8) != device().continuation(
        (5, 6, 7), PARAMS, 1, (), 8
    )


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooled_vectors_depend_only_on_the_positions(pooling):
    tokens, ask = (5, 6, 7), {"samples": False, "num_rows": 1, "pooling": pooling}

    def pooled(fake, *parts) -> list[float]:
        results = [
            run(fake, part, admissions=[admission()] if part is parts[0] else ())[0].pooled
            for part in parts
        ]
        assert results[:-1] == [None] * (len(parts) - 1)
        return list(struct.unpack(f"<{POOLED_SIZE}f", results[-1]))

    whole = pooled(device(), dataclasses.replace(row(), **ask))
    assert whole == pytest.approx(device().pooled(tokens, pooling), abs=1e-6)
    first = dataclasses.replace(row(tokens=(5, 6)), **ask | {"num_rows": 0})
    second = dataclasses.replace(row(start=2, tokens=(7,)), **ask)
    assert pooled(device(), first, second) == whole
    lost = pooled(device(check=False), second)
    assert (lost == pytest.approx(whole)) is (pooling == "last")


def test_last_token_is_fed_back():
    fake = device()
    tokens = list(run(fake, row(), admissions=[admission()])[0].token_ids)
    tokens += run(fake, row(start=3, tokens=(FED_BACK,)))[0].token_ids
    assert tokens == fake.continuation((5, 6, 7), PARAMS, 1, (), 2)


@pytest.mark.parametrize(
    ("message", "sequence"),
    [
        ("holds nothing", row(start=2, tokens=(7,))),
        ("nothing to feed back", row(tokens=(5, 6, FED_BACK))),
        ("wrong token", row(tokens=(5, 6, 8))),
        ("samples too early", row(tokens=(5, 6))),
        ("runs in the slot of", row(key="b")),
        ("skips to position", row(start=4, tokens=(9,))),
        ("gap", row(new_blocks=((3, 4),))),
        ("is empty", row(slot=1)),
    ],
)
def test_wrong_plan_is_rejected(message, sequence):
    with pytest.raises(AssertionError, match=message):
        run(device(), sequence, admissions=[admission(slot=0)] if sequence.slot == 0 else [])


def test_another_sequences_kv_is_rejected():
    fake = device()
    run(fake, row(), admissions=[admission()])
    other = admission(slot=1, blocks=(0, 2), tokens=(5, 9, 7), key="b")
    with pytest.raises(
        AssertionError, match="block 0 holds the KV of another prefix at position 1"
    ):
        run(fake, row(slot=1, start=2, tokens=(7,), key="b"), admissions=[other])


def test_kv_of_equal_tokens_after_another_prefix_is_rejected():
    fake = device()
    run(fake, row(), admissions=[admission()])
    mixed = admission(slot=1, blocks=(4, 1), tokens=(9, 9, 7), key="c")
    run(fake, row(slot=1, tokens=(9, 9), samples=False, key="c"), admissions=[mixed])
    fake._slots[1].computed = 3  # as if block 1, which holds 7 at position 2, were a hit
    with pytest.raises(AssertionError, match="another prefix at position 2"):
        run(fake, row(slot=1, start=3, tokens=(1,), key="c"))


def test_kv_of_another_salt_is_rejected():
    fake = device()
    run(fake, row(salt="a"), admissions=[admission()])
    with pytest.raises(AssertionError, match="another prefix"):
        run(
            fake,
            row(slot=1, start=2, tokens=(7,), key="b", salt="b"),
            admissions=[admission(slot=1, blocks=(0, 2), key="b")],
        )


def test_write_to_a_shared_or_cached_block_is_rejected():
    pool = BlockPool(8, 2)
    blocks = tuple(pool.allocate(2) or ())
    fake = device(pool=pool)
    pool.register(blocks[1], b"hash")
    with pytest.raises(AssertionError, match="is in the prefix cache"):
        run(fake, row(), admissions=[admission(blocks=blocks)])


def test_write_to_a_free_block_is_rejected():
    pool = BlockPool(8, 2)
    with pytest.raises(AssertionError, match="0 owners"):
        run(device(pool=pool), row(), admissions=[admission()])


def test_write_past_the_block_table_is_rejected():
    with pytest.raises(AssertionError, match="no block for 2"):
        run(device(), row(), admissions=[admission(blocks=(0,))])


def test_preempted_sequence_must_return_with_all_its_tokens():
    fake = device()
    run(fake, row(), admissions=[admission()])
    with pytest.raises(AssertionError, match="other tokens"):
        run(fake, row(), admissions=[admission()])


def test_long_chunks_before_single_tokens_are_rejected():
    admissions = [admission(), admission(slot=1, blocks=(2,), tokens=(5,), key="b")]
    with pytest.raises(AssertionError, match="single tokens"):
        run(device(), row(), row(slot=1, tokens=(5,), key="b"), admissions=admissions)


def test_eos_tokens_are_not_sampled_before_min_tokens():
    params = SamplingParams(min_tokens=20)
    fake = device(vocab_size=4, eos_token_id=1, eos_probability=0.5)
    tokens = fake.continuation((0,), params, 7, (1, 2), 40)
    assert not {1, 2} & set(tokens[:20])
    assert 1 in tokens[20:]


def test_checked_and_unchecked_devices_give_the_same_tokens():
    outputs = []
    for check in (True, False):
        loop = Loop(next_token=None, num_blocks=12)
        loop.device._check = check
        seqs = [loop.add_one(range(i, i + 9), max_tokens=20, logprobs=2) for i in range(4)]
        loop.run()
        outputs.append([seq.tokens for seq in seqs])
    assert outputs[0] == outputs[1]


def test_requested_logprobs_come_with_each_token():
    loop = Loop(next_token=None)
    seq = loop.add_one([1, 2, 3], max_tokens=3, logprobs=2)
    logprobs = []
    while loop.scheduler.has_work:
        loop.step()
        logprobs += [entry for _, got in loop.updates for entry in got.logprobs or ()]
    assert [entry.token_id for entry in logprobs] == seq.tokens[3:]
    assert {len(entry.top) for entry in logprobs} == {2}


class Clock:
    """Stands for the module `time`."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


def test_steps_take_their_time_one_after_the_other(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(testing, "time", clock)
    fake = device(step_time_s=1.0)
    plan = StepPlan(0, (admission(),), (row(),))
    after = dataclasses.replace(plan, admissions=(), chunks=(row(start=3, tokens=(-1,)),))
    pending = [fake.dispatch(plan), fake.dispatch(after)]
    ends = [clock.now_s]
    for handle in pending:
        fake.read(handle)
        ends.append(clock.now_s)
    assert ends == [0.0, 1.0, 2.0]  # dispatch does not wait
