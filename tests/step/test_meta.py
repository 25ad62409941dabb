"""Packing of a plan: column decodes and row decodes give the same bytes."""

import random

import numpy as np
import pytest

from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.plan import FED_BACK, Decodes, ScheduledSequence, StepPlan
from forge_jax.step import inputs as meta
from forge_jax.step.inputs import SlotFlags, StepShape

MAX_BLOCKS = 16


def random_decodes(rng: random.Random, slots: list[int]) -> Decodes:
    rows = range(len(slots))
    return Decodes(
        slots=slots,
        starts=[rng.randrange(100) for _ in rows],
        tokens=[rng.choice((FED_BACK, rng.randrange(50))) for _ in rows],
        num_outputs=[rng.randrange(9) for _ in rows],
        new_blocks=[(row, rng.randrange(16), rng.randrange(99)) for row in rows if row % 3 == 1],
        seq_keys=[(f"r{row}", 0) for row in rows],
        salts=[""] * len(slots),
    )


def random_chunk(rng: random.Random, slot: int) -> ScheduledSequence:
    num_tokens = rng.randint(1, 9)
    num_rows = rng.randint(0, num_tokens)
    scoring = num_rows > 1 and rng.random() < 0.5
    return ScheduledSequence(
        slot=slot,
        start=rng.randrange(100),
        token_ids=tuple(rng.randrange(50) for _ in range(num_tokens)),
        num_rows=num_rows,
        samples=num_rows > 0,
        new_blocks=tuple((i, rng.randrange(99)) for i in range(rng.randrange(2))),
        num_output=rng.randrange(9),
        scoring=scoring,
        targets=tuple(range(num_rows - 1)) if scoring else (),
    )


@pytest.mark.parametrize("num_chunks", [0, 1, 4])
@pytest.mark.parametrize("num_decodes", [0, 1, 7])
def test_column_decodes_are_packed_like_rows(num_decodes, num_chunks):
    rng = random.Random(10 * num_decodes + num_chunks)
    shape = StepShape.mixed(64, max_num_seqs=12, max_rows=40, block_size=8)
    for _ in range(20):
        slots = rng.sample(range(30), num_decodes + num_chunks)
        decodes = random_decodes(rng, slots[:num_decodes])
        chunks = tuple(random_chunk(rng, slot) for slot in slots[num_decodes:])
        columns = StepPlan(0, (), chunks, decodes)
        rows = StepPlan(0, (), columns.sequences)
        assert shape.fits(columns) and shape.fits(rows)
        packed = shape.pack(columns, 5, MAX_BLOCKS)
        np.testing.assert_array_equal(packed, shape.pack(rows, 5, MAX_BLOCKS))
        assert packed.dtype == np.int32 and packed.shape == (shape.width,)


def test_plan_fits_by_its_sums():
    rng = random.Random(0)
    shape = StepShape.decode(4)
    four = StepPlan(0, (), (), random_decodes(rng, [0, 1, 2, 3]))
    assert shape.fits(four)
    assert not shape.fits(StepPlan(0, (), (), random_decodes(rng, [0, 1, 2, 3, 4])))
    single = ScheduledSequence(9, 0, (1,), 1, True, (), 0)
    assert not shape.fits(StepPlan(0, (), (single,), four.decodes))
    assert shape.fits(StepPlan(0, (), (single,), random_decodes(rng, [0, 1])))
    assert not shape.fits(StepPlan(0, (), (ScheduledSequence(9, 0, (1, 2), 1, True, (), 0),)))


@pytest.mark.parametrize("in_columns", [True, False])
def test_step_flags_follow_its_slots(in_columns):
    flags = SlotFlags(8)
    flags.admit(0, SamplingParams(temperature=0))
    flags.admit(1, SamplingParams(temperature=1, top_k=5))
    flags.admit(2, SamplingParams(temperature=0, min_tokens=4, max_tokens=9))
    flags.admit(3, SamplingParams(temperature=0, logprobs=1, presence_penalty=1.0))
    flags.admit(4, SamplingParams(temperature=0, logit_bias={1: 2.0}))

    def of(*slots: int, num_output: int = 4) -> int:
        n = len(slots)
        decodes = Decodes(
            slots=slots,
            starts=[9] * n,
            tokens=[1] * n,
            num_outputs=[num_output] * n,
            seq_keys=[("r", 0)] * n,
            salts=[""] * n,
        )
        plan = StepPlan(0, (), (), decodes)
        return flags.of_step(plan if in_columns else StepPlan(0, (), plan.sequences))

    assert of(0) == 0
    assert of(0, 1) == meta.RANDOM | meta.FILTER
    assert of(2) == 0
    assert of(0, 2, num_output=3) == meta.MIN_TOKENS
    assert of(3, 4) == meta.LOGPROBS | meta.PENALTIES | meta.BIAS
    flags.admit(2, SamplingParams(temperature=0))
    assert of(2, num_output=0) == 0
    scores = ScheduledSequence(0, 0, (1, 2), 2, False, (), 0, scoring=True, targets=(2,))
    assert flags.of_step(StepPlan(0, (), (scores,))) == meta.LOGPROBS
