"""The C++ kernels for CPUs: linear layers and embeddings on packed weights."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cpu_contract as contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_contract import Case, bf16, f32

from forge_kernels.embed import embed
from forge_kernels.linear import FORMATS, Packing, linear, pack
from forge_kernels.linear.reference import reference_linear

pytestmark = pytest.mark.usefixtures("cpu_kernels")

CASES = {f"{form}, {name}": case for form in FORMATS for name, case in contract.cases(form).items()}


@pytest.mark.parametrize("name", CASES)
def test_linear_is_the_product_of_the_rounded_operands(name):
    contract.check(CASES[name])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("option", ["plain", "norm, swiglu", "norm, residual, bf16"])
def test_row_bits_are_independent_of_the_batch(form, option):
    contract.check_invariance(contract.invariance_case(form, option))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("option", ["plain", "norm", "swiglu, bf16"])
def test_non_finite_row_stays_non_finite_and_isolated(form, option):
    contract.check_not_finite(replace(contract.invariance_case(form, option), rows=9))


def test_concurrent_calls_do_not_interfere():
    """Runs jobs of different sizes at the same time, on the same threads."""
    cases = [Case(form, rows=rows, outputs=200) for form in FORMATS for rows in (1, 9, 130)]
    arrays = [contract.make(case) for case in cases]
    want = [contract.run(case, mine) for case, mine in zip(cases, arrays, strict=True)]

    def one(i: int) -> bool:
        return np.array_equal(contract.run(cases[i], arrays[i]), want[i])

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(one, [i % len(cases) for i in range(40 * len(cases))]))


@pytest.mark.parametrize(("form", "bound"), [("bf16", 0.005), ("int8", 0.015), ("int4", 0.12)])
def test_linear_is_close_to_the_unquantized_product(form, bound):
    """Bounds the relative root mean square error on normal weights.

    int8: 255 steps across about 6.5 standard deviations of weights and of activations give 0.7%
    each. int4: 16 steps across about 4.3.
    """
    case = Case(form, rows=16, outputs=256, inputs=512, norm=True, residual=True)
    rng = np.random.default_rng(5)
    arrays = replace(contract.make(case), w=bf16(rng.standard_normal((256, 512)) / 16))
    want = reference_linear(
        jnp.asarray(arrays.x),
        jnp.asarray(arrays.w),
        norm=(jnp.asarray(arrays.norm), contract.EPS),
        residual=jnp.zeros((16, 256), jnp.bfloat16),
        out_dtype=jnp.float32,
    )
    out = contract.run(replace(case, residual=False), arrays)
    error = np.sqrt(((out - want) ** 2).mean() / (np.asarray(want) ** 2).mean())
    assert bound / 4 < error < bound


def test_rows_beyond_num_rows_are_not_computed():
    case = Case("bf16", rows=6)
    arrays = contract.make(case)
    np.testing.assert_array_equal(contract.run(case, arrays, 2), contract.run(case, arrays)[:2])
    assert contract.run(case, arrays, 0).shape == (0, case.outputs)
    no_rows = replace(arrays, x=arrays.x[:0], residual=arrays.residual[:0])
    assert contract.run(case, no_rows).shape == (0, case.outputs)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", contract.SHAPES.values(), ids=str)
def test_pack_follows_the_documented_layout(shape, form, paired):
    check_packing(shape, form, paired)


def check_packing(shape, form, paired):
    outputs, inputs = (2 * shape[0], shape[1]) if paired else shape
    rng = np.random.default_rng(inputs)
    w = bf16(rng.standard_normal((outputs, inputs)) * rng.choice([1e-3, 1, 30], (outputs, 1)))
    packing = Packing(form, outputs, inputs, paired)
    weight, scale = pack(w, packing)
    want_weight, want_scale = contract.slow_pack(w, packing)
    assert (weight.shape, weight.dtype) == (packing.weight.shape, packing.weight.dtype)
    np.testing.assert_array_equal(weight, want_weight)
    assert (scale is None) == (want_scale is None) == (packing.scale is None)
    if scale is not None and packing.scale is not None and want_scale is not None:
        assert (scale.shape, scale.dtype) == (packing.scale.shape, packing.scale.dtype)
        np.testing.assert_array_equal(scale, want_scale)


def test_packed_sizes_match_the_format():
    """The formats take two bytes per weight, one plus four per column, a half plus two per 32."""
    sizes = {}
    for form in FORMATS:
        packing = Packing(form, 4096, 1024)
        scale = packing.scale
        sizes[form] = (
            packing.weight.size * packing.weight.dtype.itemsize,
            0 if scale is None else scale.size * scale.dtype.itemsize,
        )
    values = 4096 * 1024
    assert sizes == {
        "bf16": (2 * values, 0),
        "int8": (values, 4 * 4096),
        "int4": (values // 2, 2 * values // 32),
    }


def test_packed_weights_are_adopted_without_a_copy():
    weight, _ = pack(bf16(np.ones((64, 64))), Packing("bf16", 64, 64))
    assert jax.device_put(weight, may_alias=True).unsafe_buffer_pointer() == weight.ctypes.data


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shape", [(200, 99), (33, 7), (64, 128)], ids=str)
def test_embed_takes_rows_of_a_packed_matrix(shape, form):
    check_embed(shape, form)


def check_embed(shape, form):
    case = Case(form, outputs=shape[0], inputs=shape[1])
    w = contract.make(case).w
    tokens = np.array([0, 1, 31, 32, shape[0] - 1, 5, 5, -1, shape[0], 2**31 - 1], np.int32)
    want = contract.quantize(w, form).floats[np.clip(tokens, 0, shape[0] - 1)]
    out = jax.jit(embed)(contract.packed(case, w), jnp.asarray(tokens))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(f32(out), f32(bf16(want)))


def test_mismatched_packed_weights_are_rejected():
    case, paired = Case("int8"), Case("int8", swiglu=True)
    arrays = contract.make(case)
    x, w = jnp.asarray(arrays.x), contract.packed(case, arrays.w)
    with pytest.raises(
        TypeError, match=r"packed \(int8\) weights do not support activations of float32"
    ):
        linear(x.astype(jnp.float32), w)
    with pytest.raises(ValueError, match=r"weight \[64, 96\]"):
        linear(x[:, 1:], w)
    with pytest.raises(ValueError, match="packed as paired"):
        linear(x, w, swiglu=True)
    with pytest.raises(ValueError, match="packed as paired"):
        linear(x, contract.packed(paired, arrays.w))
    with pytest.raises(ValueError, match="not both"):
        linear(x, contract.packed(paired, arrays.w), swiglu=True, residual=x[:, :64])
    with pytest.raises(ValueError, match="residual"):
        linear(x, w, residual=x)
    with pytest.raises(
        TypeError, match="residual must be bfloat16 like the activations, got float32"
    ):
        linear(x, w, residual=jnp.zeros((5, 64)))
    with pytest.raises(TypeError, match="norm must be bfloat16 like the activations, got float32"):
        linear(x, w, norm=(jnp.ones(96), 1e-5))
    with pytest.raises(ValueError, match=r"norm \(95,\) does not fit rows of 96"):
        linear(x, w, norm=(jnp.ones(95, jnp.bfloat16), 1e-5))
    with pytest.raises(TypeError, match="bfloat16 or float32, got float16"):
        linear(x, w, out_dtype=jnp.float16)
