"""`benchmarks.load` from its command line to its report, on a tiny model."""

import json

import pytest

from benchmarks import load
from benchmarks.floors import FLOORS
from benchmarks.random_model import SHAPES, vocabulary, write_model
from forge_jax.checkpoint.load import check_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models import build_model

pytestmark = pytest.mark.slow


def test_every_format_loads_in_its_own_process(tmp_path, capsys):
    file, folder = tmp_path / "report.json", tmp_path / "forms"
    arguments = ["--shape", "tiny", "--rounds", "1", "--cache", "cold"]
    assert load.main([*arguments, "--folder", str(folder), "--output", str(file)]) == 0
    text, progress = capsys.readouterr()
    report = json.loads(file.read_text())
    assert report["benchmark"] == "load" and report["cache"] == "cold"
    names = {case.name for case in load.CASES} - report["left_out"].keys()
    [only] = report["rounds"]
    assert only.keys() == report["median"].keys() == names
    plain = build_model(read_spec(folder / "safetensors")).param_bytes
    for name in names:
        assert only[name]["seconds"] > 0 and f"| {name} |" in text
        assert only[name]["bytes"] == plain or "packed" in name
        assert f"round 1 of 1: {name} " in progress
    [floors] = report["floors"]
    assert floors.keys() == FLOORS.keys() and all(s > 0 for s in floors.values())
    assert all(f"| {title} |" in text for title in FLOORS.values())


def test_gguf_file_has_the_keys_that_the_model_needs(tmp_path):
    pytest.importorskip("gguf")
    write_model(tmp_path / "model", SHAPES["tiny"])
    load.write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    spec = read_spec(tmp_path / "model.gguf")
    assert spec.dtype == "bfloat16"
    check_weights(build_model(spec), tmp_path / "model.gguf")


def test_gguf_file_for_peers_has_the_same_vocabulary(tmp_path):
    gguf = pytest.importorskip("gguf")
    write_model(tmp_path / "model", SHAPES["tiny"])
    load.write_gguf(tmp_path / "model", tmp_path / "model.gguf", vocabulary=True)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    names = vocabulary(SHAPES["tiny"].vocab_size)
    assert fields["tokenizer.ggml.tokens"].contents() == names
    assert fields["tokenizer.ggml.bos_token_id"].contents() == names.index("<s>")
    assert fields["llama.vocab_size"].contents() == len(names)


def test_median_is_taken_per_figure():
    def one(floor: float, seconds: float) -> dict:
        return {
            load.FLOOR: {"seconds": floor, "bytes": 1e9},
            "GGUF": {"seconds": seconds, "bytes": 2e9},
        }

    median = load.medians([one(1, 4), one(2, 4), one(4, 5)])
    assert median["GGUF"] == {"seconds": 4, "per_floor": 2, "gb_per_s": 0.5}
    assert median[load.FLOOR]["per_floor"] == 1
