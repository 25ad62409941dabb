"""Evaluation harnesses and load generators: their requests, and their reading of the answers.

lm-evaluation-harness runs unmodified. Because guidellm needs torch, these tests imitate
`src/guidellm/backends/openai/request_handlers.py` of its version 0.8: the requests to
`/v1/completions` and `/v1/chat/completions`, and the reading of the events.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conftest import environment, serving

ROOT = Path(__file__).parent.parent.parent

CONTEXT = "Once upon a time"


def lm_eval_instance(kind: str, arguments: tuple[Any, ...]) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.fixture(scope="module")
def completions(server):
    pytest.importorskip("lm_eval")
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        model=server.model, base_url=f"{server.v1}/completions", batch_size=2, max_retries=1
    )


def test_lm_eval_finds_the_servers_tokenizer(completions):
    assert completions.tokenizer_backend == "remote"
    assert completions.tok_encode(CONTEXT) and completions.eot_token_id is not None


def test_lm_eval_scores_continuations(completions, server):
    continuations = (" there was", " dog zebra", " a")
    requests = [lm_eval_instance("loglikelihood", (CONTEXT, c)) for c in continuations]
    scores = completions.loglikelihood(requests, disable_tqdm=True)
    assert len(scores) == 3 and all(score < 0 for score, _ in scores)
    greedy = server.post("/v1/completions", {"prompt": CONTEXT, "max_tokens": 1, "temperature": 0})
    best = lm_eval_instance("loglikelihood", (CONTEXT, greedy["choices"][0]["text"]))
    [(_, is_greedy)] = completions.loglikelihood([best], disable_tqdm=True)
    assert is_greedy


def test_lm_eval_generates(completions, server):
    asked = {"until": ["."], "max_gen_toks": 24, "temperature": 0}
    [text] = completions.generate_until(
        [lm_eval_instance("generate_until", (CONTEXT, asked))], disable_tqdm=True
    )
    body = {"prompt": CONTEXT, "max_tokens": 24, "temperature": 0, "stop": ["."]}
    assert text == server.post("/v1/completions", body)["choices"][0]["text"] != ""


def test_lm_eval_generates_in_chats(server):
    pytest.importorskip("lm_eval")
    from lm_eval.models.openai_completions import LocalChatCompletion

    chat = LocalChatCompletion(
        model=server.model, base_url=f"{server.v1}/chat/completions", max_retries=1
    )
    messages = [{"role": "user", "content": CONTEXT}]
    asked = {"until": ["."], "max_gen_toks": 24, "temperature": 0}
    prompt = chat.apply_chat_template(messages)
    [text] = chat.generate_until(
        [lm_eval_instance("generate_until", (prompt, asked))], disable_tqdm=True
    )
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stop": ["."]}
    answer = server.post("/v1/chat/completions", body)
    assert text == answer["choices"][0]["message"]["content"] != ""


def shown_commands() -> dict[str, list[str]]:
    """Return the commands of docs/evaluation.md, by the model class of the harness."""
    text = (ROOT / "docs/evaluation.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    commands = [shlex.split(block.replace("\\\n", "")) for block in blocks]
    runs = [command for command in commands if command[0] == "lm_eval"]
    return {command[command.index("--model") + 1]: command for command in runs}


@pytest.mark.parametrize(
    ("model", "task", "least"),
    [
        ("local-completions", "forge_capitals", 0.99),
        ("local-chat-completions", "forge_questions", 0.99),
    ],
)
def test_lm_eval_runs_as_documented(server, tmp_path, model, task, least):
    pytest.importorskip("lm_eval")
    program, *arguments = shown_commands()[model]
    assert program == "lm_eval" and len(shown_commands()) == 2
    arguments = [argument.replace("http://127.0.0.1:8000", server.url) for argument in arguments]
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **offline},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    [row] = [line for line in done.stdout.splitlines() if line.startswith(f"|{task}")]
    score = float(row.split("|")[7])
    assert least <= score <= 1, done.stdout


def test_lm_eval_scores_over_http_equal_those_of_transformers(request):
    pytest.importorskip("lm_eval")
    folder = ROOT / "tests/fixtures/lm_eval"
    expected = json.loads((folder / "scores.json").read_text())
    with serving(request, "--dtype", "float32") as server:
        command = [sys.executable, str(folder / "scores.py"), "local-completions", server.url]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert list(found) == ["forge-tiny, no BOS"]
    for run, tasks in found.items():
        assert tasks.keys() == expected[run].keys()
        for task, scores in tasks.items():
            assert scores["metrics"] == pytest.approx(expected[run][task]["metrics"], rel=1e-4)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["lm_eval_model", "inspect_provider"])
def test_evaluations_run_in_process(request, name):
    """Run the tests of the environment that has both forge-jax and the harness."""
    python = request.config.getoption("--server-python")
    file = f"tests/clients/in_process/test_{name}.py"
    command = [python, "-m", "pytest", "--noconftest", "-c", "tests/clients/pytest.ini", file]
    packages = environment(python)
    path = os.pathsep.join([*(str(ROOT / part) for part in ("kernels", "serve")), str(ROOT)])
    packages["PYTHONPATH"] = os.pathsep.join([path, packages["PYTHONPATH"]])
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=packages)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout and "skipped" not in done.stdout


def guidellm_lines(url: str, body: dict[str, Any]) -> list[str]:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as response:
        return [line.decode().rstrip("\r\n") for line in response]


def guidellm_read(lines: list[str]) -> tuple[str, dict[str, Any], str]:
    """Return the text, the last usage and the id of a stream."""
    texts, usage, ids, done = [], {}, [], False
    for line in lines:
        assert not done or not line, "nothing comes after the end"
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data:"):
            event = json.loads(line.removeprefix("data:"))
            ids.append(event["id"])
            usage = event.get("usage") or usage
            for choice in event.get("choices", [])[:1]:
                texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    assert done and len(set(ids)) == 1
    return "".join(texts), usage, ids[0]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_streams(server, path):
    parts = [{"type": "text", "text": CONTEXT}]
    chat = {"messages": [{"role": "user", "content": parts}], "max_completion_tokens": 16}
    asked = {
        **({"prompt": CONTEXT} if path == "/v1/completions" else chat),
        "model": server.model,
        "max_tokens": 16,
        "stop": None,
        "ignore_eos": True,
        "temperature": 0,
    }
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = {**asked, "stream": True, "stream_options": options}
    text, usage, _ = guidellm_read(guidellm_lines(server.url + path, streamed))
    assert usage["completion_tokens"] == 16 and usage["prompt_tokens"] > 0
    assert isinstance(usage.get("prompt_tokens_details") or {}, dict)
    whole = server.post(path, asked)
    [choice] = whole["choices"]
    assert text == (choice["message"]["content"] if "message" in choice else choice["text"]) != ""
    assert whole["usage"]["completion_tokens"] == 16
