"""Quantized checkpoints: values follow the formats' definitions, and stay small.

`quant_writer` writes and computes the models in numpy, independently of the readers.
"""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quant_writer as writer
from paged import PagedRun
from safetensors.numpy import save_file
from test_quantized_config import args, compressed

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.load import load_tensors, load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.errors import CheckpointError, ConfigError, UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.research import LoadedModel
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.quantized import QuantizedFormat
from forge_jax.weights.stored import ArrayTensor
from forge_jax.weights.tensors import read_matrices
from forge_kernels import cpu
from forge_kernels.linear import Quantization, QuantizedWeight, linear

RNG = np.random.default_rng
IDS, OTHER = RNG(1).integers(0, 96, (2, 40)).tolist()
STEP = 251 / 8192  # scale of static activations
MOST = 251 / 64
TOKEN = args(dynamic=True, strategy="token")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def w4(**changes):
    weights = args(num_bits=4, strategy="group", group_size=32) | changes
    return compressed("pack-quantized", weights)


class Case(NamedTuple):
    config: dict[str, Any]
    quantize: Any  # (w, rng) -> (tensors, exact matrix); ordered ones also take the module
    round_rows: Any = None
    bits: float = 8  # per value
    ordered: bool = False


def order_of(module: str, width: int) -> np.ndarray:
    """Return the group of each column, which fused matrices share and experts do not."""
    parts = module.split(".")
    expert = int(parts[parts.index("experts") + 1]) if "experts" in parts else 0
    return RNG(width + 1000 * expert).permutation(np.arange(width) // 32)


def _in_order(config, quantize, **options):
    def with_order(w, rng, module):
        index = order_of(module, w.shape[1])
        return quantize(w, rng=rng, ordered=True, group=32, index=index, **options)

    return Case(config, with_order, bits=4, ordered=True)


FP8, INT8 = args(type="float"), args()
CASES = {
    "fp8_matrix_dynamic": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda w, rng: writer.fp8(w, rows=999, columns=999, shape=()),
        writer.round_fp8,
    ),
    "fp8_matrix_static": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda w, rng: writer.fp8(w, rows=999, columns=999, shape=(1,), input_scale=STEP),
        partial(writer.round_fp8, scale=STEP),
    ),
    "fp8_blocks": Case(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        lambda w, rng: writer.fp8(w, rows=128, columns=128, name="weight_scale_inv"),
        partial(writer.round_fp8, group=128),
    ),
    "fp8_rows": Case(
        compressed("float-quantized", FP8, TOKEN | {"type": "float"}),
        lambda w, rng: writer.fp8(w, rows=1, columns=999),
        writer.round_fp8,
    ),
    "fp8_rows_weights_only": Case(
        compressed("float-quantized", FP8), lambda w, rng: writer.fp8(w, rows=1, columns=999)
    ),
    "int8_rows": Case(
        compressed("int-quantized", INT8, TOKEN),
        lambda w, rng: writer.int8(w),
        writer.round_int8,
    ),
    "int8_matrix_static": Case(
        compressed("int-quantized", args(strategy="tensor"), args(strategy="tensor")),
        lambda w, rng: writer.int8(w, rows=999, input_scale=STEP),
        partial(writer.round_int8, scale=STEP),
    ),
    "int8_weights_only": Case(compressed("int-quantized", INT8), lambda w, rng: writer.int8(w)),
    "gptq": Case(GPTQ, lambda w, rng: writer.gptq(w, group=32, rng=rng), bits=4),
    "gptq_zeros": Case(
        GPTQ | {"sym": False},
        lambda w, rng: writer.gptq(w, group=32, rng=rng, symmetric=False),
        bits=4,
    ),
    "gptq_v2_rows": Case(
        GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "group_size": -1},
        lambda w, rng: writer.gptq(w, group=999, rng=rng, symmetric=False, version=2),
        bits=4,
    ),
    "gptq_ordered": _in_order(
        GPTQ | {"desc_act": True, "sym": False}, writer.gptq, symmetric=False
    ),
    "gptq_ordered_symmetric": _in_order(GPTQ | {"desc_act": True}, writer.gptq),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        lambda w, rng: writer.awq(w, group=32, rng=rng),
        bits=4,
    ),
    "w4a16": Case(w4(), lambda w, rng: writer.packed4(w, group=32, rng=rng), bits=4),
    "w4a16_zeros": Case(
        w4(symmetric=False),
        lambda w, rng: writer.packed4(w, group=32, rng=rng, symmetric=False),
        bits=4,
    ),
    "w4a16_ordered": _in_order(
        w4(actorder="group", symmetric=False), writer.packed4, symmetric=False
    ),
    "w4a16_rows": Case(
        w4(strategy="channel", group_size=None),
        lambda w, rng: writer.packed4(w, group=999, rng=rng),
        bits=4,
    ),
}


