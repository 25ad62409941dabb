"""Quantised checkpoints: the values are those of the formats' definitions, and stay small.

Models are written and computed by `quant_writer`, which is numpy and knows nothing of the readers.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quant_writer as writer
from paged import PagedRun
from test_quantized_config import args, compressed

from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.models import build_model, read_spec
from forge_jax.models.decoder import WeightForms
from forge_jax.quant.tensors import read_matrices
from forge_jax.research import LoadedModel
from forge_kernels import cpu
from forge_kernels.linear import Quantization, QuantizedWeight, linear

RNG = np.random.default_rng
IDS, OTHER = RNG(1).integers(0, 96, (2, 40)).tolist()
STEP = 0.03  # of static activations
TOKEN = args(dynamic=True, strategy="token")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def w4(**changes):
    weights = args(num_bits=4, strategy="group", group_size=32) | changes
    return compressed("pack-quantized", weights)


def indices() -> dict[int, np.ndarray]:
    """One order of groups for each width: matrices that are fused have the same."""
    return {k: RNG(k).permutation(np.arange(k) // 32) for k in (64, 192)}


class Case(NamedTuple):
    config: dict[str, Any]
    quantise: Any  # (w, rng) -> (tensors, exact matrix)
    round_rows: Any = None
    bits: float = 8  # of a value
    exact: bool = True  # whether nothing but rounding of float32 is between us and the writer


def _in_order(quantise, **options):
    by_width = indices()
    return lambda w, rng: quantise(w, rng=rng, ordered=True, index=by_width[w.shape[1]], **options)


FP8, INT8 = args(type="float"), args()
CASES = {
    "fp8_matrix_dynamic": Case(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda w, rng: writer.fp8(w, rows=999, columns=999, shape=()),
        writer.round_fp8,
        exact=False,
    ),
    "fp8_matrix_static": Case(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        lambda w, rng: writer.fp8(w, rows=999, columns=999, shape=(1,), input_scale=STEP),
        partial(writer.round_fp8, scale=np.float64(np.float32(STEP))),
        exact=False,
    ),
    "fp8_blocks": Case(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        lambda w, rng: writer.fp8(w, rows=128, columns=128, name="weight_scale_inv"),
        partial(writer.round_fp8, group=128),
        exact=False,
    ),
    "fp8_rows": Case(
        compressed("float-quantized", FP8, TOKEN | {"type": "float"}),
        lambda w, rng: writer.fp8(w, rows=1, columns=999),
        writer.round_fp8,
        exact=False,
    ),
    "fp8_rows_weights_only": Case(
        compressed("float-quantized", FP8), lambda w, rng: writer.fp8(w, rows=1, columns=999)
    ),
    "int8_rows": Case(
        compressed("int-quantized", INT8, TOKEN),
        lambda w, rng: writer.int8(w),
        writer.round_int8,
        exact=False,
    ),
    "int8_matrix_static": Case(
        compressed("int-quantized", args(strategy="tensor"), args(strategy="tensor")),
        lambda w, rng: writer.int8(w, rows=999, input_scale=STEP),
        partial(writer.round_int8, scale=np.float64(np.float32(STEP))),
        exact=False,
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
    "gptq_ordered": Case(
        GPTQ | {"desc_act": True, "sym": False},
        _in_order(writer.gptq, group=32, symmetric=False),
        bits=4,
    ),
    "gptq_ordered_symmetric": Case(
        GPTQ | {"desc_act": True}, _in_order(writer.gptq, group=32), bits=4
    ),
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
    "w4a16_ordered": Case(
        w4(actorder="group", symmetric=False),
        _in_order(writer.packed4, group=32, symmetric=False),
        bits=4,
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


def write(case: Case, folder, **config) -> dict[str, np.ndarray]:
    rng = RNG(2)
    weights = writer.plain_weights()
    return writer.write_model(
        folder, weights, lambda _, w: case.quantise(w, rng), case.config, **config
    )


def load(folder, dtype="auto", forms=None) -> LoadedModel:
    model = build_model(read_spec(folder), dtype, forms)
    return LoadedModel(model, load_weights(model, folder, progress=False), folder)


def logits(loaded) -> np.ndarray:
    """Of IDS in three steps, beside another sequence."""
    run = PagedRun(loaded, 2)
    steps = (slice(0, 33), slice(33, 34), slice(34, None))
    return np.concatenate([run.step([IDS[part], OTHER[part]])[0] for part in steps])


def error(ours: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(ours - want) / np.linalg.norm(want))


def test_fp8_of_the_writer_is_fp8():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(
        writer.from_e4m3(codes), codes.view(jnp.float8_e4m3fn).astype(np.float64)
    )
    x = RNG(0).standard_normal(10_000) * 10.0 ** RNG(1).integers(-4, 3, 10_000)
    inside = x[np.abs(x) < 448]
    np.testing.assert_array_equal(
        writer.to_e4m3(inside), inside.astype(np.float32).astype(jnp.float8_e4m3fn).view(np.uint8)
    )


def test_values_are_exactly_those_of_the_definition(written):
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


def test_logits_are_those_of_the_definition(written):
    """Where activations are rounded, too, one that lies between two steps may fall to either."""
    case = written.case
    want = writer.llama_logits(written.exact, IDS, case.round_rows)
    ours = logits(written.loaded)
    assert error(ours, want) < (2e-6 if case.exact else 0.01)
    if not case.exact:
        # The same without rounding the activations is another thing.
        assert error(ours, writer.llama_logits(written.exact, IDS)) > 0.01


def test_memory_is_that_of_the_quantised_weights(written):
    """Scales and zeros take up to 9 bytes for 32 values here; files have groups of 128."""
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


def test_a_row_does_not_depend_on_its_neighbours(written):
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
def test_cpu_kernels_hold_what_they_can_exactly(name, tmp_path):
    """Packed matrices are the same ones: their logits are the definition's, but for bfloat16."""
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    exact = write(CASES[name], tmp_path, torch_dtype="bfloat16")
    model = build_model(read_spec(tmp_path), forms=WeightForms(layers="bf16", head="bf16"))
    assert len(model.quantized) == 4
    formats = {model.packings[leaf].format for leaf in model.quantized if leaf in model.packings}
    assert formats == PACKED.get(name, set())
    if formats or name in ("fp8_blocks", "awq"):
        leaves = load_weights(model, tmp_path, progress=False)
        want = writer.llama_logits(exact, IDS, CASES[name].round_rows)
        print(name, error(logits(LoadedModel(model, leaves, tmp_path)), want))
        assert error(logits(LoadedModel(model, leaves, tmp_path)), want) < 0.03


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gptq", {"qzeros": lambda z: z + 1}, "qzeros: there are zeros other than 8"),
        ("gptq", {"g_idx": lambda g: g[::-1].copy()}, "g_idx: columns are not in the order"),
        ("gptq_ordered", {"g_idx": lambda g: g * 0}, "g_idx: a group has not 32 columns"),
        ("gptq_ordered", {"g_idx": lambda g: g + 1}, "g_idx: a group is not from 0 to 1"),
        ("gptq_ordered", {"g_idx": lambda g: g[::-1].copy()}, "the groups .g_idx. of .*k_proj"),
        ("gptq", {"scales": lambda s: s[:1]}, r"scales has shape \(1, 64\), not \(2, 64\)"),
        ("gptq", {"qweight": None}, "q_proj.qweight is missing"),
        ("w4a16", {"weight_shape": lambda s: s + 1}, "weight_shape: it is .65, 65., not .64, 64."),
        ("fp8_matrix_static", {"input_scale": lambda s: s * np.nan}, "input_scale: nan is no"),
        ("fp8_matrix_static", {"input_scale": None}, "input_scale is missing"),
        ("int8_rows", {"weight": lambda w: w.astype(np.int32)}, "q_proj.weight is int32, not int8"),
        ("int8_rows", {"weight_scale": lambda s: s[:3]}, "weight_scale has shape"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_the_config_are_named(name, change, message, tmp_path):
    case, rng = CASES[name], RNG(2)

    def quantise(module, w):
        parts, exact = case.quantise(w, rng)
        if module == "model.layers.0.self_attn.q_proj":
            for part, edit in change.items():
                parts[part] = parts.pop(part) if edit is None else edit(parts[part])
                if edit is None:
                    del parts[part]
        return parts, exact

    writer.write_model(tmp_path, writer.plain_weights(), quantise, case.config)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_zero_points_of_symmetric_values_must_be_zero(tmp_path):
    for value, good in ((0, True), (3, False)):

        def quantise(_, w, value=value):
            parts, exact = writer.int8(w)
            return parts | {"weight_zero_point": np.full((len(w), 1), value, np.int8)}, exact

        writer.write_model(tmp_path, writer.plain_weights(), quantise, CASES["int8_rows"].config)
        if good:
            load(tmp_path)
            continue
        with pytest.raises(CheckpointError, match="weight_zero_point: it is not 0"):
            load(tmp_path)


def test_matrices_of_one_leaf_must_be_quantised_alike(tmp_path):
    case = CASES["int8_rows"]
    write(case, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"] += ["model.layers.0.self_attn.k_proj"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UnsupportedModelError, match=r"layers.0.self_attn.q_proj.weight and .*k_proj"
    ):
        build_model(read_spec(tmp_path))


def test_scales_that_float16_does_not_hold_say_what_to_do(tmp_path):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")

    def quantise(_, w):
        parts, exact = writer.packed4(w, group=32, rng=RNG(0))
        return parts | {"weight_scale": parts["weight_scale"].astype(np.float32) * 1.0001}, exact

    writer.write_model(tmp_path, writer.plain_weights(), quantise, w4(), torch_dtype="bfloat16")
    with pytest.raises(
        CheckpointError, match=r"qkv.weight: a scale is not a float16.*--kernels xla"
    ):
        load(tmp_path, forms=WeightForms(layers="bf16"))
    load(tmp_path)


def test_a_step_makes_no_floats_of_whole_matrices():
    """Compiled from shapes alone: a tile at a time takes no more than some of one matrix."""
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
