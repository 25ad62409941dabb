"""Matrices of GGUF files: they stay in 4 or 8 bits and equal the decoded ones in use.

`packed-exact` is equal to the bit. `packed` multiplies with activations rounded to int8.
"""

import dataclasses

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf_writer import write_gguf
from gguf_zoo import LAYERS, NAMES, SHAPES, Q, random_blocks, write_zoo
from lora_files import write_adapter
from paged import PagedRun
from safetensors.numpy import save_file

import forge_jax
from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.config import EngineConfig
from forge_jax.engine.builder import (
    choose_device,
    choose_kernels,
    read_converted,
    read_model_spec,
)
from forge_jax.errors import CheckpointError, ConfigError, ModelError
from forge_jax.models import build_model
from forge_jax.research import LoadedModel
from forge_jax.tools import convert
from forge_jax.weights.formats import MixedFormat, WeightFormats
from forge_jax.weights.ggml import BY_NAME
from forge_jax.weights.ggml_formats import GGMLFormat
from forge_jax.weights.ggml_types import TYPES
from forge_jax.weights.quantized import QuantizedFormat
from forge_kernels import cpu
from forge_kernels.embed import embed

# Bytes of 256 values, with their scales and minima, as the CPU kernels and as XLA keep them.
BYTES = {
    **{"Q4_0": 144, "Q4_1": 160, "Q5_0": 208, "Q5_1": 224, "Q8_0": 272},
    **{"Q2_K": 164, "Q3_K": 146, "Q4_K": 148, "Q5_K": 212, "Q6_K": 210},
    **{"IQ4_NL": 144, "IQ4_XS": 138},
}
IN_BYTES = {
    **BYTES,
    **{"Q5_0": 272, "Q5_1": 288, "Q5_K": 276, "Q6_K": 274, "IQ4_NL": 272, "IQ4_XS": 266},
}
MODULES = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)
OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 128}
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
IDS = np.random.default_rng(1).integers(3, 320, (2, 21)).tolist()


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return write_zoo(tmp_path_factory.mktemp("zoo") / "zoo.gguf")


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    """Write a model whose gates and ups share a type, which gives the decoded model's bits."""
    return write_zoo(tmp_path_factory.mktemp("alike") / "alike.gguf", (*LAYERS[:2], LAYERS[3]))


def loaded(file, **options) -> LoadedModel:
    config = EngineConfig.from_options(model=str(file), **options)
    spec, device = read_model_spec(config, file), choose_device(config)
    formats = choose_kernels(config, spec, device, read_converted(config, file)).formats
    model = build_model(spec, config.model.dtype, formats)
    return LoadedModel(model, load_weights(model, file, progress=False), file)


def needs_kernels():
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_blocks_unpack_to_the_dequantizers_values(name):
    kind = Q[name]
    data = random_blocks(np.random.default_rng(kind), kind, 40, 512)
    form = BY_NAME[name]
    rows = form.unpacked(data.reshape(40, -1, form.block_bytes))
    np.testing.assert_array_equal(rows.floats(), gguf.quants.dequantize(data, kind))
    blocks = form.blocks
    assert blocks is not None and rows.factor.dtype == np.float16
    count = {"int8": 256, "iq4": 256, "int6": 64, "int4": 16}[blocks.values]
    least = 0 if blocks.minima and count < 256 else -count // 2
    assert least <= rows.values.min() and rows.values.max() < least + count
    assert blocks.bytes * 256 // blocks.size == BYTES[name]
    assert blocks.in_bytes.bytes * 256 // blocks.size == IN_BYTES[name]


