"""`benchmarks.sanity`: finding models, and reporting working and broken ones."""

from __future__ import annotations

import json
import shutil

import pytest

from benchmarks import sanity

pytestmark = pytest.mark.slow

SMALL = ["--sequences", "2", "--output-len", "8"]


def test_models_are_found_in_folders(tmp_path, stories):
    (tmp_path / "a" / "b").mkdir(parents=True)
    shutil.copytree(stories, tmp_path / "a" / "b" / "model")
    (tmp_path / "z.gguf").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    assert sanity.found(str(tmp_path)) == [str(tmp_path / "a/b/model"), str(tmp_path / "z.gguf")]
    assert sanity.found(str(stories)) == [str(stories)]
    assert sanity.found(str(tmp_path / "empty")) == [str(tmp_path / "empty")]
    assert sanity.found("some/name") == ["some/name"]


def test_each_model_has_a_line_and_a_failure_sets_the_exit_code(
    tmp_path, stories, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sanity, "BUNDLED", str(stories))  # loads faster
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    file = tmp_path / "report.json"
    assert sanity.main([str(tmp_path), *SMALL, "--output", str(file)]) == 1
    works, broken = json.loads(file.read_text())["models"]
    assert works["model"] == str(stories) and works["answer"]
    assert works["ready_s"] > 0 and works["decode_tokens_s"] > 0 and works["mean_logprob"] < 0
    assert "NoSuchModel" in broken["error"]
    good, bad = capsys.readouterr().out.splitlines()
    assert good.startswith("ok  ") and bad.startswith("FAILED  ")


def test_crashed_process_costs_only_its_own_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sanity.sys, "executable", "false")
    assert "ended with 1" in sanity._in_a_process("any", [])["error"]
