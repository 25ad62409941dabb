"""GGUF files with gated DeltaNet: the folder's model, with its projections in other matrices."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from delta_net_zoo import VALUE_DIM, write_wide
from gguf_writer import Q, write_gguf
from paged import PagedRun
from safetensors.numpy import load_file, save_file

import forge_jax
from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.load import check_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.config import EngineConfig
from forge_jax.engine.weights import EngineWeights
from forge_jax.errors import CheckpointError, ConfigError, ModelError, UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.models.registry import decoded
from forge_jax.tools.convert import convert
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.ggml_formats import GGMLFormat
from forge_kernels import cpu

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


@pytest.mark.parametrize("kept", ["packed", "decoded"])
@pytest.mark.parametrize("name", NAMES)
def test_new_weights_by_checkpoint_name_need_the_checkpoints_layout(name, kept, folders, tmp_path):
    """Columns in another order have the same shape, so they cannot be detected later."""
    file = write_gguf(folders[name], tmp_path / "m.gguf", Q.Q8_0 if kept == "packed" else Q.F32)
    loaded = load(file, dtype="float32", gguf_weights=kept)
    options = SimpleNamespace(device=None, mesh=None, stages=())
    runner = SimpleNamespace(model=loaded.model, leaves=loaded.leaves, options=options)
    weights = EngineWeights(runner, None, None)
    tensors = load_file(folders[name] / "model.safetensors")
    reason = "a different order than the checkpoint.* or load the original checkpoint"
    if name != "qwen3_5":
        with pytest.raises(ModelError, match=reason):
            weights.prepare(tensors)
    elif kept == "packed":
        with pytest.raises(ModelError, match='or load the model with gguf_weights="decoded"'):
            weights.prepare(tensors)
    else:
        for ours, theirs in zip(weights.prepare(tensors), loaded.leaves, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    by_name = dict(zip(loaded.model.names, loaded.leaves, strict=True))
    for ours, theirs in zip(weights.prepare(by_name), loaded.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def output_matrices(file, shards, formats, *, kept=True):
    """Return the output matrix of the first layer's gated DeltaNet on each device."""
    spec = read_spec(file)
    model = build_model(spec if kept else decoded(spec), "bfloat16", formats, shards)
    shapes = dict(zip(model.names, model.leaves, strict=True))
    reader = check_weights(model, file).leaves["layers.0.delta.out.weight"]
    read = {leaf: [] for leaf in shapes}
    for leaf, _, array in reader.shards(range(shards)):
        assert (array.shape, array.dtype) == (shapes[leaf].shape, shapes[leaf].dtype)
        read[leaf].append(array)
    for index in range(shards):
        own = (jnp.asarray(read[n][index]) if read[n] else shapes[n] for n in model.names)
        yield model.decoder(tuple(own)).layers[0].delta.out


FORMS = {  # and the error of rounding, as a fraction of the largest output
    "XLA": (WeightFormats(), 1e-2),
    "kernels": (WeightFormats(layers="bf16"), 1e-2),
    "kernels with rounded rows": (WeightFormats(layers="bf16", ggml_activations="int8"), 3e-2),
    "int8": (WeightFormats(rounded="int8"), 3e-2),
    "int4": (WeightFormats(rounded="int4"), 1e-2),
    "fp8": (WeightFormats(rounded="fp8"), 6e-2),
}


@pytest.mark.parametrize(
    ("form", "kind", "keys"),
    [
        *((form, "Q8_0", 2) for form in FORMS),
        *((form, "Q4_K", 2) for form in ("XLA", "kernels", "kernels with rounded rows")),
        *(("XLA", "Q6_K", 4), ("int4", "Q8_0", 4)),
    ],
)
def test_devices_add_up_to_the_whole_output_with_reordered_heads(
    form, kind, keys, goldens, tmp_path
):
    """A device's columns are two ranges, which split blocks and groups."""
    formats, rounding = FORMS[form]
    if formats.layers is not None:
        if not cpu.available():
            pytest.skip("the CPU kernels are not available")
        cpu.load()
    file = write_wide(goldens / "qwen3_5", tmp_path / "m.gguf", Q[kind], keys=keys)
    kept, shards = formats.rounded is None, 2
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, 2, shards, keys // shards * VALUE_DIM), np.float32)  # as in files

    def product(linear, x):
        return np.asarray(linear(jnp.asarray(x.reshape(len(x), -1), "bfloat16")), np.float32)

    [whole] = output_matrices(file, 1, formats, kept=kept)
    parts = output_matrices(file, shards, formats, kept=kept)
    found = [product(part, x[:, :, index]) for index, part in enumerate(parts)]
    want = product(whole, x)
    np.testing.assert_allclose(sum(found), want, atol=rounding * np.abs(want).max(), rtol=0)
    assert np.abs(found[0] - want).max() > 0.3 * np.abs(want).max()


def test_devices_without_whole_groups_of_reordered_heads_are_rejected(goldens, tmp_path):
    file = write_wide(goldens / "qwen3_5", tmp_path / "m.gguf")
    spec = read_spec(file)
    heads = spec.recurrent_heads._replace(value_dim=24)
    with pytest.raises(ConfigError, match=r"splits the groups of .*out_proj.*16 values must stay"):
        build_model(dataclasses.replace(spec, recurrent_heads=heads), shards=2)
    spec = decoded(spec)
    heads = spec.recurrent_heads._replace(value_dim=12)
    with pytest.raises(ConfigError, match=r"columns of .*out_proj.* in ranges of 12, but each 16"):
        build_model(
            dataclasses.replace(spec, recurrent_heads=heads),
            formats=WeightFormats(rounded="int4"),
            shards=2,
        )


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
def test_broken_files_are_named_in_the_error(fault, folders, tmp_path):
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
