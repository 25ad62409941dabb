"""GGUF files with latent attention: the folder's model, from whole or split matrices."""

import dataclasses
import json
import shutil

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

# A file has one number for both of YaRN's factors.
CHANGES = {"deepseek_v2_lite": {"mscale": 0.7}}


@pytest.fixture(scope="module")
def folders(goldens, tmp_path_factory):
    """Return the test models that a file can hold."""
    found = {}
    for name in ("deepseek_v2", "deepseek_v2_lite", "deepseek_v3"):
        found[name] = goldens / name
        if name in CHANGES:
            found[name] = tmp_path_factory.mktemp("changed") / name
            shutil.copytree(goldens / name, found[name])
            config = json.loads((found[name] / "config.json").read_text())
            config["rope_parameters"] |= CHANGES[name]
            (found[name] / "config.json").write_text(json.dumps(config))
    return found


def load(path, **options):
    return forge_jax.load(str(path), progress=False, **options)


def logits(model, folder) -> np.ndarray:
    ids = np.array(read_header(folder / "golden.safetensors")["input_ids"].read())
    return np.stack(PagedRun(model, len(ids)).step(ids.tolist()))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_lite", "deepseek_v3"])
def test_gguf_model_equals_the_folders(name, split, folders, tmp_path, figure):
    got = load(write_gguf(folders[name], tmp_path / "m.gguf", split=split))
    want = load(folders[name])
    assert got.spec.sm_scale == pytest.approx(want.spec.sm_scale, rel=1e-6)
    assert dataclasses.replace(got.spec, attention_scale=want.spec.attention_scale) == want.spec
    assert got.model.names == want.model.names
    for leaf, ours, theirs in zip(got.model.names, got.leaves, want.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs, leaf)
    figure("families", name, "gguf", "same bits")


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_logits_match_hugging_face(name, goldens, tmp_path):
    folder = goldens / name
    want = np.array(read_header(folder / "golden.safetensors")["logits"].read())
    found = logits(load(write_gguf(folder, tmp_path / "m.gguf")), folder)
    np.testing.assert_allclose(found, want, atol=2e-4, rtol=0)


@pytest.mark.parametrize("split", [True, False])
def test_matrices_in_blocks_match_the_decoded_ones(split, folders, tmp_path):
    """The matrices for keys and values are decoded, all others stay in blocks."""
    folder = folders["deepseek_v3"]
    file = write_gguf(folder, tmp_path / "m.gguf", Q.Q8_0, split=split)
    packed, decoded = (
        load(file, dtype="float32", gguf_weights=kept) for kept in ("packed", "decoded")
    )
    found = packed.model.in_format(GGMLFormat)
    assert {"layers.0.attention.kv_a.weight", "layers.1.mlp.gate_up.weight"} <= {*found}
    for part in ("key_up", "value_up"):
        leaf = f"layers.0.attention.{part}"
        np.testing.assert_array_equal(packed.leaf(leaf), decoded.leaf(leaf))
    np.testing.assert_allclose(logits(packed, folder), logits(decoded, folder), atol=1e-4, rtol=0)


def with_value(key, add):
    def more(writer):
        writer.kv_data[0].pop(f"deepseek2.{key}", None)
        add(writer)

    return more


FLOATS = np.zeros((4, 32, 16), np.float32)
GATING = gguf.ExpertGatingFuncType
BROKEN = {
    "a softmax with corrections": (
        with_value("expert_gating_func", lambda w: w.add_expert_gating_func(GATING.SOFTMAX)),
        UnsupportedModelError,
        "expert_gating_func is 1, which is not supported with corrected scores; supported: 2",
    ),
    "a temperature": (
        lambda w: w.add_float32("deepseek2.attention.temperature_scale", 0.1),
        UnsupportedModelError,
        "deepseek2.attention.temperature_scale is not supported",
    ),
    "other heads": (
        with_value("attention.head_count", lambda w: w.add_head_count(2)),
        CheckpointError,
        r"attn_k_b.weight' must have a matrix for each of 2 heads, got shape \(4, 32, 16\)",
    ),
    "half of a matrix": (
        lambda w: w.add_tensor("blk.7.attn_k_b.weight", FLOATS),
        CheckpointError,
        "the tensor blk.7.attn_v_b.weight is missing",
    ),
    "different latents": (
        lambda w: (
            w.add_tensor("blk.7.attn_k_b.weight", FLOATS),
            w.add_tensor("blk.7.attn_v_b.weight", FLOATS),
        ),
        CheckpointError,
        "have different latents, 32 and 16 wide",
    ),
    "no plain part": (
        with_value("attention.key_length_mla", lambda w: w.add_key_length_mla(8)),
        CheckpointError,
        "deepseek2.attention.key_length_mla must be an integer from 9",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_are_named_in_the_error(fault, goldens, tmp_path):
    more, error, match = BROKEN[fault]
    file = write_gguf(goldens / "deepseek_v3", tmp_path / "m.gguf", more=more)
    with pytest.raises(error, match=match):
        build_model(read_spec(file))


def test_corrected_scores_are_sigmoids_by_default(goldens, tmp_path):
    """Files of GLM-4.7-Flash may not name the function."""
    more = with_value("expert_gating_func", lambda w: None)
    spec = read_spec(write_gguf(goldens / "deepseek_v3", tmp_path / "m.gguf", more=more))
    assert spec.architecture == "DeepseekV3ForCausalLM"