class Written(NamedTuple):
    case: Case
    folder: Any
    exact: dict[str, np.ndarray]
    loaded: LoadedModel


@pytest.fixture(scope="module", params=CASES)
def written(request, tmp_path_factory):
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    exact = write(case, folder)
    return Written(case, folder, exact, load(folder))


def quantizer(case: Case):
    """Return a function of (module, w) to (tensors, exact matrix)."""
    rng = RNG(2)
    if case.ordered:
        return lambda module, w: case.quantize(w, rng, module)
    return lambda _, w: case.quantize(w, rng)


def write(case: Case, folder, **config) -> dict[str, np.ndarray]:
    return writer.write_model(
        folder, writer.plain_weights(), quantizer(case), case.config, **config
    )


MODELS: dict[
    Any, Any
] = {}  # matrices of several files have the same format and share an executable


def load(folder, dtype="auto", formats=None) -> LoadedModel:
    model = build_model(read_spec(folder), dtype, formats)
    leaves = load_weights(model, folder, progress=False)
    return LoadedModel(MODELS.setdefault((model.graphdef, model.treedef), model), leaves, folder)


def logits(loaded) -> np.ndarray:
    """Return the logits of IDS in three steps, in a batch with another sequence."""
    run = PagedRun(loaded, 2)
    steps = (slice(0, 33), slice(33, 34), slice(34, None))
    return np.concatenate([run.step([IDS[part], OTHER[part]])[0] for part in steps])


def error(ours: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(ours - want) / np.linalg.norm(want))


def test_writers_fp8_matches_ml_dtypes():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        writer.from_e4m3(codes), codes.view(jnp.float8_e4m3fn).astype(np.float64)
    )
    x = RNG(0).standard_normal(10_000) * 10.0 ** RNG(1).integers(-4, 3, 10_000)
    inside = x[np.abs(x) < 448]
    np.testing.assert_array_equal(
        writer.to_e4m3(inside), inside.astype(np.float32).astype(jnp.float8_e4m3fn).view(np.uint8)
    )


def test_values_match_the_definition_exactly(written):
    spec = read_spec(written.folder)
    stored = read_header(written.folder / "model.safetensors")
    modules = [name.removesuffix(".weight") for name in written.exact if "_proj" in name]
    assert len(modules) == 7
    for module in modules:
        scheme = spec.quantization.scheme_of(module)
        want = written.exact[f"{module}.weight"]
        got = read_matrices(scheme, {module: want.shape}, stored)
        group = scheme.block[1] or want.shape[1]
        zero = 8 if got.zero is None else np.repeat(got.zero.astype(np.int64), group, axis=1)
        values = got.values.astype(np.float64) - (zero if scheme.values == "int4" else 0)
        scale = np.repeat(got.scale.astype(np.float64), group, axis=1)[:, : want.shape[1]]
        ours = values * scale
        if got.order is not None:
            want = want[:, got.order]
        np.testing.assert_array_equal(ours, want, module)


def test_tensors_in_memory_give_the_leaves_of_the_file(written):
    stored = read_header(written.folder / "model.safetensors")
    tensors = {name: np.array(tensor.read()) for name, tensor in stored.items()}
    model = build_model(read_spec(written.folder), "auto")
    found = load_tensors(model, tensors, device=None, mesh=None)
    for name, one, other in zip(model.names, written.loaded.leaves, found, strict=True):
        assert one.dtype == other.dtype and bool((one == other).all()), name


@pytest.mark.parametrize("shape", [(), (5,), (4, 3), (2, 3, 4)])
def test_arrays_are_read_like_stored_tensors(tmp_path, shape):
    """Scales of whole matrices have no axes, those of rows have one."""
    array = RNG(0).normal(size=shape).astype(np.float32)
    save_file({"scale": array}, tmp_path / "model.safetensors")
    stored = read_header(tmp_path / "model.safetensors")["scale"]
    rows = (-1, shape[-1]) if len(shape) > 1 else (-1,)
    whole = array.reshape(rows)
    for first in range(len(whole)):
        found = [np.empty_like(whole[first:]) for _ in range(2)]
        for source, out in zip((stored, ArrayTensor(array)), found, strict=True):
            assert source.read().shape == shape
            source.read_rows(out, first)
            assert np.array_equal(out, whole[first:])


