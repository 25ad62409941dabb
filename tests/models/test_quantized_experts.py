"""Experts of quantized checkpoints: values by definition, small, and with independent rows.

The cases are those of `test_quantized.py`, written as Mixtrals; `quant_writer` computes them.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import quant_writer as writer
from paged import rows_alone
from test_quantized import (
    CASES,
    ENGINE,
    GPTQ,
    IDS,
    OTHER,
    PACKED,
    RNG,
    TOKEN,
    Case,
    error,
    load,
    logits,
    quantizer,
)
from test_quantized_config import args, compressed

from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.load import load_weights
from forge_jax.checkpoint.model_spec import read_spec
from forge_jax.checkpoint.safetensors import read_header
from forge_jax.config.hf_config import HFConfig
from forge_jax.errors import CheckpointError, UnsupportedModelError
from forge_jax.models import build_model
from forge_jax.research import LoadedModel
from forge_jax.weights.formats import WeightFormats
from forge_jax.weights.methods import read_quantization
from forge_jax.weights.quantized import QuantizedFormat
from forge_jax.weights.stored import FLOAT8_E4M3
from forge_kernels import cpu
from forge_kernels.experts import mix_experts
from forge_kernels.experts.xla import (
    CHUNK_BYTES,
    FUSED_BYTES,
    chunk_of,
    experts_by_chunks,
    experts_by_pair,
    in_fusions,
)
from forge_kernels.linear import OrderedWeight, Quantization, QuantizedWeight

MOE = "model.layers.0.block_sparse_moe"
ROUTER = f"{MOE}.gate.weight"


def config_of(case: Case) -> dict[str, Any]:
    """Return the config with the router ignored, as tools that do not support it write it."""
    config = case.config
    if config["quant_method"] == "compressed-tensors":
        return config | {"ignore": ["lm_head", "re:.*block_sparse_moe.gate$"]}
    return config


def write_experts(case: Case, folder, **config) -> dict[str, np.ndarray]:
    weights = writer.plain_weights(experts=True)
    # Far from ties, so that rounding changes no choice, and of equal size, so that both count.
    weights[ROUTER] = weights[ROUTER] * 2
    config = writer.MIXTRAL | config
    return writer.write_model(folder, weights, quantizer(case), config_of(case), **config)


class Written(NamedTuple):
    name: str
    case: Case
    folder: Any
    exact: dict[str, np.ndarray]
    loaded: LoadedModel


@pytest.fixture(scope="module", params=CASES)
def written(request, tmp_path_factory):
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    exact = write_experts(case, folder)
    return Written(request.param, case, folder, exact, load(folder))


def rows(count: int, seed: int = 0) -> np.ndarray:
    return RNG(seed).standard_normal((count, 64)).astype(np.float32)


@cache
def jitted_block(model):
    def block(leaves, x):
        return model.decoder(leaves).layers[0].mlp(x, rows_alone(jnp.int32(len(x))))

    return jax.jit(block)


def block(loaded: LoadedModel, x) -> np.ndarray:
    """Return [T, d]: the layer's norm and experts, plus x."""
    return np.asarray(jitted_block(loaded.model)(loaded.leaves, x), np.float32)


def definition(case: Case, exact, x, round_rows=None) -> np.ndarray:
    x = np.asarray(x, np.float64)
    scale = np.sqrt((x * x).mean(axis=-1, keepdims=True) + writer.CONFIG["rms_norm_eps"])
    y = x / scale * exact["model.layers.0.post_attention_layernorm.weight"]
    return x + writer.mixture(exact, y, MOE, round_rows or case.round_rows)


@pytest.mark.quick_cases(5)
def test_experts_match_the_definition(written, figure):
    case, x = written.case, rows(40)
    want, ours = definition(case, written.exact, x) - x, block(written.loaded, x) - x
    by_row = np.linalg.norm(ours - want, axis=1) / np.linalg.norm(want, axis=1)
    figure("forms", written.name, "experts", np.median(by_row))
    assert np.median(by_row) < 2e-6
    assert by_row.max() < (5e-6 if case.round_rows is None else 0.03)
    if case.round_rows is not None:
        exact = definition(case, written.exact, x, lambda x: x) - x
        assert error(ours, exact) > 0.005


