"""Experts of GGUF files: the folders' models, in floats or in the file's blocks."""

import json
import math

import numpy as np
import pytest
from gguf_writer import write_gguf
from gguf_zoo import LAYERS, Q, write_zoo
from paged import PagedRun
from safetensors.numpy import save_file
from test_gguf_blocks import BYTES, GREEDY, IDS, IN_BYTES, OPTIONS, loaded, needs_kernels

import forge_jax
from forge_jax import LLM
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.config import EngineConfig
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.tools.convert import convert
from forge_jax.weights.ggml_formats import GGMLFormat
from forge_jax.weights.ggml_types import KEY as TYPES_KEY

EXPERTS = 3
MIXED = (Q.Q8_0, Q.Q8_0, Q.Q8_0, Q.Q8_0, Q.Q5_K, Q.Q5_K, Q.Q4_0)  # experts in 6 and 4 bits


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """Write two layers: gates and ups in 4 bits with down in 6, and vice versa."""
    file = tmp_path_factory.mktemp("experts") / "zoo.gguf"
    return write_zoo(file, (LAYERS[0], MIXED), experts=EXPERTS)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "olmoe"])
def test_experts_match_the_folders(name, goldens, tmp_path):
    """All layers have experts, because llama.cpp supports no other model."""
    folder = tmp_path / "folder"
    folder.mkdir()
    config = json.loads((goldens / name / "config.json").read_text())
    dense = config.get("mlp_only_layers")
    config |= {"num_hidden_layers": 2, "mlp_only_layers": [], "layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    stored = read_header(goldens / name / "model.safetensors")
    tensors = {
        key.replace("layers.2.", "layers.1.") if dense else key: np.array(tensor.read())
        for key, tensor in stored.items()
        if not dense or "layers.1." not in key
    }
    save_file(tensors, folder / "model.safetensors")
    got = forge_jax.load(str(write_gguf(folder, tmp_path / "m.gguf")), progress=False)
    want = forge_jax.load(str(folder), progress=False)
    assert got.spec == want.spec
    for leaf, ours, theirs in zip(got.model.names, got.leaves, want.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs, leaf)


def logits(model) -> np.ndarray:
    return np.concatenate(PagedRun(model, 2).step(IDS))


@pytest.mark.slow
def test_experts_in_blocks_match_the_decoded_ones(zoo):
    """In plain XLA and float32, one expert's tile at a time is converted to float."""
    packed = loaded(zoo, dtype="float32")
    assert not packed.model.packings
    assert "layers.1.mlp.down.weight" in packed.model.in_format(GGMLFormat)
    ours = logits(packed)
    want = logits(loaded(zoo, dtype="float32", gguf_weights="decoded"))
    assert np.linalg.norm(ours - want) < 1e-5 * np.linalg.norm(want)


@pytest.mark.slow
def test_kernels_give_the_decoded_models_bits(zoo):
    needs_kernels()
    packed = loaded(zoo, gguf_weights="packed-exact")
    formats = {
        leaf: packing.format
        for leaf, packing in packed.model.packings.items()
        if leaf.startswith("layers.") and ".mlp." in leaf
    }
    assert formats == {
        "layers.0.mlp.gate_up.weight": "int4 blocks",
        "layers.0.mlp.down.weight": "int6 blocks",
        "layers.1.mlp.gate_up.weight": "int6 blocks",
        "layers.1.mlp.down.weight": "int4 blocks",
    }
    decoded = loaded(zoo, gguf_weights="decoded")
    assert decoded.model.packings["layers.0.mlp.down.weight"].format == "bf16"
    # Queries, keys and values have two types, so their product is in two pieces.
    np.testing.assert_array_equal(logits(packed), logits(decoded))


def test_experts_take_the_bytes_of_their_types(zoo):
    for options in ({}, {"dtype": "float32"}):
        if not options:
            needs_kernels()
        model = loaded(zoo, **options)
        num_bytes = IN_BYTES if options else BYTES
        sizes = {}
        for name, leaf in zip(model.model.names, model.leaves, strict=True):
            base = name.rsplit(".", 1)[0]
            sizes[base] = sizes.get(base, 0) + leaf.nbytes
        for layer, (both, down) in enumerate((("Q4_K", "Q6_K"), ("Q5_K", "Q4_0"))):
            assert sizes[f"layers.{layer}.mlp.gate_up"] == EXPERTS * 2 * 512 * num_bytes[both]
            assert sizes[f"layers.{layer}.mlp.down"] == EXPERTS * 512 * num_bytes[down]


def test_row_is_independent_of_its_neighbors(zoo):
    model = loaded(zoo)
    other = [[323 - token for token in IDS[1]]]
    alone = [PagedRun(model, 2).step([IDS[0], *each])[0] for each in ([IDS[1]], other)]
    np.testing.assert_array_equal(*alone)


@pytest.mark.slow
def test_converted_folder_has_the_same_experts(zoo, tmp_path):
    config = EngineConfig.from_options(model=str(zoo))
    folder = convert(config, tmp_path / "out", progress=False).folder
    types = json.loads((folder / "config.json").read_text())[TYPES_KEY]
    # One entry covers all experts of a layer.
    assert types["model.layers.0.block_sparse_moe.experts.w2.weight"] == "Q6_K"
    assert len(types) == 2 * (4 + 3) + 2
    tokens = []
    for model in (zoo, folder):
        llm = LLM(str(model), **OPTIONS)
        outputs = llm.generate([IDS[0]], GREEDY, progress=False)
        tokens.append(list(outputs[0].outputs[0].token_ids))
        llm.close()
    assert tokens[0] == tokens[1] and len(tokens[0]) == 12


def test_gates_of_5_bits_and_ups_of_8_bits_share_storage(tmp_path):
    needs_kernels()
    layer = (*(Q.Q4_0,) * 4, Q.Q5_0, Q.Q8_0, Q.Q5_0)
    file = write_zoo(tmp_path / "zoo.gguf", (layer,), experts=EXPERTS)
    packed = loaded(file, gguf_weights="packed-exact")
    leaves = [f"layers.0.mlp.{each}.weight" for each in ("gate_up", "down")]
    formats = [packed.model.packings[leaf].format for leaf in leaves]
    assert formats == ["int8 blocks", "int6 blocks"]
    np.testing.assert_array_equal(logits(packed), logits(loaded(file, gguf_weights="decoded")))


def test_gates_and_ups_of_two_types_are_rejected_unless_decoded(tmp_path):
    file = write_zoo(tmp_path / "zoo.gguf", (LAYERS[2],), experts=EXPERTS)
    with pytest.raises(
        UnsupportedModelError,
        match=r"experts.0.w1.weight and .*experts.0.w3.weight have different types.*decoded",
    ):
        build_model(read_spec(file))
    model = loaded(file, gguf_weights="decoded", dtype="float32")
    assert math.prod(model.leaf("layers.0.mlp.down.weight").shape) == EXPERTS * 256 * 512


@pytest.mark.slow
def test_experts_work_with_one_float_matrix(tmp_path):
    """If one of both is not in blocks, neither is packed for the kernels."""
    kinds = (*LAYERS[0][:6], Q.BF16)
    file = write_zoo(tmp_path / "zoo.gguf", (kinds,), experts=EXPERTS)
    model, decoded = (loaded(file, gguf_weights=kept) for kept in ("packed-exact", "decoded"))
    assert not any(".mlp." in leaf for leaf in model.model.packings)
    ours, want = logits(model), logits(decoded)
    assert np.linalg.norm(ours - want) < 0.02 * np.linalg.norm(want)


def test_wrong_number_of_experts_is_named_in_the_error(tmp_path, goldens):
    def wrong(writer):
        del writer.kv_data[0]["llama.expert_count"]
        writer.add_expert_count(5)

    file = write_gguf(goldens / "mixtral", tmp_path / "m.gguf", more=wrong)
    with pytest.raises(
        CheckpointError, match=r"a matrix for each of 5 experts, got shape \(4, 48, 64\)"
    ):
        read_spec(file)