def test_every_matrix_takes_the_bytes_of_its_type(zoo):
    """Covers both arrangements; queries and keys are separate from values of another type."""
    spec = read_spec(zoo)
    assert spec.ggml_types is not None and len(spec.ggml_types.types) == 4 * 7 - 1 + 2
    for options in ({}, {"kernels": "xla"}, {"dtype": "float32"}):
        if not options:
            needs_kernels()
        model = loaded(zoo, **options)
        assert bool(model.model.packings) == (not options)
        num_bytes = IN_BYTES if options else BYTES
        sizes = {}
        for name, leaf in zip(model.model.names, model.leaves, strict=True):
            base = name.rsplit(".", 1)[0]
            sizes[base] = sizes.get(base, 0) + leaf.nbytes
        float_bytes = 4 if "dtype" in options else 2
        for layer, kinds in enumerate(LAYERS):
            kept = dict(zip(NAMES, (kind.name for kind in kinds), strict=True))
            of = f"layers.{layer}"
            assert sizes[f"{of}.attention.out"] == 256 * num_bytes[kept["attn_output"]]
            assert sizes[f"{of}.mlp.down"] == 512 * num_bytes[kept["ffn_down"]]
            qkv = _total(sizes, f"{of}.attention.qkv")
            of_qkv = IN_BYTES if layer == 2 else num_bytes  # keys of Q5_0 between Q8_0
            wanted = [of_qkv.get(kept[f"attn_{each}"], 256 * float_bytes) for each in "qkv"]
            assert qkv == np.dot(wanted, [256, 128, 128])
            both = _total(sizes, f"{of}.mlp.gate_up")
            assert both == 512 * (num_bytes[kept["ffn_gate"]] + num_bytes[kept["ffn_up"]])
        assert sizes["embedding"] == 320 * num_bytes["Q4_K"]
        assert sizes["head"] == 320 * num_bytes["Q6_K"]
        assert sum(sizes.values()) == model.model.param_bytes
        assert (
            model.model.param_bytes
            < 0.47 * loaded(zoo, gguf_weights="decoded", dtype="bfloat16").model.param_bytes
        )


def _total(sizes: dict[str, int], start: str) -> int:
    return sum(size for name, size in sizes.items() if name.startswith(start))


def test_fused_matrices_share_storage_if_their_blocks_match(zoo):
    matrices = build_model(read_spec(zoo)).matrices
    qkv = [matrices[f"layers.{layer}.attention.qkv.weight"].format for layer in range(4)]
    pieces = [len(each.pieces) if isinstance(each, MixedFormat) else 1 for each in qkv]
    assert pieces == [2, 3, 1, 2]
    gate_up = [matrices[f"layers.{layer}.mlp.gate_up.weight"].format for layer in range(4)]
    assert [isinstance(each, GGMLFormat) for each in gate_up] == [True, True, False, True]


@pytest.mark.parametrize("kernels", ["xla", "auto"])
@pytest.mark.slow
def test_values_in_memory_match_the_decoded_model(zoo, kernels, monkeypatch):
    """Compares bits; rows are taken out as for an embedding.

    They are read in parts, of one tensor or of several.
    """
    for module in ("blocks", "quantized"):
        monkeypatch.setattr(f"forge_kernels.linear.{module}.CHUNK", 96 * 256)
    if kernels == "auto":
        needs_kernels()
    dtype = "float32" if kernels == "xla" else "bfloat16"
    packed = loaded(zoo, kernels=kernels, dtype=dtype)
    plain = loaded(zoo, kernels="xla", dtype=dtype, gguf_weights="decoded")
    checked = 0
    for leaf in packed.model.in_format(GGMLFormat):
        packing = packed.model.packings.get(leaf)
        if packing is not None and packing.paired:
            continue
        whole, _, piece = leaf.partition(".pieces.")
        values = np.asarray(plain.leaf(whole if not piece else f"{whole}.weight"))
        weight = packed.model.weight(packed.leaves, leaf)
        outputs = (weight.packing if packing is not None else weight.quantization).outputs
        rows = np.asarray(embed(weight, jnp.arange(outputs), dtype))
        start = 0
        for number in range(int(piece.split(".")[0]) if piece else 0):
            start += packed.model.matrices[f"{whole}.weight"].format.pieces[number].rows
        np.testing.assert_array_equal(rows, values[start : start + outputs], leaf)
        checked += 1
    assert checked >= 16


# ---- computation --------------------------------------------------------------------------------


def logits(model: LoadedModel) -> np.ndarray:
    run = PagedRun(model, 2)
    first = run.step(IDS)
    return np.concatenate([*first, *run.step([[5], [6]]), *run.step([[7, 8, 9], [10]])])


def test_cpu_kernels_give_the_decoded_models_bits(zoo, alike):
    """Except for gates and ups of two types, whose SwiGLU is not fused into a product."""
    needs_kernels()
    kept = ("packed-exact", "decoded")
    packed, decoded = (logits(loaded(alike, gguf_weights=each)) for each in kept)
    assert np.isfinite(packed).all() and packed.std() > 0.1
    np.testing.assert_array_equal(packed, decoded)
    packed, decoded = (logits(loaded(zoo, gguf_weights=each)) for each in kept)
    assert np.linalg.norm(packed - decoded) < 0.01 * np.linalg.norm(decoded)


def test_rounded_activations_stay_near_the_decoded_model(alike):
    """Measured: 0.026 of the norm of logits, with random blocks, which lose most."""
    needs_kernels()
    packed, decoded = (logits(loaded(alike, gguf_weights=each)) for each in ("packed", "decoded"))
    error = np.linalg.norm(packed - decoded) / np.linalg.norm(decoded)
    assert 0 < error < 0.04, error


