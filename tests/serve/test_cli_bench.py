"""`forge-jax bench`, on an engine in its own process and on a server."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.serving_process import serving
from forge_serve.bench.arrivals import poisson
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.report import FIGURES, comparison, pairs, table
from forge_serve.bench.sharegpt import read_sharegpt, sharegpt
from forge_serve.cli import main as cli
from forge_serve.cli.commands.bench import BenchFlags, Load

SHORT = ["--input-len", "12", "--output-len", "5"]
KEY = "sk-of-the-test"


def bench(capsys, *arguments: str) -> dict:
    assert cli.main(["bench", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_engine_is_measured_at_each_concurrency(capsys):
    flags = ["--fake", "--fake-step-time-ms", "2", "--max-concurrency", "1,8", "--num-prompts", "9"]
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
    assert cli.main(["bench", "--fake", "--max-concurrency", "2,3", *SHORT]) == 0
    head, _, empty, loads, completed, *figures = capsys.readouterr().out.splitlines()
    assert head == "forge-fake: random prompts of 12 tokens, 5 output tokens" and not empty
    assert loads.split() == ["load", "2", "at", "once", "3", "at", "once"]
    assert completed.split()[2:] == ["8", "of", "8", "12", "of", "12"]
    labels = [line[:36].rstrip() for line in figures]
    assert "output throughput, tokens/s" in labels
    assert "inter-token latency (ITL) p99, ms" in labels
    assert all(label.endswith((", s", "/s", ", ms")) for label in labels)


def test_other_names_of_flags_are_accepted(capsys):
    flags = ["--concurrency", "2", "--requests", "3"]
    lengths = ["--random-input-len", "12", "--random-output-len", "5"]
    [run] = bench(capsys, "--fake", *flags, *lengths)["runs"]
    assert (run["concurrency"], run["requests"], run["prompt_tokens"]) == (2, 3, 36)


def test_requests_arrive_at_the_requested_rate(capsys):
    rate = ["--request-rate", "100,40", "--num-prompts", "12", "--seed", "3"]
    fast, slow = bench(capsys, "--fake", *rate, *SHORT)["runs"]
    for run, per_s in ((fast, 100), (slow, 40)):
        assert (run["request_rate"], run["concurrency"]) == (per_s, None)
        assert run["wall_s"] >= poisson(12, per_s, 1.0, seed=3)[-1]


TRACE = Path(__file__).parent.parent / "fixtures" / "traces" / "azure2023_conv.csv"


def test_trace_is_replayed_at_a_rate(capsys):
    data = ["--dataset-name", "trace", "--dataset-path", str(TRACE)]
    report = bench(capsys, "--fake", *data, "--num-prompts", "3", "--request-rate", "100")
    [run] = report["runs"]
    assert (run["requests"], run["prompt_tokens"]) == (3, 374 + 396 + 879)
    assert report["workload"]["dataset_file"] == "azure2023_conv.csv"


@pytest.fixture
def conversations(tmp_path):
    def turns(prompt: str, answer: str) -> dict:
        said = [("human", prompt), ("gpt", answer), ("human", "and then?")]
        return {"conversations": [{"from": who, "value": text} for who, text in said]}

    entries = [turns(f"question {i}", "y" * (10 + i)) for i in range(6)]
    entries += [turns("ok", "too short"), turns("question 9", "z" * 900), {"conversations": []}]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps(entries))
    return file


def test_conversations_are_sent_with_the_length_of_their_answers(capsys, conversations):
    data = ["--dataset-name", "sharegpt", "--dataset-path", str(conversations)]
    load = ["--max-concurrency", "1,2", "--num-prompts", "3", "--context", "256"]
    runs = bench(capsys, "--fake", *data, *load)["runs"]
    assert sum(run["output_tokens"] for run in runs) == sum(range(10, 16)), "each is sent once"


def test_conversations_that_fit_are_drawn_in_random_order(conversations):
    found = read_sharegpt(conversations)
    encode = str.encode  # one token per byte
    first, other = (sharegpt(found, encode, count=6, context=256, seed=seed) for seed in (0, 1))
    assert first != other and {r.prompt for r in first} == {r.prompt for r in other}
    assert {r.max_tokens for r in first} == set(range(10, 16))
    assert {r.max_tokens for r in sharegpt(found, encode, count=6, context=256, output_len=7)} == {
        7
    }
    with pytest.raises(BenchmarkError, match=r"has 6 conversations .* but 7 are needed"):
        sharegpt(found, encode, count=7, context=256)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("{}", "not a JSON list"), ('[{"text": "x"}]', "entry 0 has no")],
)
def test_other_forms_of_data_sets_are_rejected(tmp_path, content, message):
    file = tmp_path / "data.json"
    file.write_text(content)
    with pytest.raises(BenchmarkError, match=message):
        read_sharegpt(file)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return a saved report, and one that is twice as slow."""
    file = tmp_path_factory.mktemp("bench") / "saved.json"
    load = ["--max-concurrency", "1,2", "--fake-step-time-ms", "2", "--num-prompts", "4"]
    assert cli.main(["bench", "--fake", *load, *SHORT, "--save", str(file)]) == 0
    saved = json.loads(file.read_text())
    slower = json.loads(file.read_text())
    for run in slower["runs"]:
        run["output_tokens_per_s"] /= 2
    return file, saved, slower


