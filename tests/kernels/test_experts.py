"""Mixtures of experts: the choice, the sum, and independent rows."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from forge_kernels.experts import ClampedSwiGLU, choose_experts, mix_experts, xla
from forge_kernels.experts.xla import all_experts, experts_by_pair, tile_rows, tiled_experts
from forge_kernels.linear import FORMATS, PackedWeight, Packing, linear, pack_experts

# ---- the choice ---------------------------------------------------------------------------------


def test_weights_are_the_softmax_of_the_most_likely_experts():
    logits = np.random.default_rng(0).standard_normal((9, 7)).astype(np.float32)
    share = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-logits, axis=1)[:, :3]
    for normalized in (False, True):
        experts, weights = choose_experts(jnp.asarray(logits), 3, normalized=normalized)
        np.testing.assert_array_equal(experts, order)
        want = np.take_along_axis(share, order, 1)
        want = want / want.sum(axis=1, keepdims=True) if normalized else want
        np.testing.assert_allclose(weights, want, rtol=1e-5)


def test_ties_choose_the_first_experts():
    logits = jnp.asarray([[0.0, 2.0, 0.0, 2.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    experts, weights = choose_experts(logits, 3, normalized=True)
    assert experts.tolist() == [[1, 3, 0], [0, 1, 2]]
    np.testing.assert_allclose(weights[1], [1 / 3] * 3, rtol=1e-6)


@pytest.mark.parametrize("groups", [1, 3])
def test_correction_and_groups_select_experts_but_do_not_weigh_them(groups):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((20, 12)).astype(np.float32)
    correction = rng.standard_normal(12).astype(np.float32)
    found = 1 / (1 + np.exp(-logits))
    experts, weights = choose_experts(
        jnp.asarray(logits),
        2,
        normalized=True,
        scores="sigmoid",
        correction=jnp.asarray(correction),
        groups=groups,
        kept_groups=1,
        scale=2.5,
    )
    for row, ranked in enumerate(found + correction):
        by_group = ranked.reshape(groups, -1)
        best = np.sort(by_group, axis=1)[:, -2:].sum(axis=1).argmax()
        kept = np.full_like(by_group, -np.inf)
        kept[best] = by_group[best]
        chosen = np.argsort(-kept.ravel())[:2]
        assert experts[row].tolist() == chosen.tolist()
        share = found[row, chosen]
        np.testing.assert_allclose(weights[row], 2.5 * share / share.sum(), rtol=1e-5)


# ---- the sum ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrays:
    x: np.ndarray  # [T, d]
    gate_up: np.ndarray  # [E, 2 I, d]
    down: np.ndarray  # [E, d, I]
    experts: np.ndarray  # i32[T, k]
    weights: np.ndarray  # f32[T, k]


def make(rows, count, per_token, d, inner, dtype=np.float32, seed=0) -> Arrays:
    """Return arrays with uneven expert loads: some have many rows, some none."""
    rng = np.random.default_rng([seed, rows, count])
    x = rng.standard_normal((rows, d)) * rng.uniform(0.5, 3, (rows, 1))
    gate_up = rng.standard_normal((count, 2 * inner, d)) * d**-0.5
    down = rng.standard_normal((count, d, inner)) * inner**-0.5
    liking = rng.standard_normal((rows, count)) + np.linspace(2, -2, count)
    experts = np.argsort(-liking, axis=1)[:, :per_token].astype(np.int32)
    weights = rng.uniform(0.05, 1, (rows, per_token)).astype(np.float32)
    return Arrays(x.astype(dtype), gate_up.astype(dtype), down.astype(dtype), experts, weights)


def expected(a: Arrays) -> np.ndarray:
    """Return f64[T, d]."""
    y = np.zeros(a.x.shape)
    for t, (experts, weights) in enumerate(zip(a.experts, a.weights, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            gate, up = np.split(a.gate_up[expert].astype(np.float64) @ a.x[t].astype(float), 2)
            inner = gate / (1 + np.exp(-gate)) * up
            y[t] += weight * (a.down[expert].astype(np.float64) @ inner)
    return y


def rows_of(a: Arrays, at) -> Arrays:
    return Arrays(a.x[at], a.gate_up, a.down, a.experts[at], a.weights[at])


@partial(jax.jit, static_argnums=(0, 3))
def _call(form, a: tuple, num_rows, total):
    match form:
        case "tiled":
            return tiled_experts(*a, num_rows, total=total)
        case "all":
            return all_experts(*a, num_rows)
        case "by pair":
            return experts_by_pair(*a, num_rows, shared=total is not None)
        case "reference":
            return mix_experts(*a, num_rows=num_rows, total=total, implementation="reference")
        case _:
            return mix_experts(*a, num_rows=num_rows, total=total)


def run(
    form: str, a: Arrays, num_rows: int | None = None, *, total: int | None = None
) -> np.ndarray:
    arrays = (a.x, a.gate_up, a.down, a.experts, a.weights)
    num_rows = len(a.x) if num_rows is None else num_rows
    y = _call(form, tuple(map(jnp.asarray, arrays)), jnp.int32(num_rows), total)
    assert y.dtype == a.x.dtype
    return np.asarray(y)[:num_rows].astype(np.float32)


FORMS = ("tiled", "all", "by pair", "reference")
SHAPES = {  # rows, experts, of a token, d, inner
    "a single row": (1, 4, 2, 24, 16),
    "few pairs": (1, 12, 3, 24, 10),
    "few rows of many experts": (5, 12, 3, 24, 10),
    "one expert": (9, 1, 1, 16, 8),
    "each takes all": (6, 3, 3, 16, 8),
    "full tiles": (80, 4, 2, 24, 16),
    "tiles of 64": (100, 3, 2, 24, 16),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.quick_cases(8)
def test_token_gets_the_weighted_sum_of_its_experts(form, shape):
    arrays = make(*shape)
    np.testing.assert_allclose(run(form, arrays), expected(arrays), atol=2e-5)


def test_test_shapes_cover_tiles_of_all_sizes():
    sizes = {tile_rows(rows * k, count) for rows, count, k, *_ in SHAPES.values()}
    assert sizes == {2, 3, 9, 15, 16, 64}


@pytest.mark.parametrize("shape", ["few pairs", "few rows of many experts"])
def test_pairs_of_one_expert_follow_each_other(shape, monkeypatch):
    """Only the first one reads the expert's matrices from memory."""
    found, product = [], xla._by_pair

    def recorded(x, w, experts):
        found.append(experts.tolist())
        return product(x, w, experts)

    monkeypatch.setattr(xla, "_by_pair", recorded)
    a = make(*SHAPES[shape])
    arrays = (a.x, a.gate_up, a.down, a.experts, a.weights)
    y = experts_by_pair(*map(jnp.asarray, arrays), jnp.int32(len(a.x)))
    np.testing.assert_allclose(y, expected(a), atol=2e-5)
    chosen = a.experts.ravel().tolist()
    assert found == [chosen if shape == "few pairs" else sorted(chosen)] * 2


