"""`benchmarks.throughput` and `benchmarks.ablation` from their command lines to their reports.

Except for the fake device, the engines are real.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any

import pytest

from benchmarks import ablation, throughput
from benchmarks.ablation import Switch
from benchmarks.report import engine_config_error
from forge_jax import LLM
from forge_jax.config import EngineConfig
from forge_jax.engine.fake import assemble_fake
from forge_jax.engine.thread import Engine
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.workload import Request, baseline

pytestmark = pytest.mark.slow

SMALL = ["--model", "fake", "--requests", "8", "--rounds", "2", "--context", "128"]
STEP_TIME_S = 1e-3


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_llm(model: str, **options: Any) -> LLM:
        config = EngineConfig.from_options(model=model, **options)
        return LLM.from_parts(
            assemble_fake(config, step_time_s=STEP_TIME_S, max_model_len=128, check=False)
        )

    def fake_engine(config: EngineConfig) -> Engine:
        return Engine.fake(config=config, step_time_s=STEP_TIME_S)

    monkeypatch.setattr(throughput, "LLM", fake_llm)
    monkeypatch.setattr(Engine, "load", fake_engine)


def test_unknown_switch_has_a_reason_and_known_one_has_none():
    assert engine_config_error(prefix_cache=False, kv_cache="contiguous") is None
    assert engine_config_error(no_such_switch=1) == "no such option: no_such_switch"
    assert "kv_cache must be one of" in str(engine_config_error(kv_cache="folded"))


def known(options: Any) -> bool:
    return engine_config_error(**options) is None


@pytest.mark.usefixtures("fake_engines")
def test_throughput_compares_every_available_variant(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert throughput.main([*SMALL, "--max-num-seqs", "4", "--output", str(file)]) == 0
    out, report = capsys.readouterr().out, json.loads(file.read_text())
    rows = {row["variant"]: row for row in report["variants"]}
    for variant in throughput.VARIANTS:
        row = rows[variant.name]
        if not known(variant.options):
            assert f"| {variant.name} | - | - | skipped: {row['skipped']} |" in out
            continue
        assert len(row["samples"]) == 2 and min(row["samples"]) > 0
        assert min(row["samples"]) <= row["output_tokens_per_s"] <= max(row["samples"])
    sequential = report["variants"][0]
    assert sequential["ratio"] == 1.0
    continuous = rows["continuous batching"]
    ratios = [a / b for a, b in zip(continuous["samples"], sequential["samples"], strict=True)]
    assert continuous["ratio"] == pytest.approx(sum(ratios) / 2)
    assert report["output_tokens"] > 0 and report["requests"] == 8


class Short:
    """An `LLM` that loses a token."""

    def generate(self, prompts: list[Any], params: list[Any], progress: bool) -> list[Any]:
        return [Names(outputs=[Names(token_ids=(0,) * (p.max_tokens - 1))]) for p in params]


def test_missing_work_fails_the_benchmark():
    requests = [Request(prompt=(1,), max_tokens=5)]
    with pytest.raises(BenchmarkError, match="4 output tokens came, expected 5"):
        throughput.seconds(Short(), requests, one_at_a_time=True)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fake_engines")
def test_ablation_has_a_row_per_figure_of_a_switch(tmp_path, capsys):
    file = tmp_path / "report.json"
    chosen = ["--switch", "prefix_cache", "kv_cache"]
    assert ablation.main([*SMALL, *chosen, "--output", str(file)]) == 0
    out, report = capsys.readouterr().out, json.loads(file.read_text())
    rows = {(row["switch"], row["figure"]): row for row in report["switches"]}
    assert {switch for switch, _ in rows} == {"prefix_cache", "kv_cache"}
    for row in rows.values():
        on, off = row["samples"]
        assert len(on) == len(off) == 2 and min(on + off) > 0
        assert row["ratio"] == pytest.approx(sum(a / b for a, b in zip(on, off, strict=True)) / 2)
        assert row["figure"] in out
    fits = rows["kv_cache", "concurrent sequences in the same memory"]
    paged, contiguous = fits["medians"]
    assert contiguous <= 16 < paged
    assert f"| kv_cache | {fits['figure']} | {paged:.0f} (paged) | {contiguous:.0f} (contig" in out


def test_unknown_switch_is_reported_as_skipped(capsys, monkeypatch):
    unknown = Switch(name="prefix_cache", off={"warp": 9}, workload=baseline, figures=())
    monkeypatch.setattr(ablation, "switches", lambda context: (unknown,))
    assert ablation.main([*SMALL, "--switch", "prefix_cache"]) == 0
    assert "| prefix_cache | skipped: no such option: warp |" in capsys.readouterr().out


def test_every_switch_is_an_existing_or_planned_option():
    planned = {"one_step_ahead", "chunked_prefill", "batching", "deterministic", "kernels"}
    options = {name for s in ablation.switches(1024) for name in {**s.on, **s.off}}
    options |= {name for variant in throughput.VARIANTS for name in variant.options}
    fields = {name for section in vars(EngineConfig()).values() for name in vars(section)}
    assert options - planned <= fields
    assert planned <= options


@pytest.mark.parametrize("benchmark", [throughput, ablation])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere/at/all"], "no model 'nowhere/at/all'"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--context", "8"], "at least 64 tokens"),
    ],
)
def test_impossible_runs_fail_with_one_line(benchmark, arguments, message, capsys, tmp_path: Path):
    assert benchmark.main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
