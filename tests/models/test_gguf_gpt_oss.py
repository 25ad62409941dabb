"""GGUF files of gpt-oss: the folder's model, with experts in MXFP4, in other types or in floats."""

import dataclasses
import json
import shutil

import gguf
import numpy as np
import pytest
from gguf_writer import Q, write_gguf
from paged import PagedRun

import forge_jax
from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.gguf import read_gguf
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config import EngineConfig
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.tools.convert import convert
from forge_jax.weights.ggml import BY_NAME
from forge_jax.weights.ggml_formats import GGMLFormat
from forge_jax.weights.quantized import QuantizedFormat

LIMIT = 7.0  # hard-coded in llama.cpp
IDS = [[5, 9, 40, 7, 99, 3, 18, 150, 31, 4, 77, 2, 60], [11, 12, 13]]
GATE_UP, DOWN = "layers.0.mlp.gate_up.weight", "layers.0.mlp.down.weight"


@pytest.fixture(scope="module")
def folders(goldens, tmp_path_factory):
    """Return copies of the test models with the limit that files cannot name."""
    found = {}
    for name in ("gpt_oss", "gpt_oss_mxfp4"):
        found[name] = tmp_path_factory.mktemp("limit") / name
        shutil.copytree(goldens / name, found[name])
        config = json.loads((found[name] / "config.json").read_text())
        (found[name] / "config.json").write_text(json.dumps(config | {"swiglu_limit": LIMIT}))
    return found


def load(path, **options):
    return forge_jax.load(str(path), progress=False, **options)


def logits(model) -> np.ndarray:
    return np.concatenate(PagedRun(model, 2).step(IDS))


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4"])
def test_gguf_model_equals_the_folders(name, folders, tmp_path, figure):
    got, want = load(write_gguf(folders[name], tmp_path / "m.gguf")), load(folders[name])
    same = {"quantization": None, "dtype": want.spec.dtype}
    assert dataclasses.replace(got.spec, **same) == dataclasses.replace(want.spec, **same)
    assert (got.spec.quantization is None) == (want.spec.quantization is None)
    assert got.model.names == want.model.names
    for leaf, ours, theirs in zip(got.model.names, got.leaves, want.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(ours.dtype), leaf)
    figure("families", name, "gguf", "same bits")


def test_mxfp4_experts_keep_4_bits(folders, tmp_path):
    model = load(write_gguf(folders["gpt_oss_mxfp4"], tmp_path / "m.gguf"))
    for leaf in (GATE_UP, DOWN):
        assert isinstance(model.model.pieces[leaf].format, QuantizedFormat)
    assert model.leaf(GATE_UP).nbytes == 4 * 128 * 64 // 2  # matrices of four experts
    assert model.leaf("layers.0.mlp.gate_up.scale").nbytes == 4 * 128 * 2
    want = load(folders["gpt_oss_mxfp4"], dtype="float32")
    ours = load(tmp_path / "m.gguf", dtype="float32")
    np.testing.assert_array_equal(logits(ours), logits(want))


def test_mxfp4_values_match_ggml():
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (40, 3, 17), dtype=np.uint8)
    blocks[:, :, 0] = rng.integers(0, 254, (40, 3))
    want = gguf.quants.dequantize(blocks.reshape(40, -1), Q.MXFP4)
    np.testing.assert_array_equal(BY_NAME["MXFP4"].values(blocks), want)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_0], ids=lambda kind: kind.name)
def test_experts_in_blocks_match_the_decoded_ones(kind, folders, tmp_path):
    """The rest of the model is also in blocks. Down has rows of 48 values, so it holds floats."""
    file = write_gguf(folders["gpt_oss"], tmp_path / "m.gguf", kind)
    packed, decoded = (
        load(file, dtype="float32", gguf_weights=kept) for kept in ("packed", "decoded")
    )
    assert GATE_UP in packed.model.in_format(GGMLFormat)
    assert GATE_UP not in decoded.model.in_format(GGMLFormat)
    np.testing.assert_allclose(logits(packed), logits(decoded), atol=1e-4, rtol=0)