@pytest.mark.quick_cases(4)
def test_logits_match_the_definition(written, figure):
    """Rounded activations near a tie may go either way, in few rows."""
    case = written.case
    want = writer.llama_logits(written.exact, IDS, case.round_rows)
    ours = logits(written.loaded)
    rows = np.linalg.norm(ours - want, axis=1) / np.linalg.norm(want, axis=1)
    form = next(name for name, each in CASES.items() if each is case)
    figure("forms", form, "logits", np.median(rows))
    assert np.median(rows) < 2e-6
    assert rows.max() < (5e-6 if case.round_rows is None else 0.03)
    if case.round_rows is not None:
        # The same without rounding the activations is clearly different.
        assert error(ours, writer.llama_logits(written.exact, IDS)) > 0.01


def test_memory_equals_the_size_of_the_quantized_weights(written):
    """Scales and zeros take up to 9 bytes per 32 values here; files have groups of 128."""
    case, loaded = written.case, written.loaded
    plain = {name: w for name, w in written.exact.items() if "_proj" not in name}
    values = sum(w.size for name, w in written.exact.items() if "_proj" in name)
    beside = loaded.model.param_bytes - 4 * sum(w.size for w in plain.values())
    assert values * case.bits / 8 < beside < values * (case.bits / 8 + 5 / 32 + 0.06)
    assert loaded.model.param_bytes == sum(leaf.nbytes for leaf in loaded.leaves)
    kinds = {
        np.dtype(leaf.dtype).itemsize
        for leaf in loaded.leaves
        if leaf.ndim == 2 and leaf.size > 64 * 64 * 2
    }
    assert 1 in kinds


@pytest.mark.quick_cases(4)
def test_row_is_independent_of_its_neighbors(written):
    scores = [PagedRun(written.loaded, 2).step([IDS, OTHER])[0]]
    scores.append(PagedRun(written.loaded, 2).step([IDS, [96 - 1 - token for token in OTHER]])[0])
    np.testing.assert_array_equal(*scores)


