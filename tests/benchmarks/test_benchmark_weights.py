"""`benchmarks.weights` from its command line to its report."""

from __future__ import annotations

import json

from benchmarks import weights


def test_each_form_has_its_row(stories, tmp_path, capsys):
    file = tmp_path / "report.json"
    sizes = ["--texts", "2", "--rounds", "1", "--context", "8", "--output", str(file)]
    assert weights.main(["--model", str(stories), *sizes]) == 0
    rows = {row["quantization"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["none", "int8", "fp8", "int4"]
    assert rows["none"]["more_perplexity"] == 0 and rows["none"]["ratio"] == 1
    assert rows["int4"]["bytes"] < rows["int8"]["bytes"] < rows["none"]["bytes"]
    assert all(row["tokens_per_s"] > 0 and row["perplexity"] > 1 for row in rows.values())
    changed = [abs(rows[kind]["more_perplexity"]) for kind in ("int8", "fp8", "int4")]
    assert 0 < min(changed) and max(changed) < 0.2
    assert "| fp8 |" in capsys.readouterr().out


def test_an_unknown_model_is_one_line(capsys):
    assert weights.main(["--model", "/nowhere/at/all"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
