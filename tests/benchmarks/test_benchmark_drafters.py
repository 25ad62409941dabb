"""`benchmarks.drafters`: the replay's arithmetic, and a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq

import pytest

from benchmarks import drafters
from benchmarks.drafters import Sample, play
from forge_jax.speculate.drafter import Draft

pytestmark = pytest.mark.slow

SAMPLE = Sample([1, 2, 3], list(range(100, 130)))
WHOLE = SAMPLE.prompt + SAMPLE.output


class Guess:
    """A drafter that follows a rule of the number of known tokens."""

    def __init__(self, rule: Callable[[int], list[int]]):
        self._rule = rule

    def propose(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> Draft:
        ids = self._rule(len(tokens))
        return Draft(tuple(ids), (0.5,) * len(ids))

    def ingest(self, limit: int) -> bool:
        return False

    def end(self, key: Hashable, tokens: Seq[int], prompt_len: int, salt: str) -> None:
        assert list(tokens) == WHOLE


@pytest.mark.parametrize(
    ("rule", "steps", "share"),
    [
        (lambda known: [], 30, None),
        (lambda known: [7, 7], 30, 0.0),
        (lambda known: WHOLE[known : known + 5], 5, None),
        (lambda known: [*WHOLE[known : known + 1], 7], 15, 0.5),
    ],
)
def test_step_outputs_accepted_drafts_and_one_more_token(rule, steps, share):
    played = play(Guess(rule), [SAMPLE])
    assert (played["steps"], played["tokens"]) == (steps, 30)
    assert played["tokens_per_step"] == 30 / steps
    if share is not None:
        assert played["accepted_share"] == share


def test_confidence_counts_only_reached_tokens():
    played = play(Guess(lambda known: [*WHOLE[known : known + 1], 7, 7]), [SAMPLE])
    # 15 right drafts, each followed by a wrong one except in the last step, which has one token
    # left.
    assert played["right_by_confidence"] == {"0.5": {"count": 29, "share": round(15 / 29, 3)}}


def test_run_writes_a_report(tmp_path, monkeypatch, capsys):
    text = "the cat sat on the mat and the cat sat on the hat. " * 60
    made = {"made up": [Sample([5], list(text.encode()[:200]))] * 2}
    monkeypatch.setattr(drafters, "workloads", lambda encode, text: made)
    monkeypatch.setattr(drafters, "_python_and_prose", lambda: text * 2)
    monkeypatch.setattr(drafters, "CONTEXTS", (50, 600))
    file = tmp_path / "report.json"
    monkeypatch.setattr(
        "sys.argv", ["drafters", "--output", str(file), "--only", "cost", "acceptance"]
    )
    assert drafters.main() == 0
    report = json.loads(file.read_text())
    assert report["benchmark"] == "drafters"
    assert {at["context"] for cost in report["cost"] for at in cost["contexts"]} == {50, 600}
    assert all(run["tokens_per_step"] > 2 for run in report["acceptance"])
    assert "| made up | suffix |" in capsys.readouterr().out