PACKED = {
    "int8_rows": {"int8"},
    "gptq": {"int4"},
    "gptq_ordered_symmetric": {"int4"},
    "w4a16": {"int4"},
    "w4a16_rows": {"int4"},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.quick_cases(12)
def test_bfloat16_products_match_the_definition(name, kernels, tmp_path):
    """The kernels get the matrices that they represent exactly; int4 also rounds x."""
    if kernels and not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    case = CASES[name]
    exact = write(case, tmp_path, torch_dtype="bfloat16")
    form = "bf16" if kernels else None
    loaded = load(tmp_path, formats=WeightFormats(layers=form, head=form))
    model = loaded.model
    quantized = model.in_format(QuantizedFormat)
    assert len(quantized) == 4
    packed = {model.packings[leaf].format for leaf in quantized if leaf in model.packings}
    assert packed == (PACKED.get(name, set()) if kernels else set())
    if kernels and not packed:
        return  # the same as without kernels

    def rounded(x):
        x = np.asarray(x, np.float64)
        if case.round_rows is not None:
            return case.round_rows(x)
        return writer.round_int8(x) if packed == {"int4"} else x

    def definition(x, *modules):
        names = (f"model.layers.0.{module}_proj.weight" for module in modules)
        return rounded(x) @ np.concatenate([exact[name] for name in names]).T

    x, wide = rows_without_ties(64), rows_without_ties(192)
    qkv, inner, down = jitted_products(model)(loaded.leaves, x, wide)
    gate, up = definition(x, "mlp.gate"), definition(x, "mlp.up")
    # For groups with their own scales, plain XLA rounds value times scale to bfloat16.
    groups = {
        leaf.shape[1]
        for name, leaf in zip(model.names, loaded.leaves, strict=True)
        if name.endswith(".scale") and leaf.ndim == 2
    }
    tolerance = 1e-6 if packed or groups == {1} else 3e-3
    assert error(qkv, definition(x, *(f"self_attn.{part}" for part in "qkv"))) < tolerance
    assert error(inner, gate / (1 + np.exp(-gate)) * up) < 2 * tolerance
    assert error(down, definition(wide, "mlp.down")) < tolerance


@cache
def jitted_products(model):
    def products(leaves, x, wide):
        layer = model.decoder(leaves).layers[0]
        return (
            layer.attention.qkv(x, out_dtype=jnp.float32),
            layer.mlp.gate_up(x, swiglu=True, out_dtype=jnp.float32),
            layer.mlp.down(wide, out_dtype=jnp.float32),
        )

    return jax.jit(products)


def rows_without_ties(width: int) -> jax.Array:
    """Return bfloat16 rows whose quotients by their steps, or by STEP, are never ties."""
    rows = RNG(3).standard_normal((7, width))
    rows[:, ::64] = MOST
    return jnp.asarray(rows, jnp.bfloat16)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", {"qzeros": lambda z: z + 1}, "qzeros: all zeros must be 8"),
        ("gptq", {"g_idx": lambda g: g[::-1].copy()}, "g_idx: columns must be in the order"),
        ("gptq_zeros", {"qzeros": lambda z: z | 15}, "qzeros: a stored zero of 15 is ambiguous"),
        ("gptq_ordered", {"g_idx": lambda g: g * 0}, "g_idx: each group must have 32 columns"),
        ("gptq_ordered", {"g_idx": lambda g: g + 1}, "g_idx: each group must be from 0 to 1"),
        ("gptq_ordered", {"g_idx": lambda g: g[::-1].copy()}, "the groups .g_idx. of .*k_proj"),
        ("gptq", {"scales": lambda s: s[:1]}, r"scales has shape \(1, 64\), not \(2, 64\)"),
        ("gptq", {"qweight": None}, "q_proj.qweight is missing"),
        ("w4a16", {"weight_shape": lambda s: s + 1}, "weight_shape: it is .65, 65., not .64, 64."),
        ("fp8_matrix_static", {"input_scale": lambda s: s * np.nan}, "input_scale: must be a pos"),
        ("fp8_matrix_static", {"input_scale": None}, "input_scale is missing"),
        ("int8_rows", {"weight": lambda w: w.astype(np.int32)}, "q_proj.weight is int32, not int8"),
        ("int8_rows", {"weight_scale": lambda s: s[:3]}, "weight_scale has shape"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_the_config_are_named_in_the_error(name, change, message, tmp_path):
    case, own = CASES[name], quantizer(CASES[name])

    def quantize(module, w):
        parts, exact = own(module, w)
        if module == "model.layers.0.self_attn.q_proj":
            for part, edit in change.items():
                parts[part] = parts.pop(part) if edit is None else edit(parts[part])
                if edit is None:
                    del parts[part]
        return parts, exact

    writer.write_model(tmp_path, writer.plain_weights(), quantize, case.config)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_zero_points_of_symmetric_values_must_be_zero(tmp_path):
    for value, good in ((0, True), (3, False)):

        def quantize(_, w, value=value):
            parts, exact = writer.int8(w)
            return parts | {"weight_zero_point": np.full((len(w), 1), value, np.int8)}, exact

        writer.write_model(tmp_path, writer.plain_weights(), quantize, CASES["int8_rows"].config)
        if good:
            load(tmp_path)
            continue
        with pytest.raises(CheckpointError, match="weight_zero_point: must be 0"):
            load(tmp_path)


def test_unexpected_bias_must_be_zero(tmp_path):
    """Old GPTQ files give every matrix one."""
    for value, good in ((0, True), (1, False)):

        def quantize(module, w, value=value):
            parts, exact = writer.gptq(w, group=32, rng=RNG(0))
            bias = np.full(len(w), value if module.endswith("v_proj") else 0, np.float16)
            return parts | {"bias": bias}, exact

        writer.write_model(tmp_path, writer.plain_weights(), quantize, GPTQ)
        if good:
            load(tmp_path)
            continue
        with pytest.raises(CheckpointError, match=r"v_proj.bias must be 0"):
            load(tmp_path)


def change_config(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_quantized_tensors_without_a_config_are_named_in_the_error(tmp_path):
    write(CASES["gptq"], tmp_path)
    change_config(tmp_path, lambda config: config.pop("quantization_config"))
    with pytest.raises(
        CheckpointError,
        match=r"q_proj is quantized \(it has the tensor .*q_proj.qweight\), but quantization_c",
    ):
        load(tmp_path)


def write_with_head(folder, scheme, tie: bool):
    """Write GPTQ with a quantized head; a tied one is invalid."""
    weights, rng = writer.plain_weights(), RNG(0)
    head, exact = writer.gptq(weights["lm_head.weight"], group=32, rng=rng)
    written = writer.write_model(
        folder,
        {name: w for name, w in weights.items() if name != "lm_head.weight"},
        lambda _, w: writer.gptq(w, group=32, rng=rng),
        GPTQ | scheme,
        tie_word_embeddings=tie,
        more={f"lm_head.{name}": array for name, array in head.items()},
    )
    return written | {"lm_head.weight": exact}


def test_quantized_head_is_used(tmp_path):
    exact = write_with_head(tmp_path, {"lm_head": True}, tie=False)
    loaded = load(tmp_path)
    assert "head.weight" in loaded.model.in_format(QuantizedFormat)
    assert error(logits(loaded), writer.llama_logits(exact, IDS)) < 2e-6


@pytest.mark.parametrize("scheme", [{}, {"lm_head": True}])
def test_quantized_head_of_tied_embeddings_is_rejected(scheme, tmp_path):
    write_with_head(tmp_path, scheme, tie=True)
    with pytest.raises(CheckpointError, match="lm_head is quantized"):
        load(tmp_path)


ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "num_blocks": 32}


@pytest.mark.full_compile
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int8_rows", "bfloat16"), ("gptq_ordered_symmetric", "bfloat16"), ("fp8_blocks", "float32")],
)
@pytest.mark.quick_cases(1)
def test_greedy_continuations_are_batch_invariant(name, dtype, tmp_path):
    """The CPU kernels compute the first two; numpy also gives the tokens of the last."""
    exact = write(CASES[name], tmp_path, torch_dtype=dtype)
    llm = LLM(str(tmp_path), deterministic=True, **ENGINE)
    prompts = [IDS[:9], OTHER[:17], IDS[20:23], OTHER[5:6]]
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def tokens(prompts):
        outputs = llm.generate(prompts, greedy, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    together = tokens(prompts)
    assert together == [tokens([prompt])[0] for prompt in prompts]
    if dtype == "float32":
        ids = list(prompts[0])
        for _ in range(greedy.max_tokens):
            scores = writer.llama_logits(exact, ids, CASES[name].round_rows)
            ids.append(int(scores[-1].argmax()))
        assert together[0] == ids[len(prompts[0]) :]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_flag_does_not_quantize_again(quantization, tmp_path):
    write(CASES["gptq"], tmp_path, torch_dtype="bfloat16")
    with pytest.raises(
        ConfigError,
        match=rf'quantization="{quantization}": .* already quantized \(gptq, by .*json: quant',
    ):
        LLM(str(tmp_path), quantization=quantization, **ENGINE)


def test_matrices_of_one_leaf_must_share_a_quantization(tmp_path):
    case = CASES["int8_rows"]
    write(case, tmp_path)
    more = ["model.layers.0.self_attn.k_proj"]
    change_config(tmp_path, lambda config: config["quantization_config"]["ignore"].extend(more))
    with pytest.raises(
        UnsupportedModelError, match=r"layers.0.self_attn.q_proj.weight and .*k_proj"
    ):
        build_model(read_spec(tmp_path))


def test_scales_that_overflow_float16_name_the_remedy(tmp_path):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")

    def quantize(_, w):
        parts, exact = writer.packed4(w, group=32, rng=RNG(0))
        return parts | {"weight_scale": parts["weight_scale"].astype(np.float32) * 1.0001}, exact

    writer.write_model(tmp_path, writer.plain_weights(), quantize, w4(), torch_dtype="bfloat16")
    with pytest.raises(
        CheckpointError,
        match=r"qkv.weight: a scale cannot be represented in float16.*--kernels xla",
    ):
        load(tmp_path, formats=WeightFormats(layers="bf16"))
    load(tmp_path)


@pytest.mark.full_compile
def test_step_converts_no_whole_matrices_to_float():
    """Compiled from shapes alone: a tile at a time takes less memory than one matrix."""
    if jax.default_backend() != "cpu":
        pytest.skip("a loop over tiles is for CPUs")
    for values, activations in (("int4", None), ("fp8", "fp8"), ("int8", None)):
        q = Quantization(
            values=values, outputs=4096, inputs=1024, group=128, activations=activations
        )
        w = QuantizedWeight(q.weight, q.scale, None, None, q)
        x = jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16)
        compiled = jax.jit(lambda x, w: linear(x, w)).lower(x, w).compile()
        temp = compiled.memory_analysis().temp_size_in_bytes
        assert temp < 4096 * 1024, (values, temp)
