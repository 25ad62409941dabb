"""`benchmarks.serving` from its command line to its report, against a server on the fake device."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import serving, workloads
from benchmarks.serving_process import serving as served
from forge_jax.engine.fake import fake_tokenizer
from forge_serve.bench.client import Server

pytestmark = pytest.mark.slow

TRACES = Path(__file__).parent.parent / "fixtures" / "traces"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(["--fake", "--max-model-len", "1024"]) as (url, _):
        yield url


def report(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run the benchmark, which must succeed; the printed text is under "text"."""
    file = tmp_path / "report.json"
    status = serving.main([*arguments, "--output", str(file)])
    out, err = capsys.readouterr()
    assert status == 0, out + err
    return json.loads(file.read_text()) | {"text": out}


def test_each_workload_is_answered_in_full(url, capsys, tmp_path):
    names = [name for name in workloads.WORKLOADS if name != "structured"]
    told = report(
        capsys, tmp_path, "--url", url, "--requests", "8", "--rate", "500",
        "--workload", *names, "--slo-ttft-ms", "60000",
    )  # fmt: skip
    assert told["benchmark"] == "serving"
    assert (told["server"]["model"], told["server"]["context"]) == ("forge-fake", 1024)
    assert [run["workload"] for run in told["runs"]] == names
    for run in told["runs"]:
        assert (run["completed"], run["requests"], run["errors"]) == (8, 8, {})
        assert run["output_tokens"] == run["output_tokens_asked"] >= run["events"] > 0
        assert run["requests_without_usage"] == 0
        assert run["goodput"]["share"] == 1.0
        assert run["server"]["generation_tokens"] == run["output_tokens"]
        assert run["server"]["prompt_tokens"] == run["prompt_tokens"]
        assert run["server"]["compilations_after_ready"] == 0
        assert f"| {run['workload']} | 8 of 8 |" in told["text"]
    by_name = {run["workload"]: run for run in told["runs"]}
    sizes = workloads.Sizes(context=1024, num_requests=8)
    for name in names:
        made = workloads.make(name, sizes, workloads.Vocabulary.plain())
        assert by_name[name]["prompt_tokens"] == sum(len(r.prompt) for r in made.requests)
        shares = name == "prefix_caching"
        assert (by_name[name]["server"]["prefix_cache_hit_rate"] > 0) == shares
        assert (by_name[name]["cached_prompt_tokens"] > 0) == shares
    assert set(by_name["chunked_prefill"]["groups"]) == {"decoder", "long"}


def test_workloads_share_one_table(url, capsys, tmp_path):
    told = report(capsys, tmp_path, "--url", url, "--requests", "2", "--workload", "all")
    names = [run["workload"] for run in told["runs"]]
    assert names == list(workloads.WORKLOADS)
    lines = told["text"].splitlines()
    [head] = [index for index, line in enumerate(lines) if line.startswith("| workload |")]
    table = lines[head : lines.index("", head)]
    assert [line for line in lines if line.startswith("|")] == table
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table[2:]]
    assert [row for row in rows if ": " not in row] == names
    assert "chunked_prefill: decoder" in rows
    assert {line.count("|") for line in table} == {table[0].count("|")}


def test_structured_output_is_checked(url, capsys, tmp_path):
    told = report(capsys, tmp_path, "--url", url, "--requests", "2", "--workload", "structured")
    [run] = told["runs"]
    assert (
        run["completed"] == 2 and run["json_valid"] <= 2
    )  # most answers of the fake model are cut
    assert f"{run['json_valid']} of 2 answers were JSON objects" in told["text"]


