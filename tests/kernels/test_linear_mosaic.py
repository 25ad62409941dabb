"""The GPU kernel for few rows and 4-bit matrices, in Pallas' interpreter.

The interpreter simulates memory, barriers and copies, and detects races. The `mma` instruction and
the conversion of registers are replaced by ordinary operations. `test_few_rows_registers.py` checks
the registers, and `tests/aot` compiles the kernel.
"""

import dataclasses
import functools
import io
from contextlib import redirect_stdout
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks import reset_gpu_interpret_mode_state
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_experts_mosaic import planted

from forge_kernels.blocks import Blocks
from forge_kernels.devices import Gpu, described
from forge_kernels.linear import Quantization, QuantizedWeight, linear, mosaic_gpu
from forge_kernels.linear.few_rows import few_rows_linear, supports

AMPERE, HOPPER = (8, 0), (9, 0)
Q4_K = Blocks("int4", 32, 256, minima=True)
FORMS = {
    "groups of 128": Quantization(values="int4", outputs=256, inputs=768, group=128, fused=True),
    "groups of 64": Quantization(values="int4", outputs=128, inputs=256, group=64, fused=True),
    "Q4_0": Quantization.of_blocks(Blocks("int4", 32, 32), 128, 512, fused=True),
    "Q4_1": Quantization.of_blocks(Blocks("int4", 32, 32, minima=True), 128, 512, fused=True),
    "Q4_K": Quantization.of_blocks(Q4_K, 256, 512, fused=True),
}


def matrix(quantization: Quantization, seed: int = 0) -> QuantizedWeight:
    """Return a matrix of random values."""
    rng, w = np.random.default_rng(seed), QuantizedWeight.abstract(quantization)
    arrays = {"weight": jnp.asarray(rng.integers(-8, 8, w.weight.shape), jnp.int4)}
    for name, low in (("scale", 0.1), ("minimum", -0.5)):
        if (shape := getattr(w, name)) is not None:
            arrays[name] = jnp.asarray(rng.uniform(low, 0.3, shape.shape), shape.dtype)
    return dataclasses.replace(w, **arrays)


def floats(w: QuantizedWeight) -> np.ndarray:
    """Return the values as f64[N, K]."""
    group = w.quantization.group
    values = np.asarray(w.weight.astype(jnp.float32), np.float64)
    scale = np.repeat(np.asarray(w.scale, np.float64), group, axis=1)
    if w.minimum is None:
        return values * scale
    return (values + 8) * scale + np.repeat(np.asarray(w.minimum, np.float64), group, axis=1)


def activations(rows: int, width: int, dtype: Any = jnp.bfloat16, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((rows, width)), dtype)


def run(x, w, residual=None, *, module=mosaic_gpu, capability=HOPPER, **options) -> np.ndarray:
    options = {"swiglu": False, "out_dtype": x.dtype} | options
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    product = functools.partial(
        module.few_rows_product, capability=capability, interpret=interpret, **options
    )
    printed = io.StringIO()  # the race detector prints
    with redirect_stdout(printed):
        y = np.asarray(jax.jit(product)(x, w, residual))
    assert "RACE" not in printed.getvalue(), printed.getvalue()
    assert y.dtype == options["out_dtype"]
    return y.astype(np.float64)


def check(name: str, rows: int, *, residual=False, swiglu=False, **options) -> None:
    w = matrix(FORMS[name])
    x = activations(rows, w.quantization.inputs, options.pop("dtype", jnp.bfloat16))
    want = np.asarray(x, np.float64) @ floats(w).T
    if swiglu:
        gate, up = np.split(want, 2, axis=1)
        want = gate / (1 + np.exp(-gate)) * up
    above = activations(rows, want.shape[1], x.dtype, 2) if residual else None
    if above is not None:
        want = want + np.asarray(above, np.float64)
    got = run(x, w, above, swiglu=swiglu, **options)
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    bound = 2e-5 if options.get("out_dtype") == jnp.float32 else 0.005
    assert error.max() < bound, error.max()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.quick_cases(3)
