"""GGUF files with gated DeltaNet: the folder's model, with its projections in other matrices."""

import dataclasses
import json
import shutil

import gguf
import numpy as np
import pytest
from gguf_writer import Q, write_gguf
from paged import PagedRun
from safetensors.numpy import save_file

import forge_jax
from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.load import check_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.config import EngineConfig
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.tools.convert import convert
from forge_jax.weights.ggml_formats import GGMLFormat

NAMES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


def load(path, **options):
    return forge_jax.load(str(path), progress=False, **options)


def golden(folder):
    stored = read_header(folder / "golden.safetensors")
    return {key: np.array(tensor.read()) for key, tensor in stored.items()}


def logits(model, ids) -> np.ndarray:
    return np.stack(PagedRun(model, len(ids)).step(ids.tolist()))


@pytest.fixture(scope="module")
def folders(goldens, tmp_path_factory):
    """Return the test models; files of Qwen3-Next have experts in every layer."""
    found = {name: goldens / name for name in NAMES}
    folder = tmp_path_factory.mktemp("experts") / "qwen3_next"
    shutil.copytree(goldens / "qwen3_next", folder)
    config = json.loads((folder / "config.json").read_text())
    [dense] = config["mlp_only_layers"]
    del config["layer_types"][dense]
    config |= {"mlp_only_layers": [], "num_hidden_layers": len(config["layer_types"])}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in read_header(folder / "model.safetensors").items():
        parts = name.split(".")
        if parts[1] == "layers":
            layer = int(parts[2])
            if layer == dense:
                continue
            parts[2] = str(layer - (layer > dense))
        tensors[".".join(parts)] = np.array(tensor.read())
    save_file(tensors, folder / "model.safetensors")
    return found | {"qwen3_next": folder}


@pytest.mark.parametrize("name", NAMES)
def test_gguf_model_equals_the_folders(name, folders, tmp_path):
    """The rows of projections may be in another order, so logits are compared."""
    got, want = load(write_gguf(folders[name], tmp_path / "m.gguf")), load(folders[name])
    assert not got.spec.grouped and got.spec.tiled == (name == "qwen3_5_moe")
    layout = {"grouped": want.spec.grouped, "tiled": want.spec.tiled}
    assert dataclasses.replace(got.spec, **layout) == want.spec
    ids = golden(folders[name])["input_ids"]
    np.testing.assert_allclose(logits(got, ids), logits(want, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_logits_match_hugging_face(name, goldens, tmp_path):
    want = golden(goldens / name)
    found = logits(load(write_gguf(goldens / name, tmp_path / "m.gguf")), want["input_ids"])
    np.testing.assert_allclose(found, want["logits"], atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_matrices_in_blocks_match_the_decoded_ones(name, folders, tmp_path):
    file, ids = write_gguf(folders[name], tmp_path / "m.gguf", Q.Q8_0), golden(folders[name])
    found = []
    for kept in ("packed", "decoded"):
        model = load(file, dtype="float32", gguf_weights=kept)
        leaves = model.model.in_format(GGMLFormat)
        for leaf in ("delta.qkvz", "delta.ba"):
            assert (f"layers.0.{leaf}.weight" in leaves) == (kept == "packed")
        found.append(logits(model, ids["input_ids"]))
    np.testing.assert_allclose(*found, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["packed", "decoded"])
def test_converted_folder_generates_the_same_tokens(kept, goldens, tmp_path):
    file = write_gguf(goldens / "qwen3_5_moe", tmp_path / "m.gguf", Q.Q8_0)
    options = EngineConfig.from_options(model=str(file), gguf_weights=kept)
    out = convert(options, tmp_path / "out", progress=False).folder
    assert ("gguf_types" in json.loads((out / "config.json").read_text())) == (kept == "packed")
    tokens, params = [], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    for model, own in ((file, {"gguf_weights": kept}), (out, {})):
        llm = LLM(str(model), max_num_seqs=2, max_num_batched_tokens=16, **own)
        [output] = llm.generate([[5, 9, 40, 7, 99, 3]], params, progress=False)
        tokens.append(list(output.outputs[0].token_ids))
        llm.close()
    assert tokens[0] == tokens[1] and len(tokens[0]) == 8


def with_value(key, add):
    def more(writer):
        writer.kv_data[0].pop(f"qwen3next.{key}", None)
        add(writer)

    return more


BROKEN = {
    "heads": (
        with_value("ssm.time_step_rank", lambda w: w.add_ssm_time_step_rank(3)),
        "qwen3next.ssm.time_step_rank must be a multiple of ssm.group_count 2",
    ),
    "an inner size": (
        with_value("ssm.inner_size", lambda w: w.add_ssm_inner_size(47)),
        "qwen3next.ssm.inner_size must be a multiple of ssm.time_step_rank 4",
    ),
    "widths": (
        with_value("ssm.state_size", lambda w: w.add_ssm_state_size(16)),
        r"ssm_conv1d.weight' must have 112 rows on 2 axes, got shape \(80, 4\)",
    ),
    "no taps": (
        with_value("ssm.conv_kernel", lambda w: None),
        "qwen3next.ssm.conv_kernel is missing",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_are_named(fault, folders, tmp_path):
    more, match = BROKEN[fault]
    file = write_gguf(folders["qwen3_next"], tmp_path / "m.gguf", more=more)
    with pytest.raises(CheckpointError, match=match):
        build_model(read_spec(file))


def test_positive_decay_is_rejected(folders, tmp_path, monkeypatch):
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(self, name, tensor, *args, **options):
        add_tensor(self, name, -tensor if name == "blk.0.ssm_a" else tensor, *args, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    file = write_gguf(folders["qwen3_next"], tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ssm_a' must be negative"):
        load(file)


def test_tensors_of_another_layout_are_rejected(folders, tmp_path):
    """Early files of Qwen3-Next have queries, keys, values and gates in one tensor."""

    def more(writer):
        writer.add_tensor("blk.0.ssm_in.weight", np.zeros((128, 64), np.float32))

    file = write_gguf(folders["qwen3_next"], tmp_path / "m.gguf", more=more)
    with pytest.raises(UnsupportedModelError, match=r"'blk\.0\.ssm_in\.weight' is not part of"):
        check_weights(build_model(read_spec(file)), file)
