"""The GPU kernel for few rows and quantized matrices, in Pallas' interpreter.

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
Q5_K = Blocks("int8", 32, 256, minima=True)
Q6_K = Blocks("int8", 16, 256)
FORMS = {
    "groups of 128": Quantization(values="int4", outputs=256, inputs=768, group=128, fused=True),
    "groups of 64": Quantization(values="int4", outputs=128, inputs=256, group=64, fused=True),
    "Q4_0": Quantization.of_blocks(Blocks("int4", 32, 32), 128, 512, fused=True),
    "Q4_1": Quantization.of_blocks(Blocks("int4", 32, 32, minima=True), 128, 512, fused=True),
    "Q4_K": Quantization.of_blocks(Q4_K, 256, 512, fused=True),
    "int8, groups of 128": Quantization(
        values="int8", outputs=128, inputs=384, group=128, fused=True
    ),
    "Q5_1": Quantization.of_blocks(Blocks("int8", 32, 32, minima=True), 128, 384, fused=True),
    "Q8_0": Quantization.of_blocks(Blocks("int8", 32, 32), 128, 384, fused=True),
    "Q5_K": Quantization.of_blocks(Q5_K, 256, 512, fused=True),
    "Q6_K": Quantization.of_blocks(Q6_K, 256, 768, fused=True),
    "Q6_K in blocks of 64": Quantization.of_blocks(Blocks("int8", 16, 64), 128, 384, fused=True),
}


def matrix(quantization: Quantization, seed: int = 0) -> QuantizedWeight:
    """Return a matrix of random values."""
    rng, w = np.random.default_rng(seed), QuantizedWeight.abstract(quantization)
    low, dtype = (-8, jnp.int4) if quantization.native else (-128, jnp.int8)
    arrays = {"weight": jnp.asarray(rng.integers(low, -low, w.weight.shape), dtype)}
    numbers = 1 if w.group_scale is None else 64
    for name, least, size in (("scale", 0.1, -low / 8 * numbers), ("minimum", -0.5, numbers)):
        if (shape := getattr(w, name)) is not None:
            arrays[name] = jnp.asarray(rng.uniform(least, 0.3, shape.shape) / size, shape.dtype)
    for name in ("group_scale", "group_minimum"):
        if (shape := getattr(w, name)) is not None:
            arrays[name] = jnp.asarray(rng.integers(-128, 128, shape.shape), jnp.int8)
    return dataclasses.replace(w, **arrays)


def floats(w: QuantizedWeight) -> np.ndarray:
    """Return the values as f64[N, K]."""
    offset = 8 if w.quantization.native and w.minimum is not None else 0
    values = np.asarray(w.weight.astype(jnp.float32), np.float64) + offset

    def of_values(factors: jax.Array | None) -> np.ndarray:
        if factors is None:
            return np.ones(())
        size = w.quantization.inputs // factors.shape[1]
        return np.repeat(np.asarray(factors, np.float64), size, axis=1)

    floats = values * of_values(w.scale) * of_values(w.group_scale)
    return (
        floats if w.minimum is None else floats + of_values(w.minimum) * of_values(w.group_minimum)
    )


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
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_kernel_computes_residual_and_swiglu(name, form, rows):
    check(name, rows, **{form: True})


def test_kernel_supports_float16_and_ampere():
    check("Q4_K", 4, dtype=jnp.float16, residual=True)
    check("groups of 128", 4, capability=AMPERE, swiglu=True)
    check("Q5_K", 4, dtype=jnp.float16, capability=AMPERE, residual=True)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K"])
def test_row_bits_are_independent_of_other_rows(name):
    w = matrix(FORMS[name])
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
    "takes gates for ups": ("tile + outputs // TILE", "tile"),
    "leaves out SwiGLU": ("_silu(sums[0]) * sums[1] if", "sums[0] * sums[1] if"),
}
OFFSET_FAULTS = {"forgets the offset": ("(MIDDLE - self._offset)", "MIDDLE")}
LEVEL_FAULTS = {
    "takes the first factor of a row": ("lax.div(step, size // self.depth)", "0 * step"),
    "takes the first number of a copy": ("group * count // self.groups", "0"),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(pytest.param("Q4_K", c, id=f"Q4_K {k}") for k, c in (FAULTS | OFFSET_FAULTS).items()),
        *(pytest.param("Q5_K", c, id=f"Q5_K {k}") for k, c in (FAULTS | LEVEL_FAULTS).items()),
    ],
)
@pytest.mark.slow
def test_checks_detect_a_planted_fault(name, change):
    module = planted(mosaic_gpu, *change)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
        check(name, 8, module=module, swiglu=True)
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
        ({"group": 16}, 8, jnp.bfloat16, False),
        ({"values": "int8"}, 8, jnp.bfloat16, True),
        ({"values": "int8", "inputs": 640}, 8, jnp.bfloat16, True),
        ({"values": "int8", "group": 768}, 8, jnp.bfloat16, False),
        ({"values": "int8", "activations": "int8"}, 8, jnp.bfloat16, False),
        ({"values": "fp8"}, 8, jnp.bfloat16, False),
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
