"""`benchmarks.weights` from its command line to its report."""

from __future__ import annotations

import json

import gguf
import numpy as np
import pytest

from benchmarks import k_quants, kv_dtype, weights


@pytest.mark.long
@pytest.mark.quick_compile
@pytest.mark.slow
def test_each_format_has_a_row(short_stories, tmp_path, capsys, monkeypatch):
    for module in (weights, kv_dtype):
        monkeypatch.setattr(module, "SEQUENCES", 4)  # fewer shapes of steps
        monkeypatch.setattr(module, "TOKENS", 64)
    file = tmp_path / "report.json"
    sizes = ["--texts", "2", "--rounds", "1", "--context", "8", "--output", str(file)]
    options = ["--forms", "int4", "--gguf", "Q8_0", *sizes]
    assert weights.main(["--model", str(short_stories), *options]) == 0
    plain, int4, packed, exact, decoded = json.loads(file.read_text())["rows"]
    assert (plain["quantization"], int4["quantization"]) == ("none", "int4")
    assert plain["more_perplexity"] == 0 and plain["ratio"] == 1
    assert int4["bytes"] < plain["bytes"] and 0 < abs(int4["more_perplexity"]) < 0.2
    assert packed["quantization"] == "GGUF Q8_0, packed"
    assert packed["bytes"] < decoded["bytes"] == plain["bytes"]
    assert abs(packed["more_perplexity"] - decoded["more_perplexity"]) < 0.002
    assert abs(packed["more_perplexity"]) < 0.01
    assert exact["more_than_decoded"] == decoded["more_than_decoded"] == 0
    assert abs(packed["more_than_decoded"]) < 0.002
    found = (plain, int4, packed, exact, decoded)
    assert all(row["tokens_per_s"] > 0 and row["perplexity"] > 1 for row in found)
    assert "| int4 |" in capsys.readouterr().out


def test_unknown_model_fails_with_one_line(capsys):
    assert weights.main(["--model", "/nowhere/at/all"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    {
        **{"Q2_K": 0.35, "Q3_K": 0.17, "Q4_K": 0.085, "Q5_K": 0.042, "Q6_K": 0.021},
        **{"IQ4_NL": 0.09, "IQ4_XS": 0.09},
    }.items(),
)
def test_quantized_blocks_stay_near_the_source_values(kind, error):
    values = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    data = k_quants.quantize(values, kind)
    read = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    assert np.linalg.norm(read - values) < error * np.linalg.norm(values)
