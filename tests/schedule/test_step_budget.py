"""The budget of a step, from which its parts draw."""

from forge_jax.schedule.config import SchedulerConfig
from forge_jax.schedule.step_budget import StepBudget


def budget(tokens: int = 10, rows: int = 4, sequences: int = 2) -> StepBudget:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=tokens, max_rows=rows, max_model_len=100
    )
    return StepBudget(config, sequences)


def test_sampled_token_takes_a_token_and_a_row():
    left = budget(tokens=10, rows=4)
    assert left.sampled_tokens == 4
    left.take(8, 1)
    assert (left.tokens, left.rows, left.sampled_tokens) == (2, 3, 2)
    left.give_back(1, 1)
    assert (left.tokens, left.rows) == (3, 4)


def test_reserved_tokens_are_left_for_drafts():
    left = budget(tokens=10, rows=8)
    left.hold_back(7)
    assert left.tokens == 3
    left.take(3, 1)
    assert left.sampled_tokens == 0
    left.release_held_back()
    left.release_held_back()
    assert (left.tokens, left.sampled_tokens) == (7, 7)


def test_each_admission_takes_a_sequence():
    left = budget(sequences=2)
    left.take_sequence()
    assert (left.sequences, left.tokens) == (1, 10)