@pytest.mark.parametrize("form", ["tiled", "all", "by pair"])
def test_16_bit_experts_stay_close(form):
    arrays = make(40, 6, 2, 64, 48, ml_dtypes.bfloat16)
    want = expected(arrays)
    error = np.linalg.norm(run(form, arrays) - want) / np.linalg.norm(want)
    assert 1e-4 < error < 0.01


def test_gradients_pass_through_the_reference():
    a = make(5, 4, 2, 8, 6)

    def loss(gate_up, weights):
        y = mix_experts(a.x, gate_up, a.down, a.experts, weights, implementation="reference")
        return (y**2).sum()

    by_gate_up, by_weights = jax.grad(loss, (0, 1))(jnp.asarray(a.gate_up), jnp.asarray(a.weights))
    unused = [e for e in range(4) if e not in a.experts]
    used = [e for e in range(4) if e in a.experts]
    assert all((by_gate_up[e] == 0).all() for e in unused)
    assert all((by_gate_up[e] != 0).any() for e in used) and (by_weights != 0).all()


# ---- experts of several devices -----------------------------------------------------------------


def shares(a: Arrays, devices: int) -> list[Arrays]:
    """Return the arrays of each device, which has some of the experts."""
    own = len(a.gate_up) // devices
    found = []
    for first in range(0, len(a.gate_up), own):
        local = a.experts - first
        local = np.where((local >= 0) & (local < own), local, own)
        some = slice(first, first + own)
        found.append(Arrays(a.x, a.gate_up[some], a.down[some], local, a.weights))
    return found


