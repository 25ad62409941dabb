"""GGUF files of Gemma 4: the folder's model, and errors for what it does not support."""

import gguf
import numpy as np
import pytest
from gguf_writer import Q, write_gguf
from paged import PagedRun

import forge_jax
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.weights.ggml_formats import GGMLFormat

NAMES = ["gemma4", "gemma4_shared", "gemma4_moe"]


def load(path, **options):
    return forge_jax.load(str(path), progress=False, **options)


def golden(folder):
    stored = read_header(folder / "golden.safetensors")
    return {key: np.array(tensor.read()) for key, tensor in stored.items()}


@pytest.mark.parametrize("name", NAMES)
def test_gguf_model_equals_the_folders(name, goldens, tmp_path, figure):
    got, want = load(write_gguf(goldens / name, tmp_path / "m.gguf")), load(goldens / name)
    assert got.spec == want.spec
    assert got.model.names == want.model.names
    for leaf, ours, theirs in zip(got.model.names, got.leaves, want.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs, leaf)
    figure("families", name, "gguf", "same bits")


@pytest.mark.parametrize("name", NAMES)
def test_logits_match_hugging_face(name, goldens, tmp_path):
    want = golden(goldens / name)
    run = PagedRun(load(write_gguf(goldens / name, tmp_path / "m.gguf")), len(want["input_ids"]))
    found = np.stack(run.step(want["input_ids"].tolist()))
    np.testing.assert_allclose(found, want["logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma4_shared", "gemma4_moe"])
def test_matrices_in_blocks_match_the_decoded_ones(name, goldens, tmp_path):
    """The embedding of the layers' own inputs is decoded."""
    file = write_gguf(goldens / name, tmp_path / "m.gguf", Q.Q8_0)
    ids, logits = golden(goldens / name)["input_ids"].tolist(), []
    for kept in ("packed", "decoded"):
        model = load(file, dtype="float32", gguf_weights=kept)
        found = model.model.in_format(GGMLFormat)
        part = "input.gate" if name == "gemma4_shared" else "mlp.gate_up"
        assert (f"layers.0.{part}.weight" in found) == (kept == "packed")
        logits.append(np.stack(PagedRun(model, len(ids)).step(ids)))
    np.testing.assert_allclose(*logits, atol=1e-4, rtol=0)


def with_value(key, add):
    def more(writer):
        writer.kv_data[0].pop(f"gemma4.{key}", None)
        add(writer)

    return more


HEADS, INNER, WIDTH = "attention.head_count_kv", "feed_forward_length", "rope.dimension_count_swa"
BROKEN = {
    "layers of one type that differ": (
        with_value(HEADS, lambda w: w.add_head_count_kv([2, 1, 1, 1])),
        UnsupportedModelError,
        "gemma4.attention.head_count_kv is not supported if layers of one type differ",
    ),
    "too few layers": (
        with_value(HEADS, lambda w: w.add_head_count_kv([2, 1])),
        CheckpointError,
        "gemma4.attention.head_count_kv must be an array of 4 integers from 1 on",
    ),
    "no heads": (
        with_value(HEADS, lambda w: w.add_head_count_kv([2, 1, 0, 1])),
        CheckpointError,
        "gemma4.attention.head_count_kv must be an array of 4 integers from 1 on",
    ),
    "other sizes": (
        with_value(INNER, lambda w: w.add_feed_forward_length([112, 112, 224, 224])),
        UnsupportedModelError,
        "gemma4.feed_forward_length must be twice as large in the 0 layers with shared keys",
    ),
    "a partial rotation": (
        with_value(WIDTH, lambda w: w.add_rope_dimension_count_swa(8)),
        UnsupportedModelError,
        "gemma4.rope.dimension_count_swa must be the head dim 16, got 8",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_are_named_in_the_error(fault, goldens, tmp_path):
    more, error, match = BROKEN[fault]
    file = write_gguf(goldens / "gemma4", tmp_path / "m.gguf", more=more)
    with pytest.raises(error, match=match):
        build_model(read_spec(file))


@pytest.mark.parametrize("factors", [[1.0] * 8, [1.0, 2.0] * 8, [1e30] + [1.0] * 15])
def test_other_rotations_are_rejected(factors, goldens, tmp_path, monkeypatch):
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(self, name, tensor, *args, **options):
        own = np.array(factors, np.float32) if name == "rope_freqs.weight" else tensor
        add_tensor(self, name, own, *args, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    file = write_gguf(goldens / "gemma4", tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight must have 16 factors"):
        read_spec(file)