def test_mxfp4_experts_load_with_other_matrices_in_blocks(folders, tmp_path):
    """The published files: MXFP4 experts, and all other matrices in Q8_0."""
    file = write_gguf(folders["gpt_oss_mxfp4"], tmp_path / "m.gguf", Q.Q8_0)
    model = load(file, dtype="float32")
    assert "layers.0.attention.qkv.weight" in model.model.in_format(GGMLFormat)
    assert GATE_UP in model.model.in_format(QuantizedFormat)
    decoded = load(file, dtype="float32", gguf_weights="decoded")
    assert GATE_UP in decoded.model.in_format(QuantizedFormat)
    np.testing.assert_allclose(logits(model), logits(decoded), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_converted_folder_generates_the_same_tokens(folders, tmp_path):
    file = write_gguf(folders["gpt_oss_mxfp4"], tmp_path / "m.gguf", Q.Q8_0)
    out = convert(EngineConfig.from_options(model=str(file)), tmp_path / "out", progress=False)
    tokens = []
    for model in (file, out.folder):
        llm = LLM(str(model), max_num_seqs=2, max_num_batched_tokens=16)
        outputs = llm.generate(
            IDS[:1], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), progress=False
        )
        tokens.append(list(outputs[0].outputs[0].token_ids))
        llm.close()
    assert tokens[0] == tokens[1] and len(tokens[0]) == 8


def changed(file, out, change):
    """Write the file again with other tensors: `change(name, values)` returns None to drop one."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, "gpt-oss")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            kind = field.types[0]
            writer.add_key_value(field.name, field.contents(), kind)
    for tensor in reader.tensors:
        values, kind = change(tensor.name, tensor.data, tensor.tensor_type)
        if values is not None:
            writer.add_tensor(tensor.name, np.ascontiguousarray(values), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


UP = "blk.0.ffn_up_exps.weight"
BROKEN = {
    "a missing tensor": (
        lambda n, v, k: (None if n == UP else v, k),
        CheckpointError,
        "the tensor blk.0.ffn_up_exps.weight is missing",
    ),
    "fewer experts": (
        lambda n, v, k: (v[:2] if n == UP else v, k),
        CheckpointError,
        r"'blk.0.ffn_up_exps.weight' must have 3 axes, the first for 4 experts, got shape \(2,",
    ),
    "fewer ups": (
        lambda n, v, k: (v[:, :7] if n == UP else v, k),
        CheckpointError,
        r"must have the same shape, got \(4, 48, 64\) and \(4, 7, 64\)",
    ),
    "two types": (
        lambda n, v, k: (v.astype(np.float16), Q.F16) if n == UP else (v, k),
        UnsupportedModelError,
        r"gate_exps.weight' \(F32\) and .* \(F16\) have different types.* to the same type",
    ),
    "a bias without axes": (
        lambda n, v, k: (v[0] if n == "blk.1.ffn_down_exps.bias" else v, k),
        CheckpointError,
        "'blk.1.ffn_down_exps.bias' must have 2 axes",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_experts_are_named_in_the_error(fault, folders, tmp_path):
    change, error, match = BROKEN[fault]
    file = write_gguf(folders["gpt_oss"], tmp_path / "m.gguf")
    with pytest.raises(error, match=match):
        build_model(read_spec(changed(file, tmp_path / "changed.gguf", change)))


def test_layers_without_mxfp4_are_not_quantized(folders, tmp_path):
    """One layer has its ups in Q8_0, so all experts of this layer are floats or other blocks."""
    parts = ("blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_exps.weight")

    def change(name, values, kind):
        if name not in parts:
            return values, kind
        floats = gguf.quants.dequantize(values, kind)
        return gguf.quants.quantize(floats, Q.Q8_0), Q.Q8_0

    file = write_gguf(folders["gpt_oss_mxfp4"], tmp_path / "m.gguf")
    mixed = changed(file, tmp_path / "mixed.gguf", change)
    assert read_gguf(mixed).tensors["blk.1.ffn_down_exps.weight"].format.name == "MXFP4"
    model = load(mixed, dtype="float32")
    assert GATE_UP in model.model.in_format(QuantizedFormat)
    assert GATE_UP.replace(".0.", ".1.") in model.model.in_format(GGMLFormat)
    assert DOWN.replace(".0.", ".1.") not in model.model.in_format(QuantizedFormat)
    want = logits(load(file, dtype="float32"))
    assert np.linalg.norm(logits(model) - want) < 0.02 * np.linalg.norm(want)


def test_activations_of_a_float16_file_are_bfloat16(folders, tmp_path):
    """Activations of gpt-oss exceed float16's range."""
    file = write_gguf(folders["gpt_oss"], tmp_path / "m.gguf", Q.F16)
    formats = {each.format.name for each in read_gguf(file).tensors.values()}
    assert formats == {"F16", "F32"} and read_spec(file).dtype == "bfloat16"