SHARED_SHAPES = {  # rows, experts, of a token, d, inner
    "a single row": (1, 4, 2, 24, 16),
    "few rows of many experts": (5, 12, 3, 24, 10),
    "more choices than experts on a device": (9, 4, 3, 16, 8),
    "full tiles": (80, 4, 2, 24, 16),
}


@pytest.mark.parametrize("form", [*FORMS, "auto"])
@pytest.mark.parametrize("shape", SHARED_SHAPES.values(), ids=SHARED_SHAPES)
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.quick_cases(10)
def test_outputs_of_devices_add_up_to_those_of_all_experts(form, shape, devices):
    a = make(*shape)
    parts = [run(form, each, total=shape[1]) for each in shares(a, devices)]
    np.testing.assert_allclose(sum(parts), expected(a), atol=2e-5)


@pytest.mark.parametrize("form", [*FORMS, "auto"])
def test_device_without_rows_returns_exact_zeros(form):
    a = make(9, 6, 2, 24, 16)
    local = np.where(a.experts < 3, a.experts, a.experts - 3)  # first device's experts, in pairs
    local[:, 1] = (local[:, 0] + 1) % 3
    gate_up = a.gate_up.copy()
    gate_up[3:] = np.nan
    first, second = shares(Arrays(a.x, gate_up, a.down, local, a.weights), 2)
    assert (run(form, second, total=6) == 0).all()
    assert np.isfinite(run(form, first, total=6)).all()


@pytest.mark.full_compile
@pytest.mark.parametrize("form", ["tiled", "all", "by pair"])
def test_row_bits_on_a_device_are_independent_of_the_batch(form):
    a = make(40, 6, 2, 96, 80)
    order = np.random.default_rng(1).permutation(40)
    for share in shares(a, 2):
        whole = run(form, share, total=6)
        np.testing.assert_array_equal(run(form, rows_of(share, order), total=6), whole[order])
        copies = rows_of(share, np.full(40, 7))
        np.testing.assert_array_equal(run(form, copies, total=6), whole[[7] * 40])


def test_more_choices_than_experts_of_all_devices_are_rejected():
    share = shares(make(5, 4, 3, 24, 16), 2)[0]
    arrays = {name: jnp.asarray(array) for name, array in vars(share).items()}
    with pytest.raises(ValueError, match="chose 3 experts, but there are only 2"):
        mix_experts(**arrays)
    mix_experts(**arrays, total=4)


# ---- biases and other activations ---------------------------------------------------------------

CLAMPED = ClampedSwiGLU(limit=2.0, alpha=1.7)