def test_experts_stay_as_small_as_their_values(written):
    model, case = written.loaded.model, written.case
    experts = {n: w for n, w in written.exact.items() if ".experts." in n}
    beside = sum(
        leaf.nbytes
        for name, leaf in zip(model.names, written.loaded.leaves, strict=True)
        if name.startswith(("layers.0.mlp.gate_up", "layers.0.mlp.down"))
    )
    values = sum(w.size for w in experts.values())
    # Scales, zeros and orders take up to 9 bytes per 32 values here; files have groups of 128.
    assert values * case.bits / 8 < beside < values * (case.bits / 8 + 5 / 32 + 0.06)
    router = model.leaves[model.names.index("layers.0.mlp.router.weight")]
    assert (router.shape, router.dtype) == ((writer.EXPERTS, 64), np.float32)


@pytest.mark.quick_cases(5)
def test_row_is_independent_of_its_neighbors(written):
    x = rows(40)
    whole = block(written.loaded, x)
    order = RNG(1).permutation(40)
    np.testing.assert_array_equal(block(written.loaded, x[order]), whole[order])
    for row in (0, 17):
        copies = np.repeat(x[row : row + 1], 40, axis=0)
        np.testing.assert_array_equal(block(written.loaded, copies), whole[[row] * 40])


@pytest.mark.parametrize("name", ["fp8_blocks", "int8_matrix_static", "gptq_ordered"])
@pytest.mark.quick_cases(1)
def test_chunked_computation_gives_the_same_result(name, tmp_path, monkeypatch):
    """Other devices than CPUs convert two experts at a time to float."""
    write_experts(CASES[name], tmp_path)
    loaded = load(tmp_path)
    monkeypatch.setattr("forge_kernels.experts.xla.CHUNK_BYTES", 2 * 4 * 2 * 192 * 64)
    assert chunk_of(writer.EXPERTS, 4 * 2 * 192 * 64) == 2
    x, choice = jnp.asarray(rows(9)), choose(9)
    chunks, tiles = (mixed(loaded, x, *choice, by=by) for by in (experts_by_chunks, None))
    by_row = np.linalg.norm(chunks - tiles, axis=1) / np.linalg.norm(tiles, axis=1)
    assert np.median(by_row) < 2e-6 and by_row.max() < 0.03


@pytest.mark.parametrize("name", ["fp8_blocks", "int8_matrix_static", "gptq_ordered", "int8_rows"])
@pytest.mark.quick_cases(2)
def test_computation_by_pair_gives_the_same_result(name, tmp_path):
    """GPUs read the matrices of each token's experts if there are few tokens."""
    write_experts(CASES[name], tmp_path)
    loaded, x, choice = load(tmp_path), jnp.asarray(rows(9)), choose(9)
    pairs = mixed(loaded, x, *choice, by=lambda *a: experts_by_pair(*a[:5], jnp.int32(9), *a[6:]))
    tiles = mixed(loaded, x, *choice)
    by_row = np.linalg.norm(pairs - tiles, axis=1) / np.linalg.norm(tiles, axis=1)
    assert np.median(by_row) < 2e-6 and by_row.max() < 0.03


@pytest.mark.parametrize("name", CASES)
@pytest.mark.quick_cases(4)
def test_products_of_all_experts_in_fusions_give_the_same_result(name, tmp_path):
    """GPUs convert values inside the products of all experts."""
    write_experts(CASES[name], tmp_path)
    plain = load(tmp_path)
    fused = load(tmp_path, formats=WeightFormats(fused=frozenset(("int8", "int4", "fp8"))))
    x, choice = jnp.asarray(rows(9), jnp.bfloat16), choose(9)
    assert error(mixed(fused, x, *choice, by=experts_by_chunks), mixed(plain, x, *choice)) < 6e-3
    pairs = mixed(fused, x, *choice, by=lambda *a: experts_by_pair(*a[:5], jnp.int32(9), *a[6:]))
    assert error(pairs, mixed(plain, x, *choice)) < 6e-3


def test_fused_products_of_all_experts_have_a_memory_limit(tmp_path):
    write_experts(CASES["int8_rows"], tmp_path)
    of = {}
    for fused in (frozenset[str](), frozenset(("int8",))):
        model = load(tmp_path, formats=WeightFormats(fused=fused)).model
        matrices = [
            model.weight(model.leaves, f"layers.0.mlp.{p}.weight") for p in ("gate_up", "down")
        ]
        most = FUSED_BYTES // (4 * writer.EXPERTS * 2 * 192)
        of[bool(fused)] = [in_fusions(rows, *matrices) for rows in (1, most, most + 1)]
    assert of == {False: [False] * 3, True: [True, True, False]}