def test_kernel_multiplies_the_values_without_rounding_them(name):
    check(name, 8, out_dtype=jnp.float32)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", ["residual", "swiglu"])
def test_kernel_computes_residual_and_swiglu(form, rows):
    check("Q4_K", rows, **{form: True})


def test_kernel_supports_float16_and_ampere():
    check("Q4_K", 4, dtype=jnp.float16, residual=True)
    check("groups of 128", 4, capability=AMPERE, swiglu=True)


def test_row_bits_are_independent_of_other_rows():
    w = matrix(FORMS["Q4_K"])
    x = activations(8, 512)
    whole = run(x, w)
    np.testing.assert_array_equal(run(x[5:6], w)[0], whole[5])
    broken = run(x.at[3, 7].set(jnp.nan), w)
    assert np.isnan(broken[3]).all()
    others = np.arange(8) != 3
    np.testing.assert_array_equal(broken[others], whole[others])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_low_bits_of_the_offset_are_the_value(dtype):
    bits, offset = mosaic_gpu.OFFSETS[np.dtype(dtype).name]
    values = np.arange(-8, 8)
    stored = np.asarray((values & 15) ^ bits, np.uint16).view(dtype).astype(np.float64)
    np.testing.assert_array_equal(stored - offset, values)


FAULTS = {
    "uses the scales of the step before": ("return sums, following", "return sums, current"),
    "reads another tile": ("tile = lax.axis_index", "tile = 0 * lax.axis_index"),
    "adds no minima": ("sums + total * minima[0]", "sums"),
    "forgets the offset": ("(MIDDLE - self._offset)", "MIDDLE"),
    "takes gates for ups": ("tile + outputs // TILE", "tile"),
    "leaves out SwiGLU": ("_silu(sums[0]) * sums[1] if", "sums[0] * sums[1] if"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_checks_detect_a_planted_fault(fault):
    module = planted(mosaic_gpu, *FAULTS[fault])
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check("Q4_K", 8, module=module, swiglu=True)
    reset_gpu_interpret_mode_state()


# ---- selection ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "rows", "dtype", "expected"),
    [
        ({}, 8, jnp.bfloat16, True),
        ({}, 9, jnp.bfloat16, False),
        ({}, 8, jnp.float32, False),
        ({"inputs": 640}, 8, jnp.bfloat16, False),
        ({"outputs": 192}, 8, jnp.bfloat16, False),
        ({"group": 256}, 8, jnp.bfloat16, False),
        ({"zeros": True}, 8, jnp.bfloat16, False),
        ({"values": "int8"}, 8, jnp.bfloat16, False),
        ({"fused": False}, 8, jnp.bfloat16, False),
    ],
)
def test_gpus_use_the_kernel_for_few_rows(change, rows, dtype, expected):
    quantization = dataclasses.replace(FORMS["groups of 128"], **change)
    assert supports(quantization, rows, dtype) == expected
    w = QuantizedWeight.abstract(quantization)
    x = jax.ShapeDtypeStruct((rows, quantization.inputs), dtype)
    for capability, used in ((HOPPER, expected), ((7, 5), False)):
        with described(Gpu(capability, 100)):
            text = str(jax.make_jaxpr(lambda x, w: linear(x, w))(x, w))
        assert ("forge_linear_few_rows" in text) == used


def test_kernel_has_the_derivative_of_plain_xla():
    w = matrix(FORMS["Q4_K"])
    x = activations(4, 512)

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(linear(x, w, swiglu=True).astype(jnp.float32))

    want = jax.grad(loss)(x)
    with described(Gpu(HOPPER, 100)):
        np.testing.assert_array_equal(jax.grad(lambda x: loss(x))(x), want)


def test_cpus_compute_the_kernels_product_in_plain_xla():
    x, w = activations(4, 512), matrix(FORMS["Q4_K"])
    y = few_rows_linear(
        x,
        w,
        None,
        lambda x, w, _: linear(x, w),
        swiglu=False,
        out_dtype=x.dtype,
        capability=HOPPER,
    )
    np.testing.assert_array_equal(y, linear(x, w))
