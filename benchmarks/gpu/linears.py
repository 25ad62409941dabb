"""Products with quantized matrices: time, and bytes/s of what must be read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu import predicted
from benchmarks.gpu.clock import seconds
from benchmarks.gpu.device import copy_bytes_per_s
from benchmarks.gpu.parts import Case
from forge_jax.step.options import compiler_options
from forge_jax.weights.formats import fused_values
from forge_jax.weights.ggml import BY_NAME
from forge_jax.weights.tensors import Values
from forge_kernels.linear import Quantization, QuantizedWeight, linear

OUTPUTS, INPUTS = 28672, 4096  # gate and up of Llama 3.1 8B
LAYERS = 8  # different matrices, more than any cache holds
TOKENS = (16, 1, 64, 256)  # the most important first
GGUF = ("Q4_K", "Q6_K", "Q8_0")


def linears(tiny: bool) -> Iterator[Case]:
    """Yield times by storage format and rows of x; unfused ones convert each matrix first."""
    fused = ("bfloat16", *quantizations(_fused(), tiny))
    first, *others = (4, 1) if tiny else TOKENS
    for name in fused:
        yield Case(f"{name}, {first} tokens", partial(_row, name, first, True, tiny), 30.0)
    for name in fused[1:]:
        run = partial(_row, name, first, False, tiny)
        yield Case(f"{name}, {first} tokens, unfused", run, 30.0)
    for tokens in others:
        for name in fused:
            yield Case(f"{name}, {tokens} tokens", partial(_row, name, tokens, True, tiny), 30.0)


def _fused() -> frozenset[Values]:
    return fused_values(jax.devices()[0])


def quantizations(fused: frozenset[Values], tiny: bool = False) -> dict[str, Quantization]:
    """Return the storage formats by name. The device converts `fused` values inside products."""
    outputs, inputs = (256, 512) if tiny else (OUTPUTS, INPUTS)

    def of(values: Any, group: int, **options: Any) -> Quantization:
        return Quantization(
            values=values,
            outputs=outputs,
            inputs=inputs,
            group=group,
            fused=values in fused,
            **options,
        )

    found = {
        "int4, groups of 128": of("int4", 128),
        "int4, groups of 128, zeros": of("int4", 128, zeros=True),
        "fp8, blocks of 128": of("fp8", 128, activations="fp8"),
        "fp8, per row, W8A8": of("fp8", inputs, activations="fp8"),
        "int8, per row": of("int8", inputs),
        "int8, per row, W8A8": of("int8", inputs, activations="int8"),
    }
    for name in GGUF:
        blocks = BY_NAME[name].blocks
        assert blocks is not None
        found[name] = Quantization.of_blocks(blocks, outputs, inputs, fused=blocks.values in fused)
    return found


def abstract(name: str, fused: frozenset[Values], tiny: bool = False) -> Any:
    """Return the shapes and types of a matrix."""
    if name == "bfloat16":
        shape = (256, 512) if tiny else (OUTPUTS, INPUTS)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return QuantizedWeight.abstract(quantizations(fused, tiny)[name])


@cache
def _ceiling(tiny: bool) -> float:
    return copy_bytes_per_s(tiny)


def _row(name: str, tokens: int, fused: bool, tiny: bool) -> dict[str, Any]:
    inputs = 512 if tiny else INPUTS
    one = abstract(name, _fused() if fused else frozenset(), tiny)
    matrices = [
        jax.tree.map(partial(_random, layer), one) for layer in range(2 if tiny else LAYERS)
    ]
    x = jnp.ones((tokens, inputs), jnp.bfloat16)
    platform = jax.devices()[0].platform
    options = compiler_options(platform, command_buffers=True, deterministic=False)

    @partial(jax.jit, compiler_options=options)
    def products(x: jax.Array, matrices: list[Any]) -> jax.Array:
        # Each product depends on all of the one before, so that XLA computes them all, in turn.
        y = jnp.zeros((), jnp.bfloat16)
        for w in matrices:
            y = linear(x + y, w).max() * jnp.bfloat16(0)
        return y

    each_s = seconds(lambda: products(x, matrices)) / len(matrices)
    num_bytes = sum(
        leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) // 8 for leaf in jax.tree.leaves(one)
    )
    rate = num_bytes / each_s
    expected = predicted.linear(name, tokens) if fused and not tiny else {}
    return {
        "us": 1e6 * each_s,
        **expected,
        "bytes": num_bytes,
        "bytes_per_s": rate,
        "of_copy": rate / _ceiling(tiny),
    }


def _random(layer: int, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Return random bits, or small floats, without an array of another type on the device."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.full(leaf.shape, 0.01 * (1 + layer), leaf.dtype)
    return random_values(np.random.default_rng(layer), leaf)


def random_values(rng: np.random.Generator, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Return random values of a quantized matrix: integers, or bits of FP8 without NaN."""
    if leaf.dtype == jnp.int4:
        return jnp.asarray(rng.integers(-8, 8, leaf.shape, np.int8), jnp.int4)
    if leaf.dtype == jnp.int8:
        return jnp.asarray(rng.integers(-128, 128, leaf.shape, np.int8))
    return jnp.asarray(rng.integers(0, 256, leaf.shape, np.uint8) & 0xEF)  # at most 120 in FP8
