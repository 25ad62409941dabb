"""Matrices in blocks: the C++ kernels give the bits of bfloat16 matrices, plain XLA the values.

On rows rounded to int8, the kernels give the bits of their definition, as does a numpy reference.
`cpu_child.py` runs the same with the other set of instructions.
"""

import dataclasses
import hashlib
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from forge_kernels.blocks import IQ4_VALUES, Blocks, BlockValues
from forge_kernels.cpu.library import num_threads
from forge_kernels.embed import embed
from forge_kernels.linear import (
    BlockPacking,
    PackedWeight,
    Packing,
    Quantization,
    QuantizedWeight,
    arrange_blocks,
    linear,
    pack,
    pack_blocks,
)
from forge_kernels.linear import blocks as blocks_module
from forge_kernels.linear import quantized as quantized_module
from forge_kernels.linear.panels import PANEL

BF16 = np.dtype(ml_dtypes.bfloat16)
EPS = 1e-5
KINDS = {
    "8 bits": Blocks("int8", 32, 32),
    "8 bits with minima": Blocks("int8", 32, 32, minima=True),
    "8 bits, two levels": Blocks("int8", 16, 256),
    "8 bits, two levels, groups of 32": Blocks("int8", 32, 256),
    "8 bits, two levels with minima": Blocks("int8", 32, 256, minima=True),
    "6 bits": Blocks("int6", 32, 32),
    "6 bits with minima": Blocks("int6", 32, 32, minima=True),
    "6 bits, two levels": Blocks("int6", 16, 256),
    "6 bits, two levels with minima": Blocks("int6", 32, 256, minima=True),
    "4 bits": Blocks("int4", 32, 32),
    "4 bits with minima": Blocks("int4", 32, 32, minima=True),
    "4 bits, two levels": Blocks("int4", 16, 256),
    "4 bits, two levels with minima": Blocks("int4", 32, 256, minima=True),
    "4 bits, groups of 16 with minima": Blocks("int4", 16, 256, minima=True),
    "IQ4": Blocks("iq4", 32, 32),
    "IQ4, two levels": Blocks("iq4", 32, 256),
}
# A part of a row may end within a block. An odd number of 16-value blocks splits the last 32.
ROUNDED = {
    **KINDS,
    "8 bits, blocks of 16": Blocks("int8", 16, 16),
    "6 bits, blocks of 16": Blocks("int6", 16, 16),
    "4 bits, blocks of 32 with two levels and minima": Blocks("int4", 16, 32, minima=True),
}