@pytest.mark.slow
def test_plain_xla_gives_the_decoded_models_logits(zoo):
    options = {"kernels": "xla", "dtype": "float32"}
    packed, decoded = (
        logits(loaded(zoo, **options, gguf_weights=each)) for each in ("packed", "decoded")
    )
    assert np.linalg.norm(packed - decoded) < 1e-5 * np.linalg.norm(decoded)


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen2", Q.Q8_0), ("gemma2", Q.Q5_1), ("phi3", Q.Q4_0)]
)
@pytest.mark.slow
def test_other_families_match_the_decoded_model(name, kind, goldens, tmp_path):
    needs_kernels()
    file = write_gguf(goldens / name, tmp_path / "model.gguf", kind)
    model = loaded(file, gguf_weights="packed-exact")
    assert model.model.in_format(GGMLFormat) and model.model.packings
    decoded = loaded(file, gguf_weights="decoded")
    ids = np.random.default_rng(1).integers(3, 90, (1, 30)).tolist()
    np.testing.assert_array_equal(*(PagedRun(each, 1).step(ids)[0] for each in (model, decoded)))


@pytest.mark.slow
def test_tied_embedding_stays_in_blocks(tmp_path):
    needs_kernels()
    file = write_zoo(tmp_path / "tied.gguf", LAYERS[:1], embedding=Q.Q6_K, head=None)
    packed = loaded(file, gguf_weights="packed-exact")
    assert "embedding.weight" not in packed.model.names
    np.testing.assert_array_equal(logits(packed), logits(loaded(file, gguf_weights="decoded")))
    plain = loaded(file, kernels="xla", dtype="float32")
    assert plain.leaf("head.weight").nbytes == 320 * 256
    want = logits(loaded(file, kernels="xla", dtype="float32", gguf_weights="decoded"))
    assert np.linalg.norm(logits(plain) - want) < 1e-5 * np.linalg.norm(want)


# ---- the engine ----------------------------------------------------------------------------------


def generated(llm, prompts, **options):
    outputs = llm.generate(prompts, GREEDY, progress=False, **options)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "alone"), [("packed-exact", "decoded"), ("packed", "packed")], ids=["exact", "rounded"]
)
def test_row_is_independent_of_the_batch_and_of_drafts(alike, kept, alone):
    """Runs in a batch, with the model's first layers as its draft model.

    `alone` is the option of the run without a batch and drafts.
    """
    needs_kernels()
    llm = LLM(str(alike), gguf_weights=alone, deterministic=True, **OPTIONS)
    tokens = [generated(llm, [prompt]) for prompt in IDS]
    options = {"speculation": "draft", "draft_model": "self", "draft_layers": 2}
    llm = LLM(str(alike), gguf_weights=kept, deterministic=True, **OPTIONS, **options)
    assert generated(llm, [*IDS, IDS[0][:9]])[:2] == [each[0] for each in tokens]
    assert generated(llm, IDS[1:]) == tokens[1]


def test_fingerprint_depends_on_whether_matrices_are_in_blocks(zoo):
    names = build_model(read_spec(zoo)).formats, build_model(read_spec(zoo), "bfloat16").formats
    assert names[0] == names[1] == {"int4 blocks", "int8 blocks"}


def test_fingerprint_depends_on_whether_activations_are_rounded(zoo):
    spec = read_spec(zoo)
    names = [
        build_model(spec, "bfloat16", WeightFormats(layers="bf16", ggml_activations=rows)).formats
        for rows in (None, "int8")
    ]
    kinds = ("int4", "int6", "int8")
    assert names[1] - names[0] == {f"{kind} blocks, int8 rows" for kind in kinds}


