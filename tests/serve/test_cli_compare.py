"""`forge-jax compare`: flags of both sides, the terminal, and the files."""

from __future__ import annotations

import contextlib
import io
import json
import re

import pytest
from rich.console import Console

from forge_serve.cli import main as cli
from forge_serve.cli.commands.compare import CompareFlags, _only, _prompts
from forge_serve.cli.compare.page import html
from forge_serve.cli.compare.terminal import _parts, nats

HOSTILE = "</script><img src=x onerror=alert(1)><!--\u001b[31m"


@pytest.fixture(scope="module")
def written(short_stories, tmp_path_factory):
    """Return the report, the page and the output of one comparison with int8."""
    folder = tmp_path_factory.mktemp("compare")
    shared = ["--dtype", "float32", "--max-num-seqs", "2", "--max-num-batched-tokens", "64"]
    prompts = ["--prompt", "Once upon a time", "--prompts", str(folder / "prompts.txt")]
    (folder / "prompts.txt").write_text("The dog\n\nLily saw a cat\n")
    files = ["--json", str(folder / "report.json"), "--html", str(folder / "report.html")]
    settings = ["--b", "quantization=int8", "--max-tokens", "16"]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main(["compare", str(short_stories), *shared, *settings, *prompts, *files]) == 0
    report = json.loads((folder / "report.json").read_text())
    return report, (folder / "report.html").read_text(), output.getvalue()


def test_report_names_both_settings(written, short_stories):
    report, *_ = written
    a, b = report["sides"]
    assert a["label"] == f"{short_stories.name} --dtype float32 --max-num-seqs 2 " + (
        "--max-num-batched-tokens 64"
    )
    assert "--quantization int8" in b["label"] and b["options"]["quantization"] == "int8"
    assert b["weight_bytes"] < a["weight_bytes"]
    assert [entry["prompt"] for entry in report["prompts"]] == [
        *("Once upon a time", "The dog", "Lily saw a cat"),
    ]
    assert report["summary"]["mean_kl"] > 0


def test_terminal_shows_figures_answers_and_differences(written):
    report, _, output = written
    plain = re.sub(r"\s+", " ", output)
    assert f"mean KL(A||B) {nats(report['summary']['mean_kl'])} nats" in plain
    for entry in report["prompts"]:
        assert re.sub(r"\s+", " ", entry["answers"][0]["text"].strip()) in plain
    worst = max(each["kl"] for entry in report["prompts"] for each in entry["positions"])
    assert nats(worst) in output and "largest differences" in output
    assert "\x1b" not in output  # it is no terminal
    assert max(map(len, output.splitlines())) <= 100


def test_terminal_shades_tokens_and_replaces_control_characters(written):
    report = json.loads(json.dumps(written[0]))
    first, second, third, *_ = report["prompts"][0]["positions"]
    first.update(piece="much", kl=2.0, same_top=False)
    second.update(piece="little", kl=0.0, same_top=True)
    third.update(piece="\u001b]0;title\u0007", kl=0.0, same_top=True)
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system="256")
    for part in _parts(report):
        console.print(part)
    output = file.getvalue()
    assert "\x1b[4;38;5;16;48;5;203mmuch\x1b[0mlittle" in output
    assert "\x1b]" not in output and "\u241b]0;title" in output


def test_page_contains_the_report_and_loads_nothing(written):
    report, page, _ = written
    [data] = re.findall(r'<script type="application/json" id="report">(.*)</script>', page)
    assert json.loads(data) == report
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)="|url\(|@import|\bimport\s*[({"]', page)


def test_page_escapes_text_of_models(written):
    report, *_ = written
    report = json.loads(json.dumps(report))
    report["sides"][0]["label"] = HOSTILE
    report["prompts"][0]["prompt"] = HOSTILE
    report["prompts"][0]["positions"][0]["piece"] = HOSTILE
    page = html(report)
    assert "<img" not in page and "<!--" not in page
    assert page.count("</script>") == 2  # the data's and the script's own


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (4.73e-7, "4.7e-07"), (0.00123, "0.00123"), (0.5, "0.500"), (12.34, "12.3")],
)
def test_divergences_have_three_digits(value, text):
    assert nats(value) == text


def test_options_of_one_side_are_named_as_flags_or_fields():
    words = ("--kv-dtype=int8", "max_num_seqs=4", "num-blocks=auto", "prefix-cache=false")
    words += ("lora=x=folder",)
    assert _only("--b", words) == {
        "kv_dtype": "int8",
        "max_num_seqs": 4,
        "num_blocks": None,
        "prefix_cache": False,
        "lora": ("x=folder",),
    }


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("quantisation=int4", r"--b quantisation=int4: .* did you mean quantization\?"),
        ("quantization", "expected NAME=VALUE"),
        ("quantization=int5", "must be one of none, int8"),
        ("max-num-seqs=many", "must be a whole number"),
        ("mmap=1", "must be true or false"),
        ("deterministic=false", "is not an engine option"),
    ],
)
def test_invalid_option_of_one_side_is_rejected(word, message, capsys):
    assert cli.main(["compare", "forge-tiny", "--b", word]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt cannot be read"),
        (["--prompt", " "], "a prompt is empty"),
        (["--html", "nowhere/report.html"], "its folder does not exist"),
    ],
)
def test_invalid_prompts_and_files_are_rejected(flags, message, capsys):
    assert cli.main(["compare", "forge-tiny", *flags]) == 1
    assert message in capsys.readouterr().err


def test_default_prompt_is_used_without_prompts():
    assert _prompts(CompareFlags()) == ("Once upon a time",)