def clamped_inner(both: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(both[::2], 2.0), np.clip(both[1::2], -2.0, 2.0)
    return (up + 1) * gate / (1 + np.exp(-1.7 * gate))


def biases_of(a: Arrays) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    wide = rng.standard_normal(a.gate_up.shape[:2])
    return wide.astype(np.float32), rng.standard_normal(a.down.shape[:2]).astype(np.float32)


def run_clamped(form: str, a: Arrays, biases: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    call = {"tiled": tiled_experts, "all": all_experts, "by pair": experts_by_pair}.get(form)
    options = {"biases": tuple(map(jnp.asarray, biases)), "activation": CLAMPED}
    arrays = tuple(map(jnp.asarray, (a.x, a.gate_up, a.down, a.experts, a.weights)))
    if call is None:
        implementation = "reference" if form == "reference" else "auto"
        return np.asarray(mix_experts(*arrays, implementation=implementation, **options))
    return np.asarray(call(*arrays, jnp.int32(len(a.x)), **options))


@pytest.mark.parametrize("form", [*FORMS, "auto"])
def test_clamped_swiglu_with_biases_matches_float64(form):
    for shape in ("few rows of many experts", "full tiles"):
        a = make(*SHAPES[shape])
        biases, want = biases_of(a), np.zeros(a.x.shape)
        for t, (experts, weights) in enumerate(zip(a.experts, a.weights, strict=True)):
            for e, weight in zip(experts, weights, strict=True):
                both = a.gate_up[e].astype(np.float64) @ a.x[t] + biases[0][e]
                want[t] += weight * (a.down[e].astype(np.float64) @ clamped_inner(both))
                want[t] += weight * biases[1][e]
        assert np.abs(a.gate_up @ a.x[0]).max() > 2, "nothing is clamped"
        np.testing.assert_allclose(run_clamped(form, a, biases), want, atol=2e-5)


def test_biases_and_activations_that_do_not_fit_are_rejected(cpu_kernels):
    a = make(5, 4, 2, 24, 16)
    with pytest.raises(ValueError, match=r"a bias \(4, 31\) does not fit experts \(4, 32, 24\)"):
        run_clamped("auto", a, (np.zeros((4, 31), np.float32), np.zeros((4, 24), np.float32)))
    a = make(5, 4, 2, 64, 32, ml_dtypes.bfloat16)
    gate_up, down = packed(a.gate_up, "bf16", True), packed(a.down, "bf16", False)
    arrays = (jnp.asarray(a.x), gate_up, down, jnp.asarray(a.experts), jnp.asarray(a.weights))
    with pytest.raises(TypeError, match="packed experts support SwiGLU without biases only"):
        mix_experts(*arrays, activation=CLAMPED)


# ---- batch invariance ---------------------------------------------------------------------------


def check_company(form: str, a: Arrays) -> None:
    """Check that at one shape, a row's bits are independent of its position and its neighbors."""
    whole, count = run(form, a), len(a.x)
    order = np.random.default_rng(1).permutation(count)
    np.testing.assert_array_equal(run(form, rows_of(a, order)), whole[order], "in another place")
    for row in (0, count // 2, count - 1):
        again = rows_of(a, np.full(count, row))  # all the same, so one expert has every row
        np.testing.assert_array_equal(run(form, again), whole[[row] * count], f"copies of {row}")
        np.testing.assert_array_equal(run(form, a, row + 1), whole[: row + 1], f"before {row}")


@pytest.mark.full_compile
@pytest.mark.parametrize("form", ["tiled", "all", "by pair"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [7, 64])
def test_row_bits_are_independent_of_the_batch(form, dtype, rows):
    check_company(form, make(rows, 6, 2, 96, 80, dtype))


def test_dropped_tokens_are_detected():
    a = make(64, 6, 2, 96, 80)
    nth = np.zeros_like(a.experts)
    for expert in range(6):
        mine = a.experts == expert
        nth[mine] = np.arange(mine.sum())
    dropped = Arrays(a.x, a.gate_up, a.down, a.experts, np.where(nth < 8, a.weights, 0))
    assert (run("tiled", dropped) != run("tiled", a)).any(axis=1).sum() > 20


@pytest.mark.parametrize("form", FORMS)
def test_non_finite_values_stay_in_their_row_or_expert(form):
    a = make(20, 6, 2, 24, 16)
    clean, others = run(form, a), np.arange(20) != 3
    x = a.x.copy()
    x[3, 5] = np.nan
    out = run(form, Arrays(x, a.gate_up, a.down, a.experts, a.weights))
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(out[others], clean[others])
    experts = np.where(a.experts == 4, 5, a.experts)
    experts[(experts == 5).all(axis=1), 0] = 0
    gate_up = a.gate_up.copy()
    gate_up[4] = np.nan
    assert np.isfinite(run(form, Arrays(a.x, gate_up, a.down, experts, a.weights))).all()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"down": np.zeros((4, 24, 15), np.float32)}, ValueError),
        ({"down": np.zeros((3, 24, 16), np.float32)}, ValueError),
        ({"x": np.zeros((5, 23), np.float32)}, ValueError),
        ({"x": np.zeros((5, 24), ml_dtypes.bfloat16)}, TypeError),
        ({"weights": np.zeros((5, 2), ml_dtypes.bfloat16)}, TypeError),
        ({"weights": np.zeros((5, 3), np.float32)}, ValueError),
    ],
)
def test_mismatched_inputs_are_rejected(changes, error):
    arrays = {**vars(make(5, 4, 2, 24, 16)), **changes}
    with pytest.raises(error):
        mix_experts(**{name: jnp.asarray(array) for name, array in arrays.items()})


