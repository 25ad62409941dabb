"""Checkpoints: weights are read as stored, and errors name the location."""

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from forge_jax.checkpoint import load, matrix
from forge_jax.checkpoint.folder import open_checkpoint
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.errors import CheckpointError
from forge_jax.models import build_model
from forge_jax.models.families import ARCHITECTURES
from forge_jax.models.weight_map import Tensor
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.stored import StoredTensor
from forge_kernels import cpu
from forge_kernels.linear import files, packed
from forge_kernels.linear.files import read_files

GOLDENS = Path(__file__).parent.parent / "fixtures" / "goldens"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text((GOLDENS / "llama2" / "config.json").read_text())
    return tmp_path


def arrays_of(folder):
    stored = read_header(folder / "model.safetensors")
    return {name: np.array(tensor.read()) for name, tensor in stored.items()}


@pytest.fixture
def tensors():
    return arrays_of(GOLDENS / "llama2")


def read(folder, dtype="auto"):
    model = build_model(read_spec(folder), dtype)
    leaves = load_weights(model, folder, progress=False)
    assert [(x.shape, x.dtype) for x in leaves] == [(x.shape, x.dtype) for x in model.leaves]
    return dict(zip(model.names, leaves, strict=True))


def test_fused_leaves_stack_their_tensors(folder, tensors):
    save_file(tensors, folder / "model.safetensors")
    leaves = read(folder)
    layer = "model.layers.1.self_attn."
    np.testing.assert_array_equal(
        leaves["layers.1.attention.qkv.weight"],
        np.concatenate([tensors[f"{layer}{p}_proj.weight"] for p in "qkv"]),
    )
    np.testing.assert_array_equal(leaves["head.weight"], tensors["lm_head.weight"])


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_cast_to_the_models_dtype(folder, tensors, stored, dtype):
    tensors = {name: np.asarray(x, jnp.dtype(stored)) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    got = read(folder, dtype)["embedding.weight"]
    expected = tensors["model.embed_tokens.weight"].astype(np.float32).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(got, expected)


def test_shards_are_found_through_the_index_and_extras_ignored(folder, tensors):
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.int64)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    index = {}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / shard)
        index |= dict.fromkeys(held, shard)
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    np.testing.assert_array_equal(read(folder)["norm.weight"], tensors["model.norm.weight"])

    moved = next(name for name in names if index[name] == "a.safetensors")
    path.write_text(json.dumps({"weight_map": index | {moved: "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"lists .* in b\.safetensors, but it is not there"):
        read(folder)
    path.write_text(json.dumps({"weight_map": index | {moved: "../b.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside the folder"):
        read(folder)
    path.write_text(json.dumps({"weight_map": index | {moved: "c.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"c\.safetensors is missing"):
        read(folder)
    for broken in ("{}", "[]", "{", '{"weight_map": {"x": 1}}', '{"weight_map": []}'):
        path.write_text(broken)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
            read(folder)


def test_all_tensor_errors_are_named_before_any_data_is_read(folder, tensors, monkeypatch):
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    tensors["model.norm.weight"] = np.ones(63, np.float32)
    tensors["lm_head.weight"] = np.ones((331, 64), np.int8)
    save_file(tensors, folder / "model.safetensors")
    monkeypatch.setattr(matrix.StoredMatrix, "__init__", None)
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    assert "model.layers.2.self_attn.k_proj.weight is missing" in str(caught.value)
    assert "model.norm.weight has shape (63,), not (64,)" in str(caught.value)
    assert "lm_head.weight is int8, which is not supported" in str(caught.value)


@pytest.mark.parametrize("form", [None, "bf16", "int4"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_equal_from_one_tensor_and_from_many(name, form, tmp_path):
    if form is not None and not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    source = GOLDENS / name
    spec = read_spec(source)
    model = build_model(spec, "bfloat16", WeightFormats(layers=form))
    stored = arrays_of(source)
    architecture = ARCHITECTURES[spec.architecture]
    many, fused = architecture.weights(spec), architecture.other_weights(spec)
    together = {
        part.name: np.concatenate([stored[part.name] for part in many[leaf]]).reshape(part.shape)
        if len(parts) == 1 < len(many[leaf])
        else stored[many[leaf][i].name]
        for leaf, parts in fused.items()
        for i, part in enumerate(parts)
    }
    assert not any("experts.0." in key for key in together)
    save_file(together, tmp_path / "model.safetensors")
    leaves = load_weights(model, source, progress=False)
    for key, mine, theirs in zip(
        model.names, leaves, load_weights(model, tmp_path, progress=False), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs, key)
    at = model.names.index("layers.0.mlp.gate_up.weight")
    assert leaves[at].shape[0] == spec.experts.count
    if form is None:
        first = many["layers.0.mlp.gate_up.weight"][2]  # the gate of the second expert
        inner = spec.experts.intermediate_size
        want = stored[first.name].astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(leaves[at][1, :inner], want)


@pytest.mark.parametrize("form", ["plain", "bf16", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama2", "mixtral"])
def test_bits_are_independent_of_the_read_size(name, form, monkeypatch):
    if form != "plain" and not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    formats = WeightFormats() if form == "plain" else WeightFormats(layers=form, head=form)
    model = build_model(read_spec(GOLDENS / name), "bfloat16", formats)
    expected = load_weights(model, GOLDENS / name, progress=False)
    monkeypatch.setattr(matrix, "CHUNK_BYTES", 7 * 64 * 2)  # seven rows; then two panels
    monkeypatch.setattr(packed, "CHUNK_BYTES", 64 * 64 * 2)
    monkeypatch.setattr(files, "CHUNK_BYTES", 7 * 64 * 2)
    monkeypatch.setattr(load, "_TOGETHER_BYTES", 64 * 64 * 2)
    got = load_weights(model, GOLDENS / name, progress=False)
    for key, mine, theirs in zip(model.names, got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs, key)


@pytest.mark.parametrize("form", [None, "bf16", "int8", "int4"])
@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama2", "mixtral", "qwen3_moe"])
@pytest.mark.quick_cases(12)
def test_leaves_read_in_cpp_equal_those_read_in_python(name, stored, form, tmp_path, monkeypatch):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    spec = read_spec(GOLDENS / name)
    tensors = {key: x.astype(jnp.dtype(stored)) for key, x in arrays_of(GOLDENS / name).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    model = build_model(spec, "bfloat16", WeightFormats(layers=form, head=form))
    calls = []
    monkeypatch.setattr(load, "read_files", lambda leaves: calls.append(1) or read_files(leaves))
    in_cpp = load_weights(model, tmp_path, progress=False)
    assert calls or (form is None and stored != "bfloat16")
    monkeypatch.setattr(load.cpu, "identity", lambda: None)
    in_python = load_weights(model, tmp_path, progress=False)
    for key, mine, theirs in zip(model.names, in_cpp, in_python, strict=True):
        np.testing.assert_array_equal(mine, theirs, key)


def test_file_truncated_during_a_cpp_read_is_an_error(folder, tensors, monkeypatch):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    tensors = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    model = build_model(read_spec(folder), "bfloat16", WeightFormats(layers="bf16"))
    checked = load.check_weights(model, folder)
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(load, "check_weights", lambda *_: checked)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is shorter than when it was checked"
    ):
        load_weights(model, folder, progress=False)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_any_rows_of_a_tensor_can_be_read(dtype, tmp_path):
    """Covers three axes and two, plain and transposed, in the stored type and cast."""
    values = np.arange(3 * 4 * 5, dtype=np.float32).reshape(3, 4, 5)
    (tmp_path / "x").write_bytes(b"head" + values.tobytes())
    stored = StoredTensor("x", tmp_path / "x", values.dtype, values.shape, 4)
    turned = stored.transposed()
    flat = replace(stored, shape=(12, 5))
    assert turned.shape == (3, 5, 4) and turned.transposed().shape == stored.shape
    for tensor, rows in (
        (stored, values.reshape(-1, 5)),
        (turned, values.swapaxes(1, 2).reshape(-1, 4)),
        (flat, values.reshape(-1, 5)),
        (flat.transposed(), values.reshape(-1, 5).T),
    ):
        for first in range(len(rows)):
            for end in range(first, len(rows) + 1):
                out = np.empty((end - first, rows.shape[1]), dtype)
                tensor.read_rows(out, first)
                np.testing.assert_array_equal(out, rows[first:end])
    with pytest.raises(CheckpointError, match="shorter than when it was checked"):
        flat.read_rows(np.empty((2, 5), dtype), 11)


def test_reader_thread_error_ends_the_load(folder, tensors, monkeypatch):
    save_file(tensors, folder / "model.safetensors")
    model = build_model(read_spec(folder))
    checked = load.check_weights(model, folder)
    (folder / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(matrix, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(load, "check_weights", lambda *_: checked)
    with pytest.raises(CheckpointError, match="shorter than when it was checked"):
        load_weights(model, folder, progress=False)


def test_head_that_differs_from_its_tied_embedding_is_rejected(folder, tensors, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    monkeypatch.setattr(load, "_COMPARED_ROWS", 100)  # the matrix has 331 rows
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.copy()
    save_file(tensors, folder / "model.safetensors")
    np.testing.assert_array_equal(read(folder)["head.weight"], embedding)
    for head in (tensors["lm_head.weight"] * 1, embedding[:-1], embedding.astype(np.float16)):
        head[-1, -1] += 1
        save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="set tie_word_embeddings to false in config"):
            read(folder)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(tensors, folder / "model.safetensors")
    read(folder)


def test_missing_experts_are_named_in_the_stored_form(tmp_path):
    source = GOLDENS / "mixtral"
    model = build_model(read_spec(source))
    stored = arrays_of(source)
    gone = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    del stored[gone]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"its config\.json: tensor {gone} is missing$"):
        load_weights(model, tmp_path, progress=False)


def test_weight_bytes_include_all_experts():
    for name, inner, count in (("mixtral", 48, 4), ("qwen3_moe", 16, 12)):
        stored = read_header(GOLDENS / name / "model.safetensors")
        model = build_model(read_spec(GOLDENS / name))
        assert model.param_bytes == sum(4 * np.prod(t.shape) for t in stored.values())
        assert model.param_bytes > 2 * 4 * count * 3 * inner * 64


def test_weight_map_may_transpose(folder, tensors, monkeypatch):
    llama = ARCHITECTURES["LlamaForCausalLM"]

    def transposed(spec):
        weights = llama.weights(spec)
        (head,) = weights["head.weight"]
        return weights | {"head.weight": (Tensor(head.name, head.shape[::-1], transpose=True),)}

    architecture = replace(llama, weights=transposed)
    monkeypatch.setitem(ARCHITECTURES, "LlamaForCausalLM", architecture)
    head = tensors["lm_head.weight"]
    save_file(tensors | {"lm_head.weight": head.T.copy()}, folder / "model.safetensors")
    np.testing.assert_array_equal(read(folder)["head.weight"], head)


def test_reader_supports_every_stored_dtype(tmp_path):
    arrays = {
        "f8": np.arange(6).astype(ml_dtypes.float8_e4m3fn).view(np.uint8),
        "bf16": np.arange(6).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.float64(2.5),
        "bool": np.array([True, False]),
    }
    save_file({name: np.asarray(x) for name, x in arrays.items()}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")
    for name, array in arrays.items():
        np.testing.assert_array_equal(stored[name].read(), array)
        assert stored[name].read().shape == array.shape
    text = header({"f8": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, b"\x38\x40")
    (tmp_path / "f8.safetensors").write_bytes(text)
    values = read_header(tmp_path / "f8.safetensors")["f8"].read()
    np.testing.assert_array_equal(values.astype(np.float32), [1.0, 2.0])


def header(entries, data=b"") -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EMPTY = b'{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not a safetensors file"),
        (b"\x01", "truncated or not a safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "truncated or not a safetensors file"),
        (header(b"{"), "broken header"),
        (header(b"[" * 100_000), "broken header"),
        (header(b"\xff\xff"), "broken header"),
        (header(b"[]"), "broken header: not a JSON object"),
        (header(b'{"x": %s, "x": %s}' % (EMPTY, EMPTY)), "a name appears twice: 'x'"),
        (header({"x": 3}), "tensor 'x' of .*: broken header entry"),
        (header({"x": GOOD | {"data_offsets": [0]}}), "tensor 'x' of .*: broken header entry"),
        (header({"x": GOOD | {"shape": [-2]}}), "tensor 'x' of .* must be integers of at least 0"),
        (header({"x": GOOD | {"shape": [2.0]}}), "tensor 'x' of .* must be integers of at least 0"),
        (header({"x": GOOD | {"dtype": "F4"}}), "tensor 'x' of .*: unknown dtype 'F4'"),
        (header({"x": GOOD}, b"1234567"), "tensor 'x' of .* ends at byte 8 of 7.*download it"),
        (header({"x": GOOD | {"shape": [3]}}, bytes(8)), r"F32 \[3\] does not fill 8 bytes"),
        (
            header({"x": GOOD | {"data_offsets": [8, 0]}}, bytes(8)),
            "at byte 0 before it begins",
        ),
        (header({"x": GOOD | {"dtype": ["F32"]}}, bytes(8)), "unknown dtype"),
    ],
)
def test_broken_file_is_rejected(tmp_path, content, message):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_folder_without_weights_is_rejected(tmp_path):
    with pytest.raises(CheckpointError, match=r"no weights: expected one of model\.safetensors, "):
        open_checkpoint(tmp_path)


PEAK = """
import sys, threading, pathlib
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.models import build_model
from forge_jax.weights.formats import WeightFormats
from forge_jax.checkpoint.load import load_weights
from forge_kernels import cpu
from forge_kernels.linear import files, packed
from forge_kernels.linear.files import read_files
import jax.numpy as jnp

def status(key):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

folder = pathlib.Path(sys.argv[1])
form = None if sys.argv[2] == "plain" else sys.argv[2]
if form is not None:
    cpu.load()
model = build_model(read_spec(folder), formats=WeightFormats(layers=form, head=form))
jnp.zeros(8).block_until_ready()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
before = status("VmRSS")
leaves = load_weights(model, folder, progress=False)
peak = status("VmHWM") - before
print(peak / model.param_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("form", ["plain", "bf16", "int8", "int4"])
@pytest.mark.quick_cases(1)
def test_reading_takes_little_more_memory_than_the_weights(folder, form):
    """Compares the peak of a new process, mapped files included, with the bytes of the weights.

    While a matrix is packed, it exists three times: in the file, plain, and packed.
    """
    if form != "plain" and not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "head_dim": 64,
        "num_attention_heads": 8, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_spec(folder)
    weights = ARCHITECTURES[spec.architecture].weights(spec)
    blank = {
        part.name: np.ones(part.shape, ml_dtypes.bfloat16)
        for parts in weights.values()
        for part in parts
    }
    save_file(blank, folder / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(folder), form], check=True, capture_output=True, text=True
    )
    # The kernel may reclaim idle pages meanwhile, which lowers the figure.
    assert 0.4 < float(done.stdout) < (1.2 if form == "plain" else 1.25)
