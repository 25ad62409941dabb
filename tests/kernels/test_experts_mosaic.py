"""The experts' GPU kernel: its work list, and the kernel in Pallas' interpreter.

The interpreter simulates memory, barriers, copies and the `wgmma` instruction, and detects races.
The `mma` instruction is replaced by an ordinary product. `tests/aot` compiles the kernel.
"""

import dataclasses
import functools
import inspect
import io
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_experts import Arrays, make, rows_of, shares

from forge_kernels.devices import Gpu, described
from forge_kernels.experts import api, mix_experts, mosaic_gpu
from forge_kernels.experts import plan as plan_file
from forge_kernels.experts.mosaic_gpu import grouped_experts, unsupported
from forge_kernels.experts.plan import Geometry, Plan, make_plan, tiles_read
from forge_kernels.experts.reference import reference_experts
from forge_kernels.experts.xla import chunk_of, experts_by_chunks, experts_by_pair, in_fusions
from forge_kernels.linear import Quantization, QuantizedWeight

BF16 = jnp.dtype(jnp.bfloat16)
jitted_plan = jax.jit(make_plan, static_argnums=0)
AMPERE, HOPPER = (8, 0), (9, 0)

# ---- the work list ------------------------------------------------------------------------------

CHOICES = {  # tokens, of a token, experts
    "a token": (1, 8, 128),
    "few tokens": (16, 8, 128),
    "a full tile": (16, 1, 8),
    "a decode step": (64, 8, 128),
    "tiles of 32": (25, 4, 8),
    "several chunks": (300, 2, 6),
    "many rows": (900, 1, 5),
}


def choices(tokens: int, per_token: int, experts: int, *, seed: int = 0, skew: float = 0.0):
    """Return i32[T, k]; lower numbers are chosen more often the higher `skew` is."""
    liking = np.random.default_rng([seed, tokens]).standard_normal((tokens, experts))
    liking -= skew * np.arange(experts)
    return np.argsort(-liking, axis=1)[:, :per_token].astype(np.int32)