# ---- the C++ kernel -----------------------------------------------------------------------------


def packed(w: np.ndarray, form: str, paired: bool) -> PackedWeight:
    packing = Packing(form, *w.shape[1:], paired, len(w))  # type: ignore[arg-type]
    weight, scale = pack_experts(w, packing)
    assert (weight.shape, weight.dtype) == (packing.weight.shape, packing.weight.dtype)
    return PackedWeight(jnp.asarray(weight), None if scale is None else jnp.asarray(scale), packing)


@partial(jax.jit, static_argnums=6)
def _packed_call(x, gate_up, down, experts, weights, num_rows, total):
    return mix_experts(x, gate_up, down, experts, weights, num_rows=num_rows, total=total)


def run_packed(
    form: str, a: Arrays, num_rows: int | None = None, *, total: int | None = None
) -> np.ndarray:
    num_rows = len(a.x) if num_rows is None else num_rows
    gate_up, down = packed(a.gate_up, form, True), packed(a.down, form, False)
    y = _packed_call(a.x, gate_up, down, a.experts, a.weights, np.int32(num_rows), total)
    assert y.dtype == jnp.bfloat16
    return np.asarray(y)[:num_rows].astype(np.float32)


def one_of(w: PackedWeight, expert: int) -> PackedWeight:
    packing = Packing(w.packing.format, w.packing.outputs, w.packing.inputs, w.packing.paired)
    scale = None if w.scale is None else w.scale[expert]
    return PackedWeight(w.weight[expert], scale, packing)


def check_packed(form: str, shape: tuple[int, int, int, int, int]) -> None:
    """Check that it equals the sum of the packed linear layers of each expert."""
    a = make(*shape, ml_dtypes.bfloat16)
    gate_up, down = packed(a.gate_up, form, True), packed(a.down, form, False)
    want, magnitude = np.zeros(a.x.shape), np.zeros(a.x.shape)
    for expert in range(len(a.gate_up)):
        inner = linear(jnp.asarray(a.x), one_of(gate_up, expert), swiglu=True)
        out = np.asarray(linear(inner, one_of(down, expert), out_dtype=jnp.float32), np.float64)
        weight = np.where(a.experts == expert, a.weights, 0).sum(axis=1, keepdims=True)
        want, magnitude = want + weight * out, magnitude + weight * abs(out)
    error = abs(run_packed(form, a) - want)
    assert (error <= 2.0**-8 * abs(want) + 2.0**-20 * magnitude).all(), error.max()


def check_packed_company(form: str) -> None:
    a = make(40, 6, 2, 99, 45, ml_dtypes.bfloat16)
    whole = run_packed(form, a)
    for rows in (1, 2, 7, 39):
        np.testing.assert_array_equal(run_packed(form, rows_of(a, slice(rows))), whole[:rows])
        np.testing.assert_array_equal(run_packed(form, a, rows), whole[:rows])
    order = np.random.default_rng(1).permutation(40)
    np.testing.assert_array_equal(run_packed(form, rows_of(a, order)), whole[order])
    again = rows_of(a, np.full(130, 3))
    np.testing.assert_array_equal(run_packed(form, again), whole[[3] * 130])


PACKED_SHAPES = {
    "whole panels": (9, 4, 2, 64, 64),
    "tails": (33, 5, 3, 99, 45),
    "a single row": (1, 4, 2, 24, 7),
    "many rows": (150, 3, 2, 70, 50),
}


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", PACKED_SHAPES)
def test_packed_experts_equal_packed_linear_layers(form, name):
    check_packed(form, PACKED_SHAPES[name])