def choose(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two of four experts for each row, unevenly."""
    liking = RNG(1).standard_normal((count, 4)) + np.array([1, 0, 0, -1])
    weights = RNG(2).uniform(0.1, 0.9, (count, 2)).astype(np.float32)
    return np.argsort(-liking, axis=1)[:, :2].astype(np.int32), weights


def mixed(loaded: LoadedModel, x, experts, weights, by=None) -> np.ndarray:
    """Return f32[T, d]: the output of these experts of the layer."""
    gate_up, down = (
        loaded.model.weight(loaded.leaves, f"layers.0.mlp.{part}.weight")
        for part in ("gate_up", "down")
    )
    rest = jnp.asarray(experts), jnp.asarray(weights)
    if by is None:
        y = jax.jit(mix_experts)(x, gate_up, down, *rest)
    elif isinstance(gate_up, OrderedWeight):
        y = jax.jit(by)(x, gate_up.matrix, down, *rest, None, gate_up.order)
    else:
        y = jax.jit(by)(x, gate_up, down, *rest, None)
    return np.asarray(y, np.float32)


@pytest.mark.parametrize("name", ["fp8_blocks", "gptq_ordered", "int8_rows"])
@pytest.mark.quick_cases(1)
def test_logits_match_the_definition(name, tmp_path):
    case = CASES[name]
    exact = write_experts(case, tmp_path)
    ours, want = logits(load(tmp_path)), writer.llama_logits(exact, IDS, case.round_rows)
    by_row = np.linalg.norm(ours - want, axis=1) / np.linalg.norm(want, axis=1)
    assert np.median(by_row) < 4e-6


# ---- the C++ kernels ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.quick_cases(2)
def test_experts_that_the_kernels_support_are_packed(name, tmp_path):
    if not cpu.available():
        pytest.skip("no CPU kernels on this machine")
    case = CASES[name]
    exact = write_experts(case, tmp_path, torch_dtype="bfloat16")
    loaded = load(tmp_path, formats=WeightFormats(layers="bf16", head="bf16"))
    packings = loaded.model.packings
    both = {packings[f"layers.0.mlp.{part}.weight"].format for part in ("gate_up", "down")}
    assert both == PACKED[name]
    assert "layers.0.mlp.router.weight" not in packings
    plain = load(tmp_path, formats=WeightFormats())
    x, choice = jnp.asarray(rows(40), jnp.bfloat16), choose(40)

    def definition(round_rows):
        def rounded(x):  # includes the values between the two products
            x = x.astype(ml_dtypes.bfloat16).astype(np.float64)
            return x if round_rows is None else round_rows(x)

        return writer.mixture(exact, np.asarray(x, np.float64), MOE, rounded, choice)

    # For 4 bits the kernel rounds rows to int8.
    ours = mixed(loaded, x, *choice)
    assert error(ours, definition(writer.round_int8)) < 3e-3
    assert error(mixed(plain, x, *choice), definition(case.round_rows)) < 5e-3
    again = RNG(1).permutation(40)
    others = mixed(loaded, x[again], *(each[again] for each in choice))
    np.testing.assert_array_equal(others, ours[again])


@pytest.mark.full_compile
@pytest.mark.parametrize(
    ("name", "dtype"), [("int8_rows", "bfloat16"), ("w4a16", "bfloat16"), ("fp8_blocks", "float32")]
)
@pytest.mark.slow
def test_greedy_continuations_are_batch_invariant(name, dtype, tmp_path):
    write_experts(CASES[name], tmp_path, torch_dtype=dtype)
    llm = LLM(str(tmp_path), deterministic=True, **ENGINE)
    prompts = [IDS[:9], OTHER[:17], IDS[20:23]]
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)

    def tokens(prompts):
        outputs = llm.generate(prompts, greedy, progress=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert tokens(prompts) == [tokens([prompt])[0] for prompt in prompts]


# ---- other names, routers, mixed formats -------------------------------------------------------


def tensors_of(folder) -> dict[str, np.ndarray]:
    """Return the tensors in the form that `writer.save` takes."""
    header = read_header(folder / "model.safetensors")
    arrays = {name: np.array(tensor.read()) for name, tensor in header.items()}
    is_fp8 = {name: header[name].dtype == FLOAT8_E4M3 for name in arrays}
    return {n: a.view(np.uint8).view(writer.Fp8) if is_fp8[n] else a for n, a in arrays.items()}


def as_qwen(folder, target, quantization) -> None:
    """Write the same model under Qwen's names, with neutral norms of queries and keys."""
    tensors = {}
    for name, array in tensors_of(folder).items():
        for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            name = name.replace(f".{old}.", f".{new}.")
        tensors[name.replace("block_sparse_moe", "mlp")] = array
    writer.save(tensors, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "num_experts": writer.EXPERTS,
        "moe_intermediate_size": 192,
        "norm_topk_prob": True,
        "quantization_config": quantization,
    }
    (target / "config.json").write_text(json.dumps(config))


def test_qwen_names_give_the_same_experts(tmp_path):
    theirs, ours = tmp_path / "mixtral", tmp_path / "qwen"
    theirs.mkdir(), ours.mkdir()
    case = CASES["fp8_blocks"]
    write_experts(case, theirs)
    listed = case.config | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
    as_qwen(theirs, ours, listed)
    header = read_header(ours / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv" in header
    spec = read_spec(ours)
    model = build_model(dataclasses.replace(spec, qk_norm=None))
    loaded = LoadedModel(model, load_weights(model, ours, progress=False), ours)
    x = rows(9)
    np.testing.assert_array_equal(block(loaded, x), block(load(theirs), x))


def test_quantized_router_is_used(tmp_path):
    weights, case = writer.plain_weights(experts=True), CASES["int8_weights_only"]
    weights[ROUTER] = weights[ROUTER] * 2
    tensors, router = writer.int8(weights.pop(ROUTER))
    more = {f"{MOE}.gate.{name}": array for name, array in tensors.items()}
    exact = writer.write_model(
        tmp_path, weights, quantizer(case), case.config, more, **writer.MIXTRAL
    )
    loaded = load(tmp_path)
    assert "layers.0.mlp.router.weight" in loaded.model.in_format(QuantizedFormat)
    x = rows(40)
    want = definition(case, exact | {ROUTER: router}, x) - x
    assert error(block(loaded, x) - x, want) < 2e-6


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8_blocks"])
def test_router_quantized_only_by_its_tensors_is_named_in_the_error(method, tmp_path):
    weights, case = writer.plain_weights(experts=True), CASES[method]
    router = np.concatenate([weights.pop(ROUTER)] * 2)  # 4-bit values come in words of 8 rows
    tensors, _ = case.quantize(router, RNG(0))
    more = {f"{MOE}.gate.{name}": array for name, array in tensors.items()}
    writer.write_model(tmp_path, weights, quantizer(case), case.config, more, **writer.MIXTRAL)
    with pytest.raises(
        CheckpointError, match=r"block_sparse_moe.gate is quantized .*does not describe it"
    ):
        load(tmp_path)


@pytest.mark.parametrize("part", ["w2", "w1"])
def test_experts_may_be_partly_quantized(part, tmp_path):
    """Either down, or gates and ups; the rest stays in floats, with kernels too."""
    names = ["w2"] if part == "w2" else ["w1", "w3"]
    case, own = CASES["int8_rows"], quantizer(CASES["int8_rows"])
    targets = [f"re:.*{name}$" for name in names]
    group = case.config["config_groups"]["group_0"] | {"targets": targets}
    weights = writer.plain_weights(experts=True)
    weights[ROUTER] = weights[ROUTER] * 2

    def quantize(module, w):
        if module.endswith(tuple(names)):
            return own(module, w)
        return {"weight": w.astype(np.float32)}, w

    config = case.config | {"config_groups": {"group_0": group}}
    exact = writer.write_model(tmp_path, weights, quantize, config, **writer.MIXTRAL)
    formats = WeightFormats(layers="bf16") if cpu.available() else None
    for loaded in (load(tmp_path), load(tmp_path, "bfloat16", formats)):
        assert set(loaded.model.in_format(QuantizedFormat)) == {
            f"layers.0.mlp.{'down' if part == 'w2' else 'gate_up'}.weight"
        }
        x, choice = jnp.asarray(rows(40), loaded.model.dtype), choose(40)
        want = writer.mixture(exact, np.asarray(x, np.float64), MOE, None, choice)
        assert 0.003 < error(mixed(loaded, x, *choice), want) < 0.02  # rows are rounded to int8


# ---- rejections ---------------------------------------------------------------------------------


LAST = f"{MOE}.experts.3.w1"


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("gptq", lambda t: t.pop(f"{LAST}.qzeros"), "experts.3.w1.qzeros is missing"),
        (
            "int8_rows",
            lambda t: t.update({f"{LAST}.weight_scale": np.ones((3, 1), np.float32)}),
            r"experts.3.w1.weight_scale has shape \(3, 1\), not \(192, 1\)",
        ),
        (
            "w4a16",
            lambda t: t.update({f"{LAST}.weight_shape": np.array([9, 9])}),
            r"experts.3.w1.weight_shape: it is \[9, 9\], not \(192, 64\)",
        ),
        (
            "gptq_ordered",
            lambda t: t.update({f"{LAST}.g_idx": t[f"{LAST}.g_idx"][::-1].copy()}),
            r"groups \(g_idx\) of .*experts.3.w3 differ from those of .*experts.3.w1",
        ),
        (
            "gptq_ordered",
            lambda t: t.update({f"{MOE}.experts.2.w2.g_idx": np.zeros(192, np.int32)}),
            "experts.2.w2.g_idx: each group must have 32 columns",
        ),
    ],
)
def test_expert_tensors_that_contradict_the_config_are_named_in_the_error(
    name, edit, message, tmp_path
):
    write_experts(CASES[name], tmp_path)
    tensors = tensors_of(tmp_path)
    edit(tensors)
    writer.save(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_schemes_that_differ_between_experts_are_named_in_the_error(goldens):
    spec = read_spec(goldens / "mixtral")

    def build(quantization):
        quantized = read_quantization(HFConfig({"quantization_config": quantization}))
        return build_model(dataclasses.replace(spec, quantization=quantized))

    ignore = ["re:.*gate$", "re:.*experts.2.w3$"]
    with pytest.raises(
        UnsupportedModelError, match=r"experts.0.w1.weight and .*experts.2.w3.weight are computed"
    ):
        build(compressed("int-quantized", args(), TOKEN, ignore=ignore))
    weights = args(num_bits=4, strategy="group", group_size=16, actorder="group")
    only_down = compressed("pack-quantized", weights)
    only_down["config_groups"]["group_0"]["targets"] = ["re:.*w2$"]
    with pytest.raises(UnsupportedModelError, match=r"experts.0.w2.weight are reordered"):
        build(only_down)
    model = build(
        compressed("int-quantized", args(), TOKEN, ignore=["lm_head", "re:.*block_sparse_moe.*"])
    )
    assert {leaf.split(".")[2] for leaf in model.in_format(QuantizedFormat)} == {"attention"}
    model = build(GPTQ | {"group_size": 16})
    assert "layers.0.mlp.router.weight" not in model.in_format(QuantizedFormat)


def test_quantized_experts_in_one_tensor_are_rejected(tmp_path):
    write_experts(CASES["fp8_matrix_dynamic"], tmp_path)
    tensors = {n: array for n, array in tensors_of(tmp_path).items() if ".experts." not in n}
    fused = {"gate_up_proj": (4, 384, 64), "down_proj": (4, 64, 192)}
    for name, shape in fused.items():
        tensors[f"model.layers.0.mlp.experts.{name}"] = np.zeros(shape, np.uint8).view(writer.Fp8)
    tensors["model.layers.0.mlp.gate.weight"] = tensors.pop(ROUTER)
    writer.save(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mlp.experts.gate_up_proj has the quantized matric"):
        load(tmp_path)


# ---- memory of a step --------------------------------------------------------------------------


@pytest.mark.full_compile
def test_step_converts_only_one_expert_tile_to_float():
    if jax.default_backend() != "cpu":
        pytest.skip("a loop over tiles is for CPUs")
    E, d, inner, T = 16, 512, 1024, 8
    for values, activations in (("int4", None), ("fp8", "fp8"), ("int8", None)):

        def matrices(outputs, inputs, values=values, activations=activations):
            q = Quantization(
                values=values, outputs=outputs, inputs=inputs, group=128, activations=activations,
                experts=E,
            )  # fmt: skip
            return QuantizedWeight(q.weight, q.scale, None, None, q)

        x = jax.ShapeDtypeStruct((T, d), jnp.bfloat16)
        chosen = jax.ShapeDtypeStruct((T, 2), jnp.int32), jax.ShapeDtypeStruct((T, 2), jnp.float32)
        lowered = jax.jit(mix_experts).lower(x, matrices(2 * inner, d), matrices(d, inner), *chosen)
        temp = lowered.compile().memory_analysis().temp_size_in_bytes
        assert temp < 2 * inner * d * 2, (values, temp)  # one expert as bfloat16


def test_chunk_is_the_largest_divisor_that_fits():
    mib = 2**20
    assert chunk_of(128, 6 * mib) == 32 and chunk_of(8, 300 * mib) == 1
    assert chunk_of(12, CHUNK_BYTES // 12) == 12 and chunk_of(12, CHUNK_BYTES // 5) == 4