def test_saved_report_is_compared_and_drawn(reports, capsys, tmp_path):
    file, _, _ = reports
    for name in ("chart.svg", "chart.html"):
        files = ["--compare", str(file), "--chart", str(tmp_path / name)]
        assert cli.main(["bench", "--fake", "--max-concurrency", "2,3", *SHORT, *files]) == 0
    said = capsys.readouterr().out
    assert "saved: forge-fake, " in said and "The conditions differ" in said
    assert "- num_prompts: 4 saved, none now" in said
    assert said.count("x\n") >= 2 and max(map(len, said.splitlines())) <= 100
    svg = ElementTree.fromstring((tmp_path / "chart.svg").read_text())
    texts = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert "Speed of forge-fake" in texts and texts.count("3 at once") == len(FIGURES)
    page = (tmp_path / "chart.html").read_text()
    assert "<svg" in page and "inter-token latency (ITL) p99, ms" in page
    assert not any(word in page for word in ("src=", "href=", "<script", "@import"))


def test_comparison_has_ratios_and_bars_to_scale(reports):
    _, saved, slower = reports
    lines = comparison(slower, saved).splitlines()
    at = lines.index("output throughput, tokens/s (higher is better)")
    before, after = lines[at + 1 : at + 3]
    assert after.endswith("  0.50x")
    assert after.count("█") == pytest.approx(before.count("█") / 2, abs=1)
    assert [pair.ratio for pair in pairs(FIGURES[0], slower, saved)] == [0.5, 0.5]
    assert "single measurements" in lines[-1]
    assert "█" not in comparison(slower, saved, blocks=False)


def test_many_loads_fit_100_columns(reports):
    _, saved, _ = reports
    runs = [{**saved["runs"][0], "concurrency": 1000 + i} for i in range(12)]
    lines = table({**saved, "runs": runs}).splitlines()
    assert max(map(len, lines)) <= 100
    loads = " ".join(line for line in lines if line.startswith("load"))
    assert all(f"{1000 + i} at once" in loads for i in range(12))


def test_loads_follow_from_the_flags():
    assert BenchFlags().loads() == [Load(1), Load(4), Load(16)]
    assert BenchFlags(request_rate="2,4", max_concurrency="8").loads() == [Load(8, 2), Load(8, 4)]
    trace = BenchFlags(dataset_name="trace", dataset_path="x.csv")
    assert trace.loads() == [Load()] and trace.requests_of(Load()) == 64
    assert dataclasses.replace(trace, max_concurrency="2").loads() == [Load(2)]
    assert BenchFlags().requests_of(Load(None, 2.5)) == 25


@pytest.fixture(scope="module")
def url():
    with serving(["--fake", "--api-key", KEY]) as (url, _):
        yield url


def test_server_is_measured_with_its_key(url, capsys, tmp_path):
    key = tmp_path / "key"
    key.write_text(KEY + "\n")
    asked = ["--url", url, "--max-concurrency", "4", "--num-prompts", "8", *SHORT]
    report = bench(capsys, *asked, "--api-key-file", str(key))
    assert (report["model"], report["url"]) == ("forge-fake", url)
    [run] = report["runs"]
    assert (run["completed"], run["output_tokens"]) == (8, 40)
    assert cli.main(["bench", *asked]) == 1
    assert "requires an API key: set --api-key-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-concurrency", "1,x"], "--max-concurrency must be numbers from 1 to"),
        (["--max-concurrency", "0"], "--max-concurrency must be numbers from 1 to"),
        (["--request-rate", "0"], "--request-rate must be numbers greater than 0"),
        (["--request-rate", "1,2", "--max-concurrency", "1,2"], "must be one number"),
        (["--burstiness", "0"], "--burstiness must be greater than 0, not 0.0"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1, not 0"),
        (["--dataset-name", "sharegpt"], "--dataset-path is the file of"),
        (["--chart", "a.png"], "--chart must end in .svg or .html, not 'a.png'"),
        (["--save", "nowhere/a.json"], "nowhere/a.json cannot be written"),
        (["--compare", "nowhere.json"], "nowhere.json: No such file"),
        (["--tokenizer", "x"], "--tokenizer requires --url"),
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
