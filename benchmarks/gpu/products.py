"""Checks of the products that Pallas kernels compute on a GPU, against plain XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import errors
from benchmarks.gpu.linears import quantizations, random_values
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
TOKENS = (4, 200)  # experts are multiplied pair by pair, and by the grouped kernel


def checks(tiny: bool) -> Iterator[Case]:
    """Yield checks of the kernel for few rows, then checks of experts."""
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

    return errors.row(got, exact(x, w), TOLERANCE)


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
    got, exact = (
        jax.jit(partial(mix_experts, implementation=implementation))(x, *matrices, chosen, weights)
        for implementation in ("auto", "reference")
    )
    return errors.row(got, exact, TOLERANCE)


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
        return random_values(rng, leaf)

    return jax.tree.map(random, QuantizedWeight.abstract(quantization))