def make(blocks: Blocks, outputs: int, inputs: int) -> BlockValues:
    """Return values in the ranges of GGUF's types, from which all floats follow exactly."""
    rng = np.random.default_rng([outputs, inputs])
    if blocks.values == "int4":
        low, high = (0, 16) if blocks.minima else (-8, 8)
    elif blocks.values == "int6":
        low, high = (0, 64) if blocks.minima else (-32, 32)
    elif blocks.values == "iq4":
        low, high = 0, 128
    elif blocks.two_levels:
        low, high = (0, 32) if blocks.minima else (-32, 32)
    else:
        low, high = (0, 32) if blocks.minima else (-128, 128)

    def numbers(least: int, most: int, width: int) -> np.ndarray:
        return rng.integers(least, most, (outputs, width)).astype(np.int8)

    def factors() -> np.ndarray:
        size = rng.standard_normal((outputs, inputs // blocks.size)) / (high * inputs**0.5)
        return size.astype(np.float16)

    values = numbers(low, high, inputs)
    if blocks.values == "iq4":
        values = IQ4_VALUES[values & 15]
    groups = inputs // blocks.group
    scales = (0, 64, groups) if blocks.minima else (-128, 128, groups)
    return BlockValues(
        values=values,
        factor=factors(),
        scale=numbers(*scales) if blocks.two_levels else None,
        minimum_factor=factors() if blocks.minima else None,
        minimum=numbers(*scales) if blocks.two_levels and blocks.minima else None,
    )


def reader(values: BlockValues):
    return lambda at: values.each(lambda array: array[at])


def packed(
    blocks: Blocks, values: BlockValues, paired: bool = False, *, rounded: bool = False
) -> PackedWeight:
    """Pack a matrix; `rounded` if it multiplies rows rounded to int8."""
    packing = BlockPacking(
        blocks, *values.values.shape, paired, activations="int8" if rounded else None
    )
    weight = pack_blocks(reader(values), packing)
    assert weight.shape == packing.weight.shape
    return PackedWeight(jnp.asarray(weight), None, packing)


def as_bfloat16(values: BlockValues, paired: bool = False) -> PackedWeight:
    packing = Packing("bf16", *values.values.shape, paired)
    return PackedWeight(jnp.asarray(pack(values.floats().astype(BF16), packing)[0]), None, packing)


def activations(rows: int, inputs: int) -> jax.Array:
    x = np.random.default_rng(rows).standard_normal((rows, inputs))
    return jnp.asarray(x.astype(BF16))


@jax.jit
def plain(x, w, num_rows):
    return linear(x, w, num_rows=num_rows, out_dtype=jnp.float32)


@jax.jit
def normed_swiglu(x, w, norm):
    return linear(x, w, norm=(norm, EPS), swiglu=True)


@jax.jit
def with_residual(x, w, residual):
    return linear(x, w, residual=residual)


def bits(y: jax.Array) -> np.ndarray:
    return np.asarray(y).view(np.uint8)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_bits_of_bfloat16_weights(kind, monkeypatch):
    monkeypatch.setattr(blocks_module, "CHUNK", 2 * PANEL * 512)  # packed in several parts
    check_exact(kind)


def check_exact(kind: str) -> None:
    """Check one row and many (which unpack panels), tails, two panels at a time, all epilogues."""
    blocks = KINDS[kind]
    for outputs, inputs in ((95, 256), (200, 512), (64 * num_threads() * PANEL, 256)):
        values = make(blocks, outputs, inputs)
        ours, theirs = packed(blocks, values), as_bfloat16(values)
        for rows in (1, 2, 6, 12, 13, 40):
            x, count = activations(rows, inputs), np.int32(rows)
            y = plain(x, ours, count)
            assert np.isfinite(y).all() and np.asarray(y).any()
            np.testing.assert_array_equal(bits(y), bits(plain(x, theirs, count)))
            np.testing.assert_array_equal(bits(plain(x, ours, np.int32(1))[:1]), bits(y[:1]))
    x = activations(7, 256)
    values = make(blocks, 140, 256)
    residual = activations(7, 140)
    both = packed(blocks, values), as_bfloat16(values)
    got, want = (with_residual(x, w, residual) for w in both)
    np.testing.assert_array_equal(bits(got), bits(want))
    ours, theirs = packed(blocks, values, paired=True), as_bfloat16(values, paired=True)
    got, want = (normed_swiglu(x, w, activations(1, 256)[0]) for w in (ours, theirs))
    np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.usefixtures("cpu_kernels")
def test_planted_fault_is_detected():
    """Plants one scale of one group, and one bit of one value."""
    blocks = KINDS["4 bits, two levels with minima"]
    values = make(blocks, 64, 256)
    right, x = packed(blocks, values), activations(3, 256)
    want = bits(plain(x, as_bfloat16(values), np.int32(3)))
    for at in (2 * 64 + 5, right.weight.shape[2] - 7):
        weight = np.array(right.weight)
        weight[1, 0, at] ^= 1
        wrong = PackedWeight(jnp.asarray(weight), None, right.packing)
        assert not np.array_equal(bits(plain(x, wrong, np.int32(3))), want)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_non_finite_row_stays_non_finite_and_isolated(kind, rounded):
    w = packed(KINDS[kind], make(KINDS[kind], 96, 256), rounded=rounded)
    x = np.array(activations(40, 256))
    clean = np.asarray(plain(jnp.asarray(x), w, np.int32(40)))
    others = np.arange(40) != 3
    for value in (np.nan, np.inf) if rounded else (np.nan,):
        x[3, 100] = value
        out = np.asarray(plain(jnp.asarray(x), w, np.int32(40)))
        assert not np.isfinite(out[3]).any()
        np.testing.assert_array_equal(out[others], clean[others])


# ---- rows rounded to int8 ------------------------------------------------------------------------


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of float32, rounded once."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c).astype(np.float32)


def rounded_product(x: np.ndarray, w: BlockValues, blocks: Blocks) -> np.ndarray:
    """Return f32[T, N] by the definition in `rounded.h`; x: f32[T, K]."""
    (rows, inputs), group = x.shape, blocks.group
    groups, together = inputs // group, 32 // group
    parts = np.pad(x, ((0, 0), (0, -inputs % 32))).reshape(rows, -1, 32)
    top = np.abs(parts).max(axis=2)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 1e-30)
    steps = np.rint(parts * inverse[..., None]).reshape(rows, -1)[:, :inputs]
    steps = steps.reshape(rows, groups, group).astype(np.int64)
    row_scale = (top / np.float32(127)).astype(np.float32)
    values = w.values.astype(np.int64).reshape(len(w.values), groups, group)

    def of_groups(factor: np.ndarray, numbers: np.ndarray | None) -> np.ndarray:
        wide = np.repeat(factor.astype(np.float32), groups // factor.shape[1], axis=1)
        return wide if numbers is None else wide * numbers.astype(np.float32)

    scale = of_groups(w.factor, w.scale)
    y = t = np.zeros((rows, len(values)), np.float32)
    for g in range(groups):
        of_row = row_scale[:, g // together, None]
        dots = (steps[:, g] @ values[:, g].T).astype(np.float32)
        first = g % together == 0
        t = dots * scale[:, g] if first else fused(dots, scale[:, g], t)
        if w.minimum_factor is not None:
            total = steps[:, g].sum(axis=1, keepdims=True).astype(np.float32)
            y = fused(of_groups(w.minimum_factor, w.minimum)[:, g], of_row * total, y)
        if (g + 1) % together == 0 or g + 1 == groups:
            y = fused(t, of_row, y)
    return y


def check_rounded(kind: str) -> None:
    """Check the bits of the definition for every number of rows, because rows are independent.

    One tile reads the weight directly; several use an unpacked panel.
    """
    blocks = ROUNDED[kind]
    shapes = [(95, 256), (160, 512)] if blocks.size > 16 else [(95, 48), (40, 16)]
    for outputs, inputs in shapes:
        values = make(blocks, outputs, inputs)
        x = np.array(activations(64, inputs))
        x[1, :32], x[2, 3], x[2, 40:48] = 0, 1e30, 1e-39
        want = rounded_product(x.astype(np.float32), values, blocks)
        w = packed(blocks, values, rounded=True)
        for rows in (1, 2, 3, 7, 8, 12, 13, 40, 64):
            got = np.asarray(plain(jnp.asarray(x), w, np.int32(rows)))[:rows]
            assert np.array_equal(got, want[:rows]), f"{kind}: {rows} rows, {outputs} x {inputs}"


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("kind", ROUNDED)
def test_products_with_rounded_rows_match_their_definition_bitwise(kind):
    check_rounded(kind)


@pytest.mark.usefixtures("cpu_kernels")
def test_fault_in_rounded_products_is_detected(monkeypatch):
    """A reference that sums groups in another order, or rounds once more, differs."""
    monkeypatch.setattr(f"{__name__}.fused", lambda a, b, c: a * b + c)
    with pytest.raises(AssertionError, match="1 rows"):
        check_rounded("8 bits")


@pytest.mark.usefixtures("cpu_kernels")
def test_epilogues_of_rounded_rows_stay_close():
    """Covers norm, SwiGLU and residual, within the error of rounding to 255 steps."""
    blocks = KINDS["8 bits, two levels"]
    values, x = make(blocks, 140, 256), activations(40, 256)
    residual = activations(40, 140)
    for paired, run in (
        (False, lambda w: with_residual(x, w, residual)),
        (True, lambda w: normed_swiglu(x, w, activations(1, 256)[0])),
    ):
        exact, rounded = (
            np.asarray(run(packed(blocks, values, paired, rounded=each)), np.float64)
            for each in (False, True)
        )
        assert 0 < np.linalg.norm(rounded - exact) < 0.02 * np.linalg.norm(exact)


def rounded_digests() -> dict[str, str]:
    """Return hashes in bfloat16 after norm and SwiGLU, which are equal for all instruction sets."""
    found = {}
    for kind, blocks in KINDS.items():
        w = packed(blocks, make(blocks, 320, 512), paired=True, rounded=True)
        y = normed_swiglu(activations(40, 512), w, activations(1, 512)[0])
        found[kind] = hashlib.sha256(bits(y).tobytes()).hexdigest()
    return found


def test_rows_are_rounded_only_if_the_kernels_can():
    with pytest.raises(ValueError, match="experts in blocks"):
        BlockPacking(KINDS["8 bits"], 64, 64, experts=2, activations="int8")
    with pytest.raises(ValueError, match="16 or 32 values for rounded activations, got 64"):
        BlockPacking(Blocks("int8", 64, 64), 64, 64, activations="int8")
    packing = BlockPacking(KINDS["8 bits"], 64, 64)
    rounded = dataclasses.replace(packing, activations="int8")
    assert packing.weight == rounded.weight and packing.format != rounded.format


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_values_rounded_once(kind, cpu_kernels):
    blocks = KINDS[kind]
    values = make(blocks, 70, 512)
    at = jnp.asarray([0, 1, 31, 32, 69, 5, 70, 2**31 - 1], jnp.int32)
    want = values.floats()[np.clip(np.asarray(at), 0, 69)]
    got = jax.jit(embed)(packed(blocks, values), at)
    np.testing.assert_array_equal(np.asarray(got, np.float32), want.astype(BF16).astype(np.float32))
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        rows = jax.jit(partial(embed, dtype=dtype))(quantized(blocks, values), at)
        assert rows.dtype == dtype
        np.testing.assert_array_equal(np.asarray(rows), want.astype(dtype))


def kept(blocks: Blocks, values: BlockValues) -> BlockValues:
    """Return the values that a fused matrix has."""
    quantization = Quantization.of_blocks(blocks, *values.values.shape, fused=True)
    return values.with_one_level() if quantization.combined else values


def quantized(blocks: Blocks, values: BlockValues, *, fused: bool = False) -> QuantizedWeight:
    quantization = Quantization.of_blocks(blocks, *values.values.shape, fused=fused)
    arrays = arrange_blocks(reader(values), quantization)
    total = sum(array.size * jax.dtypes.itemsize_bits(array.dtype) for array in arrays.values())
    total //= 8
    combined = values.values.size // blocks.group * 2 - values.values.size // blocks.size * 4
    assert total == values.values.size // blocks.size * blocks.in_bytes.bytes + (
        combined if quantization.combined else 0
    )
    none = {"zero": None, "input_scale": None}
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    return QuantizedWeight(**none, **arrays, quantization=quantization)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick_cases(6)
def test_plain_xla_multiplies_the_values(kind, dtype):
    blocks = KINDS[kind]
    values = make(blocks, 600, 512)
    w = quantized(blocks, values)
    exact = values.floats().astype(dtype).astype(np.float64)
    for rows in (1, 5):
        x = activations(rows, 512).astype(dtype)
        want = np.asarray(x, np.float64) @ exact.T
        got = np.asarray(plain(x, w, np.int32(rows)))
        assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick_cases(4)
def test_fused_products_multiply_the_values(kind):
    """A GPU computes the same, but also rounds the operands of the products."""
    blocks = KINDS[kind]
    values = make(blocks, 600, 512)
    w = quantized(blocks, values, fused=True)
    for rows in (1, 5):
        x = activations(rows, 512).astype(jnp.bfloat16)
        want = np.asarray(x, np.float64) @ kept(blocks, values).floats().astype(np.float64).T
        for product in (quantized_module._in_fusions, quantized_module._fused_product):
            got = np.asarray(product(x, w))
            assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.quick_cases(2)
def test_embed_reads_rows_of_fused_weights(kind):
    blocks = KINDS[kind]
    values = make(blocks, 40, 512)
    rows = jnp.array([3, 0, 39])
    got = embed(quantized(blocks, values, fused=True), rows, jnp.float32)
    np.testing.assert_allclose(
        got, kept(blocks, values).floats()[np.asarray(rows)], rtol=1e-5, atol=1e-6
    )


def test_combined_scales_are_finer_than_bfloat16():
    blocks = KINDS["4 bits, two levels with minima"]
    values = make(blocks, 64, 512)
    exact = values.floats()

    def error(floats: np.ndarray) -> float:
        return float(np.linalg.norm(floats - exact) / np.linalg.norm(exact))

    combined = error(values.with_one_level().floats())
    assert 0 < combined < 0.3 * error(exact.astype(BF16).astype(np.float32))


def test_combined_scales_above_float16_are_rejected():
    values = make(KINDS["4 bits, two levels with minima"], 4, 256)
    large = dataclasses.replace(values, factor=np.full_like(values.factor, 60000))
    with pytest.raises(ValueError, match="exceeds float16"):
        large.with_one_level()


def test_vocabulary_is_multiplied_in_parts(monkeypatch):
    """GPUs do so; here the parts are called directly."""
    w = quantized(KINDS["4 bits, two levels"], make(KINDS["4 bits, two levels"], 600, 512))
    x = activations(3, 512)
    whole = quantized_module._in_parts(x, w)
    monkeypatch.setattr(quantized_module, "PART", 256)
    parts = jax.jit(quantized_module._in_parts)(x, w)
    np.testing.assert_allclose(parts, whole, rtol=1e-5, atol=1e-5)


def test_embed_rejects_matrices_that_are_not_in_blocks():
    quantization = Quantization(values="int8", outputs=4, inputs=8, group=8)
    w = QuantizedWeight(jnp.zeros((4, 8), jnp.int8), jnp.ones((4, 1)), None, None, quantization)
    with pytest.raises(TypeError, match="not in blocks"):
        embed(w, jnp.zeros(1, jnp.int32), jnp.float32)
