"""Checks of the products that Pallas kernels compute on a GPU, against plain XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.linears import quantizations
from benchmarks.gpu.parts import Case
from forge_jax.weights.formats import fused_values
from forge_kernels.experts import mix_experts
from forge_kernels.linear import Quantization, QuantizedWeight, linear
from forge_kernels.linear.quantized import float_rows

TOLERANCE = 2.0**-6  # relative to the largest value: some roundings of bfloat16
FEW_ROWS = ("int4, groups of 128", "Q4_K", "Q6_K", "Q8_0")
FORMS = {"plain": 3, "swiglu": 8, "residual": 1}  # rows
OF_EXPERTS = ("int4, groups of 128", "fp8, blocks of 128")
EXPERTS, PER_TOKEN = 8, 2
TOKENS = (4, 200)  # products by pair, and those of the grouped kernel


def checks(tiny: bool) -> Iterator[Case]:
    """Yield the checks of the kernel for few rows, then those of experts."""
    found = quantizations(fused_values(jax.devices()[0]), tiny)
    outputs, inputs = (256, 512) if tiny else (1024, 2048)
    for name in FEW_ROWS:
        quantization = dataclasses.replace(found[name], outputs=outputs, inputs=inputs)
        for form, rows in FORMS.items():
            run = partial(_linear_error, quantization, form, rows)
            yield Case(f"{name}, {form}, {rows} tokens", run, 40.0)
    for tokens in TOKENS:
        yield Case(
            f"experts in bfloat16, {tokens} tokens", partial(_experts_error, None, tokens), 40.0
        )
        for name in OF_EXPERTS:
            run = partial(_experts_error, found[name], tokens)
            yield Case(f"experts in {name}, {tokens} tokens", run, 40.0)


def _linear_error(quantization: Quantization, form: str, rows: int) -> dict[str, Any]:
    w = _matrix(quantization, 0)
    x = _normal((rows, quantization.inputs), 1, 4 * quantization.inputs**-0.5)
    above = _normal((rows, quantization.outputs), 2, 8.0) if form == "residual" else None
    got = jax.jit(partial(linear, swiglu=form == "swiglu"))(x, w, residual=above)

    @jax.jit
    def exact(x: jax.Array, w: QuantizedWeight) -> jax.Array:
        y = jnp.matmul(x.astype(jnp.float32), float_rows(w).T, precision="highest")
        if form == "swiglu":
            gate, up = jnp.split(y, 2, axis=1)
            return jax.nn.silu(gate) * up
        return y if above is None else y + above.astype(jnp.float32)

    return _row(got, exact(x, w))


def _experts_error(quantization: Quantization | None, tokens: int) -> dict[str, Any]:
    width, inner = 512, 256
    shapes = ((2 * inner, width), (width, inner))
    if quantization is None:
        matrices = [_normal((EXPERTS, *shape), n, 0.5) for n, shape in enumerate(shapes)]
    else:
        matrices = [
            _matrix(
                dataclasses.replace(quantization, outputs=outputs, inputs=inputs, experts=EXPERTS),
                n,
            )
            for n, (outputs, inputs) in enumerate(shapes)
        ]
    rng = np.random.default_rng(3)
    chosen = np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :PER_TOKEN].astype(np.int32)
    weights = rng.random((tokens, PER_TOKEN), np.float32)
    x = _normal((tokens, width), 4, 4 * width**-0.5)
    mixed = (
        jax.jit(partial(mix_experts, implementation=implementation))(x, *matrices, chosen, weights)
        for implementation in ("auto", "reference")
    )
    return _row(*mixed)


def _row(got: jax.Array, exact: jax.Array) -> dict[str, Any]:
    got, exact = got.astype(jnp.float32), exact.astype(jnp.float32)
    error = float(jnp.abs(got - exact).max() / jnp.abs(exact).max())
    row: dict[str, Any] = {"right": error < TOLERANCE}
    return {**row, "error": error} if np.isfinite(error) else {**row, "failed": "not a number"}


def _normal(shape: tuple[int, ...], seed: int, size: float) -> jax.Array:
    """Return random bfloat16 numbers with this standard deviation."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jnp.asarray(size * values, jnp.bfloat16)


def _matrix(quantization: Quantization, seed: int) -> QuantizedWeight:
    """Return a matrix of random numbers of about 1."""
    rng = np.random.default_rng(seed)
    most = {"int4": 8, "int8": 128, "fp8": 128}[quantization.values]
    most *= 1 if quantization.group_scale is None else 128

    def random(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jnp.asarray(rng.uniform(1, 3, leaf.shape) / most, leaf.dtype)
        if leaf.dtype == jnp.int4:
            return jnp.asarray(rng.integers(-8, 8, leaf.shape, np.int8), jnp.int4)
        if leaf.dtype == jnp.int8:
            return jnp.asarray(rng.integers(-128, 128, leaf.shape, np.int8))
        # Two 4-bit values; or FP8 up to 60, whose bits are below 0x68 without the sign.
        low, sign = rng.integers(0, (0x68, 2), (*leaf.shape, 2), np.uint8).transpose()
        return jnp.asarray((low | sign << 7).transpose())

    return jax.tree.map(random, QuantizedWeight.abstract(quantization))