@pytest.mark.slow
def test_adapters_work_on_matrices_in_blocks(tmp_path):
    needs_kernels()
    file = write_zoo(tmp_path / "model.gguf", LAYERS[:1])
    shapes = dict(zip(MODULES, SHAPES, strict=True))
    tensors = {
        f"model.layers.0.{module}.weight": np.zeros(shape, np.float32)
        for module, shape in shapes.items()
    }
    base = tmp_path / "base"
    base.mkdir()
    save_file(tensors, base / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", base, seed=1)
    lora = {"max_loras": 1, "lora": (f"mine={adapter}",)}
    said = [
        (generated(llm, IDS), generated(llm, IDS, lora="mine"))
        for llm in (
            LLM(str(file), gguf_weights=kept, **OPTIONS, **lora)
            for kept in ("packed-exact", "decoded")
        )
    ]
    assert said[0] == said[1] and said[0][0] != said[0][1]


def test_converted_folder_has_the_same_bits(zoo, tmp_path):
    for options in ({}, {"kernels": "xla"}):
        if not options:
            needs_kernels()
        out = tmp_path / f"out{len(options)}"
        config = EngineConfig.from_options(model=str(zoo), **options)
        assert convert.convert(config, out, progress=False).weight_bytes < 2.2e6
        again, source = loaded(out, **options), loaded(zoo, **options)
        assert again.model.names == source.model.names and again.spec == source.spec
        for ours, theirs in zip(again.leaves, source.leaves, strict=True):
            np.testing.assert_array_equal(
                np.asarray(ours).view(np.uint8), np.asarray(theirs).view(np.uint8)
            )
    with pytest.raises(ModelError, match="was converted with its matrices in GGUF blocks"):
        forge_jax.load(str(out), gguf_weights="decoded")
    for wanted in ({"gguf_weights": "decoded"}, {"quantization": "int8"}):
        with pytest.raises(CheckpointError, match="converted with"):
            loaded(out, **wanted)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantization_rounds_the_decoded_blocks(zoo, quantization, tmp_path):
    options = {"quantization": quantization, "kernels": "xla", "dtype": "float32"}
    plain = tmp_path / "plain"
    convert.convert(
        EngineConfig.from_options(
            model=str(zoo), gguf_weights="decoded", kernels="xla", dtype="float32"
        ),
        plain,
        progress=False,
    )
    got, out = loaded(zoo, **options), tmp_path / "out"
    assert not got.model.in_format(GGMLFormat) and got.model.in_format(QuantizedFormat)
    convert.convert(EngineConfig.from_options(model=str(zoo), **options), out, progress=False)
    for ours, theirs in zip(got.leaves, loaded(out, kernels="xla").leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert read_spec(plain).ggml_types is None and read_spec(out).ggml_types is None


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("columns", [512, 128, 96, 64, 32])
def test_column_slices_of_blocks_equal_those_of_the_whole(name, columns):
    kind, form = Q[name], BY_NAME[name]
    data = random_blocks(np.random.default_rng(kind), kind, 5, 768)
    rows = form.unpacked(data.reshape(5, -1, form.block_bytes))
    blocks = form.blocks.cut(columns)
    for begin in range(0, 768 - columns + 1, columns):
        part = rows.columns(begin, begin + columns, blocks)
        np.testing.assert_array_equal(part.floats(), rows.floats()[:, begin : begin + columns])
        assert part.factor.shape == (5, columns // blocks.size)
        assert part.scale is None or part.scale.shape == (5, columns // blocks.group)
    assert blocks.two_levels == form.blocks.two_levels


def test_uncuttable_blocks_error_names_valid_device_counts(tmp_path):
    assert TYPES["Q8_0"].cut(48).size == 16 and TYPES["Q4_K"].cut(48) is None
    assert TYPES["Q8_0"].cut(8) is None
    assert TYPES["IQ4_NL"].cut(64) == TYPES["IQ4_NL"]
    assert TYPES["IQ4_NL"].cut(48) == TYPES["Q8_0"].cut(48)
    file = write_zoo(tmp_path / "zoo.gguf", LAYERS[:1])
    spec = dataclasses.replace(
        read_spec(file), num_attention_heads=16, num_key_value_heads=16, head_dim=16
    )
    with pytest.raises(ConfigError, match=r"groups of model.layers.0.self_attn.o_proj.*16 values"):
        build_model(spec, shards=16)
    with pytest.raises(ConfigError, match="use --tensor-parallel 1 or 2 or 4 or 8, or --gguf"):
        build_model(spec, shards=16)


def test_types_absent_from_the_file_are_rejected(zoo, goldens, tmp_path):
    spec = read_spec(zoo)
    assert spec.ggml_types is not None
    renamed = {"Q4_K": "Q6_K"}
    types = tuple((name, renamed.get(kind, kind)) for name, kind in spec.ggml_types.types)
    other = dataclasses.replace(spec.ggml_types, types=types)
    model = build_model(dataclasses.replace(spec, ggml_types=other))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight does not have the type"):
        load_weights(model, zoo, progress=False)
    folder = tmp_path / "model"
    folder.mkdir()
    text = (goldens / "llama2" / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(text + ', "gguf_types": {"a": "Q9"}}')
    with pytest.raises(ModelError, match=r"gguf_types: a must be one of Q4_0, .*not 'Q9'"):
        read_spec(folder)