def check_plan(chosen: np.ndarray, count: int, num_rows: int, make: Callable = jitted_plan) -> None:
    g = Geometry(*chosen.shape, count)
    plan = Plan(*(np.asarray(each) for each in make(g, chosen, np.int32(num_rows))))
    loads = [int((chosen[:num_rows] == expert).sum()) for expert in range(count)]
    tiles = [-(-load // g.tile_rows) for load in loads]
    assert sum(tiles) <= g.num_tiles
    want = np.repeat(np.arange(count), tiles)
    np.testing.assert_array_equal(plan.expert[: len(want)], want)
    assert (plan.expert[len(want) :] == count).all()
    used = plan.row[:num_rows]
    assert len(set(used.ravel())) == used.size
    for (token, k), row in np.ndenumerate(used):
        assert 0 <= row < g.rows
        assert plan.expert[row // g.tile_rows] == chosen[token, k]
        assert plan.token[row] == token
    assert (plan.row[num_rows:] >= g.rows).all()
    assert (plan.token >= 0).all() and (plan.token < g.tokens).all()


@pytest.mark.parametrize("name", CHOICES)
def test_every_pair_is_in_a_tile_of_its_expert(name):
    tokens, per_token, count = CHOICES[name]
    for skew in (0.0, 1.0):
        chosen = choices(tokens, per_token, count, skew=skew)
        for num_rows in {tokens, tokens // 2, 0}:
            check_plan(chosen, count, num_rows)
    check_plan(np.broadcast_to(chosen[:1], chosen.shape), count, tokens)  # all choose the same


def test_test_choices_cover_tiles_of_all_sizes():
    assert {Geometry(*sizes).tile_rows for sizes in CHOICES.values()} == {16, 32, 64}


PLAN_FAULTS = {
    "counts pairs that do not exist": ("jnp.where(exists, experts, g.experts)", "experts"),
    "forgets earlier chunks": ("before + jnp.take_along_axis(carried, mine, axis=1)", "before"),
    "shares a tile between experts": ("-(-counts // g.tile_rows)", "counts // g.tile_rows"),
    "takes the wrong token": ("pair // g.per_token", "pair"),
    "gives two pairs one row": (
        "place[None, None] < place[None, :, None]",
        "place[None, None] + 1 < place[None, :, None]",
    ),
}


@pytest.mark.parametrize("fault", PLAN_FAULTS)
def test_plan_check_detects_a_planted_fault(fault):
    make = planted(plan_file, *PLAN_FAULTS[fault]).make_plan
    with pytest.raises(AssertionError):
        check_plan(choices(300, 2, 6), 6, 290, make)


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_decode_reads_the_matrices_of_chosen_experts_once(tokens, figure):
    """Qwen3 30B-A3B: a layer has 128 experts of 9.4 MB in bfloat16, and a token chooses 8."""
    g = Geometry(tokens, 8, 128)
    for seed in range(5):
        chosen = choices(tokens, 8, 128, seed=seed)
        read = int(tiles_read(g, chosen, np.int32(tokens)))
        needed = len(set(chosen.ravel()))
        by_tile = np.ceil(np.bincount(chosen.ravel(), minlength=128) / g.tile_rows)
        assert read == by_tile.sum()
        assert needed <= read <= 1.2 * needed
    assert tokens == 64 or needed < 0.7 * 128
    figure("forms", f"{tokens} tokens", "matrices read per matrix needed", read / needed)


# ---- the kernel ---------------------------------------------------------------------------------

SHAPES = {  # rows, experts, of a token, d, inner
    "a row": (1, 6, 2, 128, 64),
    "few rows of many experts": (5, 12, 3, 64, 128),
    "one expert": (9, 1, 1, 64, 64),
    "more copies than fit at once": (7, 3, 2, 384, 128),
    "tiles of 32": (40, 5, 2, 128, 64),
    "several tiles of 64": (150, 3, 2, 128, 64),
}


@cache
def compiled(capability, kernel=grouped_experts, total=None):
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    return jax.jit(partial(kernel, capability=capability, total=total, interpret=interpret))


def run(
    a: Arrays, capability=HOPPER, num_rows: int | None = None, kernel=grouped_experts, total=None
):
    num_rows = len(a.x) if num_rows is None else num_rows
    arrays = jax.tree.map(jnp.asarray, (a.x, a.gate_up, a.down, a.experts, a.weights))
    printed = io.StringIO()  # the race detector prints
    with redirect_stdout(printed):
        y = compiled(capability, kernel, total)(*arrays, jnp.int32(num_rows))
        y = np.asarray(y)[:num_rows]
    assert "RACE" not in printed.getvalue(), printed.getvalue()
    assert y.dtype == a.x.dtype
    return y.astype(np.float32)


def check(a: Arrays, capability, num_rows: int | None = None, kernel=grouped_experts) -> None:
    out = run(a, capability, num_rows, kernel)
    exact = (jnp.asarray(each, jnp.float32) for each in (a.x, a.gate_up, a.down))
    want = np.asarray(reference_experts(*exact, jnp.asarray(a.experts), jnp.asarray(a.weights)))
    want = want[: len(out)]
    # The inner values and the result are rounded to bfloat16.
    error = np.linalg.norm(out - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max(initial=0.0) < 0.01, error.max()


@pytest.mark.parametrize("capability", [AMPERE, HOPPER], ids=["mma", "wgmma"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.quick_cases(3)
def test_kernel_matches_the_reference(name, capability):
    check(make(*SHAPES[name], ml_dtypes.bfloat16), capability)


def quantized_experts(quantization: Quantization, seed: int) -> QuantizedWeight:
    """Return experts with random values of about 1."""
    rng, w = np.random.default_rng(seed), QuantizedWeight.abstract(quantization)
    if quantization.values == "fp8":
        values = jnp.asarray(rng.standard_normal(w.weight.shape), jnp.float8_e4m3fn)
        values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    else:
        values = jnp.asarray(rng.integers(-8, 8, w.weight.shape), w.weight.dtype)
    scale = jnp.asarray(rng.uniform(0.1, 0.3, w.scale.shape), w.scale.dtype)
    zero = None if w.zero is None else jnp.asarray(rng.integers(0, 16, w.zero.shape), jnp.uint8)
    return dataclasses.replace(w, weight=values, scale=scale, zero=zero)


QUANTIZED: dict[str, dict[str, Any]] = {
    "int4 with zeros": {"values": "int4", "group": 32, "zeros": True},
    "int8": {"values": "int8", "group": 64},
    "fp8 in blocks, with activations": {"values": "fp8", "group": 32, "activations": "fp8"},
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.quick_cases(1)
def test_kernel_multiplies_quantized_experts_in_chunks(name, monkeypatch):
    monkeypatch.setattr("forge_kernels.experts.xla.CHUNK_BYTES", 2 * 2 * 128 * 64)
    a = make(20, 6, 2, 64, 64, ml_dtypes.bfloat16)
    gate_up, down = (
        quantized_experts(
            Quantization(outputs=outputs, inputs=64, experts=6, fused=True, **QUANTIZED[name]), seed
        )
        for seed, outputs in enumerate((128, 64))
    )
    assert chunk_of(6, 2 * 128 * 64) == 2  # gates and ups; 3 for down
    monkeypatch.setattr("forge_kernels.experts.xla.FUSED_BYTES", 0)
    want = np.asarray(
        jax.jit(experts_by_chunks)(a.x, gate_up, down, a.experts, a.weights, None), np.float32
    )
    out = run(dataclasses.replace(a, gate_up=gate_up, down=down))
    error = np.linalg.norm(out - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() < 0.01


def test_test_shapes_cover_kernels_of_all_tile_sizes():
    sizes = {Geometry(rows, k, count).tile_rows for rows, count, k, *_ in SHAPES.values()}
    assert sizes == {16, 32, 64}


@pytest.mark.parametrize("rows", [5, 40])
def test_kernel_outputs_of_devices_add_up_to_those_of_all_experts(rows):
    a = make(rows, 6, 2, 128, 64, ml_dtypes.bfloat16)
    whole, parts = run(a), [run(each, total=6) for each in shares(a, 3)]
    assert np.linalg.norm(sum(parts) - whole) < 0.01 * np.linalg.norm(whole)
    first = shares(Arrays(a.x, a.gate_up, a.down, a.experts % 2, a.weights), 3)[2]
    assert (run(first, total=6) == 0).all()  # tiles that no row uses are undefined


@pytest.mark.parametrize("capability", [AMPERE, HOPPER], ids=["mma", "wgmma"])
@pytest.mark.slow
def test_kernel_computes_the_existing_rows_with_uneven_loads(capability):
    a = make(150, 3, 1, 64, 64, ml_dtypes.bfloat16)
    same = Arrays(a.x, a.gate_up, a.down, np.full_like(a.experts, 2), a.weights)
    check(same, capability)
    for num_rows in (0, 77):
        check(a, capability, num_rows)


@pytest.mark.parametrize("shape", [(7, 6, 2, 128, 64), (130, 4, 2, 128, 64)])
@pytest.mark.parametrize("capability", [AMPERE, HOPPER], ids=["mma", "wgmma"])
@pytest.mark.slow
def test_kernel_row_bits_are_independent_of_the_batch(shape, capability):
    a = make(*shape, ml_dtypes.bfloat16)
    whole, count = run(a, capability), len(a.x)
    order = np.random.default_rng(1).permutation(count)
    np.testing.assert_array_equal(run(rows_of(a, order), capability), whole[order])
    row = count // 2
    again = rows_of(a, np.full(count, row))  # one expert has every row
    np.testing.assert_array_equal(run(again, capability), whole[[row] * count])
    np.testing.assert_array_equal(run(a, capability, row), whole[:row])


def test_kernel_keeps_non_finite_values_in_their_row_or_expert():
    a = make(20, 6, 2, 64, 64, ml_dtypes.bfloat16)
    clean, others = run(a), np.arange(20) != 3
    x = a.x.copy()
    x[3, 5] = np.nan
    out = run(Arrays(x, a.gate_up, a.down, a.experts, a.weights))
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(out[others], clean[others])


FAULTS = {
    "reads another expert": ("expert = tile_experts[tile]", "expert = tile_experts[tile] * 0"),
    "takes gates for ups": ("block, block + blocks", "block, block"),
    "multiplies one block of inputs": (
        "lambda step: (index, step)",
        "lambda step: (index, step * 0)",
    ),
    "writes all blocks to the first": ("pl.ds(block * COLUMNS", "pl.ds(block * 0"),
    "leaves out SwiGLU": ("_silu(sums[0]) * sums[1]", "sums[0] * sums[1]"),
    "weights by the wrong expert": ("weights[:, j, None]", "weights[:, 0, None]"),
    "copies over operands that are read": ("plgpu.commit_smem()", "pass"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_interpreter_detects_a_planted_fault(fault):
    kernel = planted(mosaic_gpu, *FAULTS[fault]).grouped_experts
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check(make(7, 3, 2, 384, 128, ml_dtypes.bfloat16), HOPPER, kernel=kernel)
    reset_gpu_interpret_mode_state()


def planted(module, old: str, new: str):
    """Return the module with one place of its source replaced."""
    text = inspect.getsource(module)
    assert text.count(old) == 1, "there is no such place"
    faulty = type(sys)("faulty")
    sys.modules["faulty"] = faulty  # dataclasses look there
    exec(compile(text.replace(old, new), "faulty", "exec"), faulty.__dict__)
    return faulty


# ---- selection ----------------------------------------------------------------------------------


def test_unsupported_experts_are_named_in_the_error():
    assert unsupported(2048, 768, BF16) is None
    assert unsupported(2048, 768, jnp.dtype(jnp.float16)) is None
    assert "float32" in unsupported(2048, 768, jnp.dtype(jnp.float32))
    assert "not 2048 and 100" in unsupported(2048, 100, BF16)


def test_gpus_use_the_kernel_and_report_exceptions_once(monkeypatch, caplog):
    monkeypatch.setattr(api, "_say_once", functools.cache(api._say_once.__wrapped__))

    def traced(rows: int, inner: int = 64, dtype=BF16, capability=HOPPER) -> str:
        a = make(rows, 16, 2, 64, inner, dtype)
        with described(Gpu(capability, 100)):
            call = functools.partial(mix_experts)  # a new one, because JAX caches what it traced
            return str(jax.make_jaxpr(call)(*map(jnp.asarray, vars(a).values())))

    with caplog.at_level("WARNING"):
        assert "forge_experts_down" in traced(3)
        assert "forge_experts_down" not in traced(2)  # four pairs of 16 experts
        assert not caplog.records
        assert "forge_experts_down" not in traced(8, 66)  # 16 pairs of 16 experts
        assert not caplog.records
        assert "forge_experts_down" not in traced(9, 66)
        assert "forge_experts_down" not in traced(9, 66)
    assert len(caplog.records) == 1
    assert "reads all of them: sizes must be multiples of 64, not 64 and 66" in caplog.text
    assert "forge_experts_down" not in traced(3, dtype=jnp.dtype(jnp.float32))
    assert "forge_experts_down" not in traced(3, capability=(7, 5))


def test_cpus_compute_experts_without_the_kernel():
    arrays = [jnp.asarray(array) for array in vars(make(3, 16, 2, 64, 64, BF16)).values()]
    with described(Gpu(HOPPER, 100)):  # on the CPU of a GPU's host
        y = jax.jit(functools.partial(mix_experts))(*arrays)
    np.testing.assert_array_equal(y, jax.jit(mix_experts)(*arrays))


@pytest.mark.parametrize(
    ("options", "rows", "expected"),
    [
        ({"values": "int4", "group": 32}, 8, "by pair"),  # 16 pairs of 16 experts
        ({"values": "int4", "group": 32}, 9, "all in fusions"),
        ({"values": "int4", "group": 32}, 11, "kernel"),
        ({"values": "fp8", "group": 32, "activations": "fp8"}, 11, "kernel"),
        ({"values": "int8", "group": 64, "activations": "int8"}, 11, "all in chunks"),
        ({"values": "int4", "group": 32, "fused": False}, 8, "by pair"),
        ({"values": "int4", "group": 32, "fused": False}, 9, "all in chunks"),  # 2 values per byte
    ],
)
def test_form_of_quantized_experts_depends_on_rows(options, rows, expected, monkeypatch):
    a, found = make(rows, 16, 2, 64, 64, BF16), []

    def recorded(name: str, form: Callable[..., jax.Array]) -> None:
        def call(*arrays: Any, **options: Any) -> jax.Array:
            found.append(name)
            return form(*arrays, **options)

        monkeypatch.setattr(api, form.__name__, call)

    monkeypatch.setattr("forge_kernels.experts.xla.FUSED_BYTES", 10 * 4 * 16 * 128)  # 10 rows
    options = {"inputs": 64, "experts": 16, "fused": True} | options
    gate_up, down = (
        quantized_experts(Quantization(outputs=outputs, **options), 0) for outputs in (128, 64)
    )
    fused = in_fusions(rows, gate_up, down)
    recorded("by pair", experts_by_pair)
    recorded("all in fusions" if fused else "all in chunks", experts_by_chunks)
    with described(Gpu(HOPPER, 100)):
        call = functools.partial(mix_experts)
        rest = map(jnp.asarray, (a.experts, a.weights))
        text = str(jax.make_jaxpr(call)(jnp.asarray(a.x), gate_up, down, *rest))
    kernel = ["kernel"] if "forge_experts_down" in text else []
    assert found + kernel == [expected]
