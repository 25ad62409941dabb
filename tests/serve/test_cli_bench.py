"""`forge-jax bench`, on an engine in its own process and on a server."""

from __future__ import annotations

import json

import pytest

from benchmarks.serving_process import serving
from forge_serve.cli import main as cli

SHORT = ["--input-len", "12", "--output-len", "5"]
KEY = "sk-of-the-test"


def bench(capsys, *arguments: str) -> dict:
    assert cli.main(["bench", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_engine_is_measured_at_each_concurrency(capsys):
    flags = ["--fake", "--fake-step-time-ms", "2", "--concurrency", "1,8", "--requests", "9"]
    report = bench(capsys, "x", *flags, *SHORT)
    assert report["model"] == "forge-fake" and report["startup_s"]["ready"] > 0
    assert report["cpu"] and report["versions"]["jax"]
    one, eight = report["runs"]
    for run, level in ((one, 1), (eight, 8)):
        assert (run["concurrency"], run["completed"], run["errors"]) == (level, 9, {})
        assert (run["prompt_tokens"], run["output_tokens"]) == (9 * 12, 9 * 5)
        assert run["cached_prompt_tokens"] == 0, "no prompt has been sent before"
        assert 2 <= run["ttft_ms"]["p50"] <= run["e2e_ms"]["p50"]
    assert one["wall_s"] >= 9 * 5 * 0.002, "one after the other"


def test_terminal_output_is_a_table(capsys):
    assert cli.main(["bench", "--fake", "--concurrency", "2,3", *SHORT]) == 0
    head, empty, columns, two, three = capsys.readouterr().out.splitlines()
    assert head.startswith("forge-fake: 12 tokens in, 5 out; ") and not empty
    assert columns.split()[:3] == ["concurrency", "completed", "output"]
    assert two.split()[:4] == ["2", "8", "of", "8"] and three.split()[:4] == ["3", "12", "of", "12"]


@pytest.fixture(scope="module")
def url():
    with serving(["--fake", "--api-key", KEY]) as (url, _):
        yield url


def test_server_is_measured_with_its_key(url, capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    asked = ["--url", url, "--concurrency", "4", "--requests", "8", *SHORT]
    report = bench(capsys, *asked, "--api-key-file", str(key))
    assert (report["model"], report["url"]) == ("forge-fake", url)
    [run] = report["runs"]
    assert (run["completed"], run["output_tokens"]) == (8, 40)
    assert cli.main(["bench", *asked]) == 1
    assert "requires an API key: set --api-key-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1,x"], "--concurrency must be numbers from 1 to"),
        (["--concurrency", "0"], "--concurrency must be numbers from 1 to"),
        (["--requests", "0"], "--requests must be at least 1, not 0"),
        (["--input-len", "4000", "--output-len", "200"], "exceeds the context of 4096 tokens"),
        (["--url", "http://127.0.0.1:9"], "--fake can only be set for an engine in this process"),
        (["--api-key-file", "x"], "--api-key-file requires --url"),
    ],
)
def test_impossible_measurement_fails_with_one_line(capsys, arguments, message):
    assert cli.main(["bench", "--fake", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("forge-jax: error: ") and message in error
    assert error.count("\n") == 1
