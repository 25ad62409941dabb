"""The model `forge-jax` of lm-evaluation-harness: its scores, and its handling of each request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from forge_jax import LLM, SamplingParams
from forge_jax.errors import ConfigError, EngineError, NumericalError, RequestError
from forge_jax.integrations import lm_eval as lm_eval_model
from forge_jax.integrations.lm_eval import ForgeLM

ROOT = Path(__file__).parents[3]
SCORES = ROOT / "tests/fixtures/lm_eval"
CONTEXT = "Once upon a time"
STORIES = (ROOT / "examples/lm_eval/stories.jsonl").read_text().splitlines()
STORY = json.loads(STORIES[0])["text"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("forge-tiny", dtype="float32", max_num_seqs=8)


@pytest.fixture(scope="module")
def lm(llm: LLM) -> ForgeLM:
    return ForgeLM(llm)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)  # type: ignore[arg-type]
        for i, each in enumerate(arguments)
    ]


def generated(lm: ForgeLM, prompt: str = CONTEXT, **options: Any) -> str:
    [text] = lm.generate_until(instances("generate_until", (prompt, options)), disable_tqdm=True)
    return text


def numbers(responses: Any) -> list[Any]:
    flat = [numbers(r) if isinstance(r, list) else [r] for r in responses]
    return list(chain.from_iterable(flat))


@pytest.mark.timeout(300)
def test_scores_equal_those_of_transformers():
    command = [sys.executable, str(SCORES / "scores.py"), "forge-jax"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found, expected = json.loads(done.stdout), json.loads((SCORES / "scores.json").read_text())
    assert found.keys() == expected.keys()
    for run, tasks in expected.items():
        for task, scores in tasks.items():
            assert found[run][task]["metrics"] == pytest.approx(scores["metrics"], rel=1e-4)
            theirs, ours = (numbers(each[task]["responses"]) for each in (tasks, found[run]))
            for own, other in zip(ours, theirs, strict=True):
                is_logprob = isinstance(other, float)
                assert own == (pytest.approx(other, abs=1e-3) if is_logprob else other)


def test_harness_finds_the_model_by_name():
    assert get_model("forge-jax") is ForgeLM


def test_greedy_continuation_is_marked_as_greedy(lm, llm):
    [output] = llm.generate(CONTEXT, SamplingParams(max_tokens=8, temperature=0), progress=False)
    pairs = ((CONTEXT, output.text), (CONTEXT, " zebra zebra"), ("", CONTEXT))
    scores = lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    assert [greedy for _, greedy in scores][:2] == [True, False]
    assert scores[0][0] > scores[1][0] and all(score < 0 for score, _ in scores)


def test_context_is_truncated_on_the_left(llm):
    short = ForgeLM(llm, max_length=16)
    context = short.tok_encode(STORY, add_special_tokens=False)
    answer = context[:4]
    [(score, _)] = short._loglikelihood_tokens([(None, context, answer)], disable_tqdm=True)
    [(same, _)] = short._loglikelihood_tokens([(None, context[-12:], answer)], disable_tqdm=True)
    assert score == pytest.approx(same, abs=1e-4)
    begun = STORY[:150]
    text = generated(short, begun, until=[], max_gen_toks=4)
    params = SamplingParams(max_tokens=4, temperature=0)
    [output] = llm.generate([short.tok_encode(begun)[-12:]], params, progress=False)
    assert text == output.text != ""


def test_rolling_windows_score_each_token_once(llm):
    lm = ForgeLM(llm, max_length=32)
    ids = lm.tok_encode(STORY)
    assert len(ids) > 62, "three windows"
    [total] = lm.loglikelihood_rolling(
        instances("loglikelihood_rolling", (STORY,)), disable_tqdm=True
    )
    expected, done = 0.0, 0
    while done < len(ids):
        until = min(done + 31, len(ids))
        prompt = [lm.prefix_token_id, *ids][max(until - 31, 0) : until + 1]
        [output] = llm.generate(
            [prompt], SamplingParams(max_tokens=0, prompt_logprobs=0), progress=False
        )
        expected += sum(t.logprob for t in output.prompt_logprobs[-(until - done) :])
        done = until
    assert total == pytest.approx(expected, abs=1e-3)


def test_stop_strings_end_the_output_even_if_the_engine_has_too_many(lm):
    whole = generated(lm, until=[], max_gen_toks=40)
    assert "." in whole and generated(lm, until=["."], max_gen_toks=40) == whole.split(".")[0]
    many = [f"never {i}" for i in range(40)] + ["."]
    assert generated(lm, until=many, max_gen_toks=40) == whole.split(".")[0]


def test_reasoning_is_removed_before_stop_strings_apply(llm):
    whole = generated(ForgeLM(llm), until=[], max_gen_toks=40)
    assert whole.partition(",")[2].strip()
    thinking = ForgeLM(llm, think_end_token=",")
    expected = whole.split(",")[-1].lstrip().split(".")[0]
    assert generated(thinking, until=["."], max_gen_toks=40) == expected


def test_sampling_parameters_reach_the_engine(lm):
    options = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 2.0}
    texts = [generated(lm, **options, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = generated(lm, until=[], max_gen_toks=12, do_sample=False, num_beams=1)
    assert greedy == generated(lm, until=[], max_gen_toks=12, temperature=0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 4}, "num_beams is not supported"),
        ({"wrong": 1}, "wrong is not supported"),
        ({"max_gen_toks": 1024}, r"max_gen_toks \(1024\) must be less than max_length \(1024\)"),
    ],
)
def test_unsupported_generation_kwargs_are_named_in_the_error(lm, options, message):
    with pytest.raises(RequestError, match=message):
        generated(lm, until=[], **options)


def test_chat_template_continues_a_prefilled_answer(lm):
    question = {"role": "user", "content": "What is 2+2?"}
    text = lm.apply_chat_template([question])
    assert text.endswith("<|assistant|>") and text.startswith("<|bos|>")
    assert lm.tok_encode(text)[:2] != [lm.prefix_token_id] * 2, "BOS once"
    begun = lm.apply_chat_template([question, {"role": "assistant", "content": "2 +"}], False)
    assert begun == text + "2 +"
    source = lm.llm.chat_template.sources["default"]
    assert lm.chat_template(True) == lm.chat_template("default") == source
    with pytest.raises(RequestError, match="tool_use: only the default chat template is supported"):
        lm.chat_template("tool_use")


def test_system_message_is_dropped_if_the_template_rejects_it(tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    lm = ForgeLM(LLM("forge-tiny", chat_template=str(file), max_num_seqs=1, dtype="float32"))
    system, user = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
    assert lm.apply_chat_template([system, user]) == "U"
    with pytest.raises(RequestError, match="no system"):
        lm.apply_chat_template([system])


class Recorded:
    """Cache of the harness, and the calls of `LLM.generate`. The call in `failing` fails."""

    def __init__(self, lm: ForgeLM, monkeypatch: pytest.MonkeyPatch):
        self.results: dict[tuple[str, tuple[Any, ...]], Any] = {}
        self.calls: list[tuple[int, int]] = []  # (number of prompts, number of cached results)
        self.bars: set[int] = set()
        self.failing: tuple[int, int] | None = None  # (number of the call, index of the prompt)
        self._generate = lm.llm.generate
        monkeypatch.setattr(lm.llm, "generate", self.generate)
        monkeypatch.setattr(lm, "cache_hook", self)

    def add_partial(self, kind: str, request: tuple[Any, ...], result: Any) -> None:
        self.results[kind, tuple(map(str, request))] = result

    def generate(self, prompts: Any, params: Any, *, progress: Any) -> Any:
        self.calls.append((len(prompts), len(self.results)))
        self.bars.add(id(progress))
        outputs = self._generate(prompts, params, progress=progress)
        if self.failing is not None and self.failing[0] == len(self.calls):
            i = self.failing[1]
            [sample] = outputs[i].outputs
            failed = replace(sample, finish_reason="error", error=NumericalError("logits"))
            outputs[i] = replace(outputs[i], outputs=(failed,))
        return outputs


@pytest.fixture
def recorded(lm, monkeypatch) -> Recorded:
    monkeypatch.setattr(lm_eval_model, "SLICE_REQUESTS", 2)
    return Recorded(lm, monkeypatch)


REQUESTS: dict[str, list[tuple[Any, ...]]] = {
    "loglikelihood": [(CONTEXT, f" {name}") for name in ("Tom", "Lily", "Ben", "Sue", "Max")],
    "loglikelihood_rolling": [(STORY[: 40 + i],) for i in range(5)],
    "generate_until": [(STORY[: 40 + i], {"until": [], "max_gen_toks": 3}) for i in range(5)],
}


@pytest.mark.parametrize("kind", list(REQUESTS))
def test_requests_run_in_slices_with_one_bar(lm, recorded, kind, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # elsewhere, no bar is shown
    results = getattr(lm, kind)(instances(kind, *REQUESTS[kind]))
    assert recorded.calls == [(2, 0), (2, 2), (1, 4)]
    assert len(recorded.bars) == 1 and "5/5" in capsys.readouterr().err
    assert list(recorded.results.values()) == results
    lm_eval_model.SLICE_REQUESTS = 1024  # restored by `recorded`
    together = getattr(lm, kind)(instances(kind, *REQUESTS[kind]), disable_tqdm=True)
    if kind == "generate_until":
        assert together == results
    else:
        np.testing.assert_allclose(np.array(together), np.array(results), atol=1e-4)
    assert recorded.calls[3:] == [(5, 5)]


def test_slices_bound_the_tokens(lm, recorded, monkeypatch):
    monkeypatch.setattr(lm_eval_model, "SLICE_TOKENS", 20)
    requests = [(None, [5] * length, [6]) for length in (9, 8, 1, 40, 1, 1)]
    assert len(lm._loglikelihood_tokens(requests, disable_tqdm=True)) == 6
    assert [size for size, _ in recorded.calls] == [2, 1, 1, 2]


@pytest.mark.parametrize("kind", list(REQUESTS))
def test_failed_request_keeps_the_results_of_others(lm, recorded, kind):
    recorded.failing = (2, 0)
    with pytest.raises(EngineError, match="request 2 of the task: logits") as caught:
        getattr(lm, kind)(instances(kind, *REQUESTS[kind]), disable_tqdm=True)
    assert isinstance(caught.value.__cause__, NumericalError)
    kept = [tuple(map(str, REQUESTS[kind][i])) for i in (0, 1, 3)]
    assert [key for _, key in recorded.results] == kept


def test_empty_context_begins_with_the_prefix_token(llm):
    lm = ForgeLM(llm, add_bos_token=False)
    assert lm.tok_encode("") == []
    asked = [("", {"until": [], "max_gen_toks": 4}), (CONTEXT, {"until": [], "max_gen_toks": 4})]
    first, second = lm.generate_until(instances("generate_until", *asked), disable_tqdm=True)
    params = SamplingParams(max_tokens=4, temperature=0)
    [output] = llm.generate([[lm.prefix_token_id]], params, progress=False)
    assert first == output.text and second
    prefix, word = lm.prefix_token_id, lm.tok_encode("Once")
    pairs = [(None, [], word), (None, [prefix], word)]
    empty, begun = lm._loglikelihood_tokens(pairs, disable_tqdm=True)
    assert empty == pytest.approx(begun, abs=1e-4)


def test_invalid_options_are_named_in_the_error(llm):
    with pytest.raises(ConfigError, match="max_length must be between 2 and 1024"):
        ForgeLM(llm, max_length=2000)
    with pytest.raises(ConfigError, match="dtype: cannot change an LLM"):
        ForgeLM(llm, dtype="float32")
    with pytest.raises(ConfigError, match="device must be an index, cpu, cuda or cuda:N"):
        ForgeLM("forge-tiny", device="mps")
    with pytest.raises(ConfigError, match="device: cannot change an LLM"):
        ForgeLM(llm, device="cuda:0")


@pytest.mark.parametrize(
    ("model_args", "flag", "expected"),
    [
        ({"device": 1}, "cuda:0", {"device": 1}),
        ({}, "2", {"device": 2}),
        ({}, "cuda:3", {"backend": "auto", "device": 3}),
        ({}, "cpu", {"backend": "cpu", "device": 0}),
        ({"backend": "cpu"}, "cuda:0", {"backend": "cpu", "device": 0}),
        ({}, None, {}),
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_device_is_an_index_or_in_the_harness_notation(
    monkeypatch, llm, model_args, flag, expected, as_text
):
    given = {}

    class Spy(LLM):
        def __init__(self, model: str, **options: Any):
            given.update(options)
            self._start(llm._parts)

    monkeypatch.setattr(lm_eval_model, "LLM", Spy)
    if as_text:
        text = ",".join(f"{name}={value}" for name, value in model_args.items())
        lm = ForgeLM.create_from_arg_string(text, {"device": flag})
    else:
        lm = ForgeLM.create_from_arg_obj(model_args, {"device": flag})
    assert given == expected and isinstance(lm, ForgeLM)


@pytest.mark.timeout(300)
def test_harness_command_runs_as_documented(tmp_path):
    text = (ROOT / "docs/evaluation.md").read_text()
    [line] = [each for each in text.splitlines() if "-m forge_jax.integrations.lm_eval" in each]
    arguments = line.removesuffix(" \\").split()[1:]
    tasks = ["--include_path", "examples", "--tasks", "forge_capitals,forge_questions"]
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *arguments, *tasks],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [row.split("|") for row in done.stdout.splitlines() if row.startswith("|forge_")]
    assert {row[1].strip(): float(row[7]) for row in rows}["forge_capitals"] == 1.0