@pytest.mark.full_compile
@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("form", FORMATS)
def test_packed_expert_row_bits_are_independent_of_the_batch(form):
    check_packed_company(form)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("form", FORMATS)
def test_non_finite_row_stays_non_finite_and_isolated(form):
    a = make(20, 6, 2, 40, 24, ml_dtypes.bfloat16)
    clean, others = run_packed(form, a), np.arange(20) != 3
    for value in (np.nan, np.inf):
        x = a.x.copy()
        x[3, 5] = value
        out = run_packed(form, Arrays(x, a.gate_up, a.down, a.experts, a.weights))
        assert not np.isfinite(out[3]).any()
        np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("form", FORMATS)
def test_packed_outputs_of_devices_add_up_to_those_of_all_experts(form):
    a = make(9, 6, 3, 64, 64, ml_dtypes.bfloat16)
    whole = run_packed(form, a)
    parts = [run_packed(form, each, total=6) for each in shares(a, 3)]
    error = np.linalg.norm(sum(parts) - whole) / np.linalg.norm(whole)
    assert error < 0.01  # three sums are rounded to bfloat16
    nothing = np.full_like(a.experts, 6)
    none = run_packed(form, Arrays(a.x, a.gate_up, a.down, nothing, a.weights), total=12)
    assert (none == 0).all()


@pytest.mark.usefixtures("cpu_kernels")
def test_empty_batches_and_out_of_range_experts_are_ignored():
    a = make(6, 4, 2, 24, 16, ml_dtypes.bfloat16)
    assert run_packed("bf16", a, 0).shape == (0, 24)
    beyond = np.where(a.experts == a.experts[0, 0], 2**30, a.experts)
    zero = np.where(a.experts == a.experts[0, 0], 0, a.weights)
    out = run_packed("bf16", Arrays(a.x, a.gate_up, a.down, beyond, a.weights))
    want = run_packed("bf16", Arrays(a.x, a.gate_up, a.down, a.experts, zero))
    np.testing.assert_array_equal(out, want)


def test_experts_packed_in_two_formats_are_rejected(cpu_kernels):
    a = make(5, 4, 2, 24, 16, ml_dtypes.bfloat16)
    rest = (jnp.asarray(a.experts), jnp.asarray(a.weights))
    gate_up, down = packed(a.gate_up, "int8", True), packed(a.down, "bf16", False)
    with pytest.raises(TypeError, match="one packed format, got bf16 and int8"):
        mix_experts(jnp.asarray(a.x), gate_up, down, *rest)


def test_only_quantized_experts_have_a_column_order():
    a = make(5, 4, 2, 24, 16)
    arrays = {name: jnp.asarray(array) for name, array in vars(a).items()}
    with pytest.raises(TypeError, match="order requires quantized experts"):
        mix_experts(**arrays, order=jnp.zeros((4, 24), jnp.int32))


def test_packed_and_plain_matrices_do_not_mix(cpu_kernels):
    a = make(5, 4, 2, 24, 16, ml_dtypes.bfloat16)
    rest = (jnp.asarray(a.experts), jnp.asarray(a.weights))
    x, down = jnp.asarray(a.x), jnp.asarray(a.down)
    gate_up = packed(a.gate_up, "bf16", True)
    with pytest.raises(TypeError, match="must both be packed, or neither"):
        mix_experts(x, gate_up, down, *rest)
    with pytest.raises(ValueError, match="packed as paired"):
        mix_experts(x, packed(a.gate_up, "bf16", False), packed(a.down, "bf16", False), *rest)
    with pytest.raises(TypeError, match="activations of bfloat16, got float32"):
        mix_experts(x.astype(jnp.float32), gate_up, packed(a.down, "bf16", False), *rest)


def test_large_logits_are_ranked_although_their_sigmoids_are_equal():
    logits = jnp.array([[20.0, 30.0, 25.0]])
    chosen, weights = choose_experts(logits, 1, normalized=False, scores="sigmoid")
    assert chosen.tolist() == [[1]] and weights.tolist() == [[1.0]]
