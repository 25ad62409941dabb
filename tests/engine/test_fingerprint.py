"""The fingerprint: it changes exactly with the inputs that determine the bits."""

import shutil

import jax
import pytest

from forge_jax.engine import fingerprint
from forge_jax.engine.fingerprint import system_fingerprint

SETTINGS = {"block_size": 16, "shapes": [{"num_tokens": 64}]}


@pytest.fixture
def folder(tmp_path, goldens):
    return shutil.copytree(goldens / "llama2", tmp_path / "model")


def of(folder, **settings):
    return system_fingerprint(folder, jax.devices()[0], SETTINGS | settings)


def test_fingerprint_is_independent_of_the_models_path(folder, tmp_path):
    before = of(folder)
    assert before == of(folder)
    (folder / "notes.txt").write_text("no part of the model")
    assert before == of(folder.rename(tmp_path / "elsewhere"))


def test_fingerprint_changes_with_model_settings_and_flags(folder, monkeypatch):
    seen = {of(folder), of(folder, block_size=32)}
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    seen.add(of(folder))
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    seen.add(of(folder))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    seen.add(of(folder))
    monkeypatch.setattr(fingerprint, "CPU_INFO", folder / "no such file")
    seen.add(of(folder))
    assert len(seen) == 6


def test_fingerprint_samples_large_files(folder, monkeypatch):
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES", 1 << 10)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 16)
    monkeypatch.setattr(fingerprint, "NUM_SAMPLES", 8)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    before = of(folder)
    # All bytes from the middle of the data on change, as they do after training.
    half = len(content) // 2
    weights.write_bytes(content[:half] + bytes(b ^ 1 for b in content[half:]))
    assert of(folder) != before
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert of(folder) != before, "the last bytes are a sample"
    weights.write_bytes(content + b" ")
    assert of(folder) != before
