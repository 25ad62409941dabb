"""Micro-batches: every row of a plan is in one of them, in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_jax.schedule.plan import Decodes, ScheduledSequence, SequenceResult, StepPlan
from forge_jax.step.micro_batches import joined_results, split_plan


@st.composite
def plans(draw):
    """Draw plans with decodes, verified drafts, scored prompts and prompt chunks."""
    num_decodes = draw(st.integers(0, 9))
    slots = iter(range(100))
    decodes = Decodes(
        slots=[next(slots) for _ in range(num_decodes)],
        starts=draw(st.lists(st.integers(0, 99), min_size=num_decodes, max_size=num_decodes)),
        tokens=list(range(1000, 1000 + num_decodes)),
        num_outputs=[1] * num_decodes,
        new_blocks=[(row, 3, 50 + row) for row in range(num_decodes) if draw(st.booleans())],
        seq_keys=[(f"d{row}", 0) for row in range(num_decodes)],
        salts=[""] * num_decodes,
    )
    chunks = []
    for number in range(draw(st.integers(0 if num_decodes else 1, 4))):
        kind = draw(st.sampled_from(["chunk", "end", "drafts", "scored"]))
        count = draw(st.integers(1, 20))
        chunks.append(
            ScheduledSequence(
                slot=next(slots),
                start=draw(st.integers(0, 50)),
                token_ids=tuple(range(number * 100, number * 100 + count)),
                num_rows={"chunk": 0, "end": 1, "drafts": count, "scored": count}[kind],
                samples=kind in ("end", "drafts"),
                new_blocks=((number, number + 10),),
                num_output=number,
                scoring=kind == "scored",
                seq_key=(f"c{number}", 0),
            )
        )
    plan = StepPlan(7, (), tuple(chunks), decodes)
    masks = np.arange(plan.num_rows)[:, None] if draw(st.booleans()) else None
    return StepPlan(7, (), tuple(chunks), decodes, masks)


def described(plan):
    """Return a plan's tokens with slot and position, its rows, and its new blocks."""
    tokens, rows, blocks = [], [], []
    for s in plan.sequences:
        tokens += [(s.slot, s.start + i, token) for i, token in enumerate(s.token_ids)]
        rows += [(s.slot, s.num_rows, s.samples, s.scoring)] * bool(s.num_rows or s.samples)
        blocks += [(s.slot, *each) for each in s.new_blocks]
    return tokens, rows, blocks


@given(plans(), st.integers(1, 5))
def test_micro_batches_have_all_of_a_plan_in_order(plan, count):
    batches = split_plan(plan, count)
    tokens, rows, blocks = described(plan)
    parts = [described(batch.plan) for batch in batches]
    assert [token for part in parts for token in part[0]] == tokens
    assert [row for part in parts for row in part[1]] == rows
    assert [block for part in parts for block in part[2]] == blocks
    assert all(batch.plan.num_tokens for batch in batches)
    if plan.masks is not None:
        assert np.concatenate([batch.plan.masks for batch in batches]).tolist() == (
            plan.masks.tolist()
        )


@given(plans(), st.integers(1, 5))
def test_results_of_micro_batches_are_those_of_the_plan(plan, count):
    def results(plan):
        return tuple(
            SequenceResult((s.slot, s.start + s.num_tokens)) if s.samples else SequenceResult()
            for s in plan.sequences
        )

    batches = split_plan(plan, count)
    joined = joined_results((batch, results(batch.plan)) for batch in batches)
    assert joined == results(plan)


@given(st.integers(1, 300), st.integers(1, 5))
def test_prompt_is_divided_into_equal_parts(num_tokens, count):
    chunk = ScheduledSequence(0, 5, tuple(range(num_tokens)), 1, True, (), 0)
    batches = split_plan(StepPlan(0, (), (chunk,)), count)
    sizes = [batch.plan.num_tokens for batch in batches]
    assert len(sizes) <= count and max(sizes) == -(-num_tokens // count)
    assert [batch.continues for batch in batches] == [True] * (len(sizes) - 1) + [False]
    assert [batch.plan.num_rows for batch in batches] == [0] * (len(sizes) - 1) + [1]


@pytest.mark.parametrize("num_rows", [4, 5])
def test_verified_and_scored_tokens_stay_together(num_rows):
    drafts = ScheduledSequence(0, 5, (1, 2, 3, 4, 5), num_rows, True, (), 0)
    scored = ScheduledSequence(1, 0, (1, 2, 3, 4, 5), num_rows, False, (), 0, scoring=True)
    batches = split_plan(StepPlan(0, (), (drafts, scored)), 5)
    assert [batch.plan.chunks for batch in batches] == [(drafts,), (scored,)]
