"""`benchmarks.batch_files` from its command line to its report, on fake devices."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import batch_files
from forge_jax import LLM
from forge_jax.config import EngineConfig
from forge_jax.engine.fake import assemble_fake
from forge_jax.engine.thread import Engine

pytestmark = pytest.mark.slow

SMALL = ["--model", "fake", "--requests", "8", "--rounds", "2", "--context", "128"]


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_llm(model: str, **options: Any) -> LLM:
        config = EngineConfig.from_options(model=model, **options)
        parts = assemble_fake(config, step_time_s=1e-3, max_model_len=128, check=False)
        return LLM.from_parts(parts)

    monkeypatch.setattr(batch_files, "LLM", fake_llm)
    monkeypatch.setattr(Engine, "load", lambda config: Engine.fake(config=config, step_time_s=1e-3))


@pytest.mark.usefixtures("fake_engines")
def test_both_sides_alternate_and_report_figures(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert batch_files.main([*SMALL, "--output", str(file)]) == 0
    out, report = capsys.readouterr().out, json.loads(file.read_text())
    assert report["requests"] == 8 and report["output_tokens"] > 0
    ratios = [f / g for f, g in zip(*(report["samples"][n] for n in ("file", "llm")), strict=True)]
    assert report["ratio"] == pytest.approx(sum(ratios) / 2)
    assert f"{report['ratio']:.3f}" in out and "`forge-jax batch`" in out


@pytest.mark.usefixtures("fake_engines")
def test_refused_lines_fail_the_benchmark(capsys, monkeypatch):
    line = batch_files._line
    monkeypatch.setattr(batch_files, "_line", lambda i, r: line(i, r).replace(": 0", ": -1"))
    assert batch_files.main(SMALL) == 1
    out, err = capsys.readouterr()
    assert out == "" and "0 output tokens came, expected" in err


def test_zero_rounds_fail_with_one_line(capsys):
    assert batch_files.main(["--rounds", "0"]) == 1
    assert "--rounds must be at least 1" in capsys.readouterr().err
