"""`benchmarks.structured` from its command line to its report, on the fake device."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from benchmarks import structured
from forge_jax import LLM
from forge_jax.config import EngineConfig
from forge_jax.engine.fake import assemble_fake
from forge_jax.grammar import GrammarCompiler

pytestmark = pytest.mark.slow

SMALL = ["--vocab-size", "600", "--schemas", "5", "--streams", "4", "--rounds", "2"]


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_llm(model: str, **options: Any) -> LLM:
        config = EngineConfig.from_options(model=model, **options)
        parts = assemble_fake(config, step_time_s=1e-3, max_model_len=512, check=False)
        tokenizer = parts.tokenizer
        assert tokenizer is not None
        parts.core.grammars = GrammarCompiler(
            tokenizer, tokenizer.vocab_size, (tokenizer.eos_token_id or 0,), limits=None
        )
        return LLM.from_parts(parts)

    monkeypatch.setattr(structured, "LLM", fake_llm)


@pytest.mark.usefixtures("fake_engine")
def test_structured_benchmark_reports_times_and_rates(tmp_path, capsys):
    file = tmp_path / "report.json"
    assert structured.main(["--text", "README.md", *SMALL, "--output", str(file)]) == 0
    out, report = capsys.readouterr().out, json.loads(file.read_text())
    found, rates = report["grammars"], report["throughput"]
    assert found["schemas"] == 5 and found["masks"] > 50
    assert 0 < found["mask_s"]["p50"] <= found["mask_s"]["p99"] <= found["mask_s"]["p100"]
    assert rates["to_free"]["free"] == 1.0 and set(rates["samples"]) == set(rates["to_free"])
    assert all(len(samples) == 2 for samples in rates["samples"].values())
    assert "| mask |" in out and "half of each" in out


def test_short_text_is_rejected(tmp_path, capsys):
    text = tmp_path / "short"
    text.write_text("a few words")
    assert structured.main(["--text", str(text)]) == 1
    assert "pass more" in capsys.readouterr().err


def test_schemas_depend_only_on_the_seed():
    drawn = [json.dumps(structured.schema(random.Random(seed))) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
