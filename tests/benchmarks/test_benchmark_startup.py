"""`benchmarks.startup` from its command line to its report, on the fake device."""

import json

import pytest

from benchmarks import report as reports
from benchmarks import startup
from benchmarks.floors import FLOORS
from forge_serve.bench.errors import BenchmarkError

pytestmark = pytest.mark.slow


def test_round_times_imports_and_both_starts(tmp_path, capsys):
    file = tmp_path / "report.json"
    arguments = ["--rounds", "1", "--serve-args=--fake", "--output", str(file)]
    assert startup.main(arguments) == 0
    text, progress = capsys.readouterr()
    assert "round 1 of 1: imports" in progress
    report = json.loads(file.read_text())
    assert report["benchmark"] == "startup" and "flax.nnx" in report["imports"]
    [only] = report["rounds"]
    median = report["median"]
    assert median["imports_s"] == only["imports_s"] > 0.1
    for kind in ("warm", "cold"):
        assert 0 < median[kind]["serving_s"] <= median[kind]["ready_s"]
        ratio = only[kind]["serving_s"] / only["imports_s"]
        assert median[kind]["serving_per_imports"] == ratio
        assert {"serving", "ready"} <= set(median[kind]["phases_s"])
        assert f"| {kind} cache | {median[kind]['serving_s']:.2f} |" in text


def test_median_is_taken_per_figure():
    def figures(imports_s: float, serving_s: float) -> dict:
        times = {"serving_s": serving_s, "ready_s": 2 * serving_s}
        start = {**times, "peak_bytes": 1e9, "phases_s": {"import": 0.5}}
        return {"imports_s": imports_s, "warm": start, "cold": start}

    median = startup.medians([figures(1, 2), figures(2, 3), figures(4, 4)])
    assert median["imports_s"] == 2
    assert median["warm"] == {
        "serving_s": 3, "ready_s": 6, "peak_bytes": 1e9, "serving_per_imports": 1.5,
        "phases_s": {"import": 0.5},
    }  # fmt: skip


def test_model_folder_has_floors_and_one_kind_is_enough(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 2**20)
    start = {"serving_s": 1.0, "ready_s": 2.0, "peak_bytes": 3e9, "phases_s": {}}
    monkeypatch.setattr(startup, "start", lambda *_: start)
    monkeypatch.setattr(startup, "bare_imports", lambda: 1.0)
    report = reports.new("startup", **startup.measure([str(tmp_path)], 1, ["warm"]))
    assert "cold" not in report["median"]
    [floors] = report["floors"]
    assert all(seconds > 0 for seconds in floors.values())
    text = startup.table(report)
    assert "| warm cache | 1.00 | 2.00 | 1.00 | 3.00 |" in text
    assert all(f"| {title} |" in text for title in FLOORS.values())


def test_bundle_is_written_before_the_rounds(tmp_path, monkeypatch):
    started, wrote = [], []

    def start(_: object, folder: str) -> dict:
        started.append(folder)
        return {"serving_s": 1.0, "ready_s": 2.0, "peak_bytes": 3e9, "phases_s": {}}

    monkeypatch.setattr(startup, "start", start)
    monkeypatch.setattr(startup, "write_bundle", lambda _, folder: wrote.append(folder))
    monkeypatch.setattr(startup, "bare_imports", lambda: 1.0)
    report = reports.new("startup", **startup.measure(["forge-tiny"], 2, ["bundle"]))
    assert wrote == [started[1]] and started[1:] == 2 * wrote
    assert "| bundle | 1.00 | 2.00 | 1.00 | 3.00 |" in startup.table(report)


def test_failed_bundle_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BenchmarkError, match=r"no bundle was written: .*is not empty"):
        startup.write_bundle(["forge-tiny"], str(tmp_path))


def test_failing_imports_are_an_error(monkeypatch):
    monkeypatch.setattr(startup, "BARE", "import sys; sys.exit(3)")
    with pytest.raises(BenchmarkError, match="installed"):
        startup.bare_imports()