def test_workload_that_a_server_refuses_is_unsupported(url, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(workloads, "PERSON", {"type": "no type of JSON Schema"})
    told = report(capsys, tmp_path, "--url", url, "--requests", "2", "--workload", "structured")
    [run] = told["runs"]
    assert "response_format" in run["unsupported"]
    assert "- structured: unsupported by this server (HTTP 400: " in told["text"]


@pytest.mark.parametrize("name", ["azure2023_conv.csv", "mooncake_conversation.jsonl"])
def test_trace_is_replayed(url, capsys, tmp_path, name):
    told = report(
        capsys, tmp_path, "--url", url, "--trace", str(TRACES / name),
        "--max-requests", "12", "--trace-scale", "0.01",
    )  # fmt: skip
    [run] = told["runs"]
    assert run["workload"] == f"trace {Path(name).stem}"
    assert run["completed"] == 12 and not run["errors"]
    assert run["output_tokens"] == run["output_tokens_asked"]
    if "mooncake" in name:  # all prompts begin with the same block of 512 tokens
        assert run["server"]["prefix_cache_hits"] >= 5 * 512
        assert run["facts"]["requests_clipped"] > 0


def test_chats_have_text_of_the_requested_length(url, capsys, tmp_path):
    fake_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    told = report(
        capsys, tmp_path, "--url", url, "--tokenizer", str(tmp_path), "--endpoint", "chat",
        "--workload", "baseline", "--requests", "3", "--input-len", "40", "--output-len", "4",
    )  # fmt: skip
    [run] = told["runs"]
    around = "<user></s><assistant>"  # added by the fake model's chat template
    template_tokens = len(fake_tokenizer().encode(around))
    assert run["prompt_tokens"] == 3 * (40 + template_tokens)
    assert run["output_tokens"] == 12


def test_completions_accept_text(url, capsys, tmp_path):
    fake_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    told = report(
        capsys, tmp_path, "--url", url, "--tokenizer", str(tmp_path), "--prompts", "text",
        "--workload", "baseline", "--requests", "3", "--input-len", "40", "--output-len", "4",
    )  # fmt: skip
    assert told["runs"][0]["prompt_tokens"] == 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "no server responds at http://127.0.0.1:9"),
        (["--url", "URL", "--model", "gpt-9"], "no model 'gpt-9' at URL: it has 'forge-fake'"),
        (["--url", "URL", "--serve-args=--fake"], "leave out --url"),
        (["--url", "URL", "--endpoint", "chat"], "set --tokenizer"),
        (["--url", "URL", "--tokenizer", "nowhere"], "--tokenizer nowhere"),
        (["--url", "URL", "--trace", "nowhere.csv"], "nowhere.csv: No such file"),
        (["--url", "URL", "--rate", "0"], "the request rate must be greater than 0"),
        (["--url", "URL", "--input-len", "8"], "need --workload baseline"),
        (["--url", "URL", "--context", "8"], "at least 64 tokens"),
        (["--model", "nowhere/at/all"], "the server did not start: forge-jax: error: no model"),
        (["--serve-args=--no-such-flag"], "unknown flag --no-such-flag"),
    ],
)
def test_impossible_runs_fail_with_one_line(url, capsys, arguments, message):
    status = serving.main([argument.replace("URL", url) for argument in arguments])
    out, err = capsys.readouterr()
    assert status == 1 and out == ""
    assert message.replace("URL", url) in err
    assert err.count("\n") == 1 and err.startswith("serving: ")


def test_failed_requests_are_counted_and_fail_the_run(url, capsys):
    wrong_context = ["--context", "2048", "--workload", "chunked_prefill"]
    assert serving.main(["--url", url, "--requests", "8", *wrong_context]) == 1
    out, _ = capsys.readouterr()
    assert "| chunked_prefill | 4 of 8 |" in out
    assert "error: HTTP 400" in out and "(4 times)" in out


def test_own_server_is_started_and_named(capsys, tmp_path):
    told = report(
        capsys, tmp_path, "--serve-args=--fake --max-model-len 512",
        "--workload", "baseline", "--requests", "2",
    )  # fmt: skip
    assert told["server"]["arguments"] == ["forge-tiny", "--fake", "--max-model-len", "512"]
    assert told["server"]["ready_s"] > 0
    assert told["server"]["context"] == 512


def test_drafting_server_reports_its_acceptance_rate():
    flags = ["--max-model-len", "512", "--speculation", "suffix", "--fake-step-time-ms", "2"]

    async def ask(url: str) -> dict[str, float]:
        async with Server.connect(url) as server:
            before = await server.counters()
            for _ in range(3):
                body = {"prompt": "the river", "max_tokens": 50, "temperature": 0}
                async with server.session.post(f"{url}/v1/completions", json=body) as response:
                    assert response.status == 200
            return serving.counted(before, await server.counters())

    with served(["--fake", *flags]) as (url, _):
        during = asyncio.run(ask(url))
    assert during["drafts"] > 0
    assert during["draft_acceptance"] > 0.5 and during["mean_accepted_length"] > 1
