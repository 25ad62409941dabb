"""`benchmarks.speculation`: its arithmetic, its arguments, and a run with a draft model."""

from __future__ import annotations

import itertools
import json
from typing import Any, ClassVar

import pytest

from benchmarks import speculation
from benchmarks.speculation import OFF, Run, main, run_load, run_questions, run_usual, summary
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.request import Request
from training.forge_tiny import DRAFT


def run(wall_s: float, steps: int, *, accepted: int = 0, tokens=(1, 2, 3, 4)) -> Run:
    return Run(
        wall_s=wall_s,
        decode_s=wall_s / 2,
        steps=steps,
        drafts=steps,
        draft_tokens=2 * steps,
        accepted=accepted,
        tokens={"a": tuple(tokens)},
    )


def test_speedup_is_the_median_of_the_ratios_within_rounds():
    walls = [(4.0, 2.0), (9.0, 3.0), (4.0, 4.0)]
    rounds = [{OFF: run(plain, 4), "draft": run(wall, 2, accepted=3)} for plain, wall in walls]
    figures = summary(rounds, "draft")
    assert figures["speedup"] == figures["decode_speedup"] == 2.0
    assert figures["acceptance"] == 0.75 and figures["mean_accepted_length"] == 1.5
    assert figures["tokens_per_step"] == 2.0 and figures["differing_requests"] == 0.0
    rounds[0]["draft"].tokens["a"] = (1, 2, 3, 5)
    assert summary(rounds, "draft")["differing_requests"] == pytest.approx(1 / 3)


def run_load_of_numbers(sides: Any) -> None:
    numbers = map(str, itertools.count())
    run_load(sides, lambda count: [next(numbers) for _ in range(count)], 3, 4, least=5)


@pytest.mark.parametrize(
    ("run_part", "measured"),
    [
        (run_load_of_numbers, 3 * 12),
        (lambda sides: run_usual(sides, 2, 10), 20),
        (lambda sides: run_questions(sides, [str(i) for i in range(12)], 2), 10),
    ],
    ids=["load", "usual", "questions"],
)
def test_warm_up_uses_other_prompts_than_the_rounds(monkeypatch, run_part, measured):
    warm: set[int] = set()
    rounds: list[int] = []

    class Numbers:
        parts: ClassVar = {OFF: None}

        def round(self, index, requests, at_once=1):
            rounds.extend(request.prompt_token_ids[0] for request in requests)

    def warm_up(sides, requests, at_once=1):
        warm.update(request.prompt_token_ids[0] for request in requests)

    def requests_of(parts, questions, temperature, tag):
        params = SamplingParams(temperature=temperature)
        return [
            Request(request_id=f"{tag}-{i}", prompt_token_ids=[int(q)], params=params, seed=i)
            for i, q in enumerate(questions)
        ]

    monkeypatch.setattr(speculation, "serve_warm_up", warm_up)
    monkeypatch.setattr(speculation, "question_requests", requests_of)
    monkeypatch.setattr(speculation, "usual_questions", lambda: map(str, itertools.count()))
    run_part(Numbers())
    assert warm and len(rounds) == measured == len(set(rounds))
    assert not warm & set(rounds)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--drafters", "draft", "--parts", "batch"],
        ["--draft-model", "folder", "--parts", "batch"],
        ["--parts", "load"],
    ],
)
def test_missing_arguments_are_named_in_the_error(arguments, capsys):
    assert main(arguments) == 1
    assert "--draft-model" in (error := capsys.readouterr().err) or "--questions" in error


@pytest.mark.slow
def test_run_with_a_draft_model_reports_equal_tokens(tmp_path, capsys):
    file = tmp_path / "report.json"
    options = {
        "--drafters": ["draft"],
        "--draft-model": [str(DRAFT)],
        "--parts": ["batch"],
        "--loads": ["2"],
        "--temperatures": ["0", "0.7"],
        "--load-rounds": ["1"],
        "--requests": ["12"],
        "--output": [str(file)],
    }
    words = [word for name, values in options.items() for word in (name, *values)]
    assert main([*words, "--deterministic"]) == 0
    parts = json.loads(file.read_text())["parts"]
    assert list(parts) == [
        "batch: 2 at once, temperature 0",
        "batch: 2 at once, temperature 0.7",
    ]
    for sides in parts.values():  # the times decide whether drafts are verified
        assert sides["draft"]["tokens"] == sides[OFF]["tokens"] > 0
        assert sides["draft"]["differing_requests"] == 0.0
    assert "| draft |" in capsys.readouterr().out
