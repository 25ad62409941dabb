"""`benchmarks.weights` from its command line to its report."""

from __future__ import annotations

import json

import pytest

from benchmarks import weights

pytestmark = [pytest.mark.long, pytest.mark.quick_compile, pytest.mark.slow]


def test_each_form_has_its_row(stories, tmp_path, capsys):
    file = tmp_path / "report.json"
    sizes = ["--texts", "2", "--rounds", "1", "--context", "8", "--output", str(file)]
    options = ["--forms", "int4", "--gguf", "Q8_0", *sizes]
    assert weights.main(["--model", str(stories), *options]) == 0
    plain, int4, packed, decoded = json.loads(file.read_text())["rows"]
    assert (plain["quantization"], int4["quantization"]) == ("none", "int4")
    assert plain["more_perplexity"] == 0 and plain["ratio"] == 1
    assert int4["bytes"] < plain["bytes"] and 0 < abs(int4["more_perplexity"]) < 0.2
    assert packed["quantization"] == "GGUF Q8_0, packed"
    assert packed["bytes"] < decoded["bytes"] == plain["bytes"]
    assert abs(packed["more_perplexity"] - decoded["more_perplexity"]) < 0.002
    assert abs(packed["more_perplexity"]) < 0.01
    found = (plain, int4, packed, decoded)
    assert all(row["tokens_per_s"] > 0 and row["perplexity"] > 1 for row in found)
    assert "| int4 |" in capsys.readouterr().out


def test_an_unknown_model_is_one_line(capsys):
    assert weights.main(["--model", "/nowhere/at/all"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
