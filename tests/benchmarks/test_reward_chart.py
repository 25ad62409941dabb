"""The chart of docs/rollouts.md, and the transcript that it is made from."""

import pytest

from benchmarks import reward_chart


def test_committed_chart_matches_the_committed_transcript():
    steps = reward_chart.steps_of(reward_chart.TRANSCRIPT.read_text())
    expected = "run `python -m benchmarks.reward_chart`"
    assert reward_chart.CHART.read_text() == reward_chart.chart(steps), expected


def test_committed_run_is_on_policy_and_learns():
    steps = reward_chart.steps_of(reward_chart.TRANSCRIPT.read_text())
    assert {kl for _, kl in steps} == {0.0}
    rewards = [reward for reward, _ in steps]
    assert sum(rewards[-20:]) > sum(rewards[:20])


@pytest.mark.parametrize("transcript", ["", "step   1  reward 0.5  KL 0.0"])
def test_transcript_without_steps_is_rejected(transcript):
    with pytest.raises(ValueError, match="lacks steps"):
        reward_chart.steps_of(transcript)
