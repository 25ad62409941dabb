"""The small array functions: against float32, and never on a slow path of XLA:CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forge_kernels.embed import embed
from forge_kernels.linear import linear
from forge_kernels.linear.reference import reference_linear
from forge_kernels.norm import layer_norm, rms_norm
from forge_kernels.rope import (
    apply_rope,
    inverse_frequencies,
    linear_scaling,
    llama3_scaling,
    rope_tables,
    yarn_attention_factor,
    yarn_scaling,
)

RNG = np.random.default_rng(0)


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_linear_multiplies_by_the_transpose(rows, dtype):
    x, w = normal(rows, 96, dtype=dtype), normal(40, 96, dtype=dtype)
    expected = reference_linear(x, w, out_dtype=jnp.float32)
    out = jax.jit(lambda x, w: linear(x, w, out_dtype=jnp.float32))(x, w)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    rounded = jax.jit(linear)(x, w)
    assert rounded.dtype == dtype and rounded.shape == (rows, 40)
    np.testing.assert_allclose(
        rounded.astype(jnp.float32), expected, rtol=1e-2 if dtype != "float32" else 1e-5, atol=1e-5
    )


def test_linear_rejects_mixed_types():
    with pytest.raises(TypeError, match="bfloat16 weights do not support activations of float32"):
        linear(normal(2, 8), normal(4, 8, dtype=jnp.bfloat16))


@pytest.mark.full_compile
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a trap of XLA:CPU")
@pytest.mark.parametrize("rows", [1, 16])
def test_linear_converts_no_weights(rows):
    """A float32 copy of the weights in the temporaries means that XLA:CPU left its fast path."""
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    temp = jax.jit(linear).lower(x, w).compile().memory_analysis().temp_size_in_bytes
    assert temp < 256 * 1024


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_embed_takes_rows_and_passes_gradients(dtype):
    table, tokens = normal(50, 8, dtype=dtype), jnp.asarray([3, 49, 3, 0])
    np.testing.assert_array_equal(jax.jit(embed)(table, tokens), np.asarray(table)[tokens])

    def total(table):
        return jnp.sum(embed(table, tokens).astype(jnp.float32) * jnp.arange(1.0, 5.0)[:, None])

    expected = np.zeros((50, 8))
    np.add.at(expected, np.asarray(tokens), np.arange(1.0, 5.0)[:, None])
    np.testing.assert_array_equal(np.asarray(jax.grad(total)(table), np.float64), expected)


@pytest.mark.full_compile
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a trap of XLA:CPU")
def test_embed_converts_no_table():
    table = jax.ShapeDtypeStruct((4096, 256), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((4,), jnp.int32)
    temp = jax.jit(embed).lower(table, tokens).compile().memory_analysis().temp_size_in_bytes
    assert temp < 64 * 1024


def test_rms_norm_rounds_before_it_multiplies_by_the_weight():
    x, weight = normal(3, 64, dtype=jnp.bfloat16), normal(64, dtype=jnp.bfloat16)
    x32 = np.asarray(x, np.float32)
    quotient = x32 / np.sqrt((x32 * x32).mean(axis=-1, keepdims=True) + 1e-5)
    expected = jnp.asarray(quotient, jnp.bfloat16) * weight[None]
    np.testing.assert_array_equal(rms_norm(x, weight, 1e-5), expected)
    exact = rms_norm(jnp.asarray(x32), weight.astype(jnp.float32), 1e-5)
    np.testing.assert_allclose(exact, quotient * np.asarray(weight, np.float32), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_is_rounded_once(dtype, has_bias):
    x, weight, bias = (normal(*shape, dtype=dtype) for shape in ((3, 64), (64,), (64,)))
    exact = [np.asarray(each, np.float64) for each in (3 + x, weight, bias)]
    centered = exact[0] - exact[0].mean(axis=-1, keepdims=True)
    expected = centered / np.sqrt((centered**2).mean(axis=-1, keepdims=True) + 1e-5) * exact[1]
    expected += exact[2] if has_bias else 0
    found = layer_norm(3 + x, weight, bias if has_bias else None, 1e-5)
    assert found.dtype == dtype
    rounding = {"atol": 1e-5} if dtype == jnp.float32 else {"rtol": 2**-8, "atol": 1e-5}
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, **rounding)


def test_rope_rotates_pairs_of_the_two_halves():
    x, positions = normal(3, 2, 8), jnp.asarray([0, 1, 700])
    cos, sin = rope_tables(positions, inverse_frequencies(8, 10000.0))
    out = apply_rope(x, cos, sin)
    angles = np.asarray(positions)[:, None] * 10000.0 ** -(np.arange(4) / 4)
    as_complex = (np.asarray(x)[..., :4] + 1j * np.asarray(x)[..., 4:]) * np.exp(1j * angles)[
        :, None
    ]
    np.testing.assert_allclose(out[..., :4], as_complex.real, atol=1e-4)
    np.testing.assert_allclose(out[..., 4:], as_complex.imag, atol=1e-4)
    np.testing.assert_array_equal(out[0], x[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_partial_rope_leaves_the_rest_of_the_head_as_it_is(dtype):
    x = normal(3, 2, 12, dtype=dtype)
    cos, sin = rope_tables(jnp.asarray([0, 1, 700]), inverse_frequencies(8, 10000.0))
    for interleaved in (False, True):
        out = apply_rope(x, cos, sin, interleaved=interleaved)
        whole = apply_rope(x[..., :8], cos, sin, interleaved=interleaved)
        np.testing.assert_array_equal(out[..., :8], whole)
        np.testing.assert_array_equal(out[..., 8:], x[..., 8:])
        assert out.dtype == x.dtype and (out[1:, :, :8] != x[1:, :, :8]).mean() > 0.5


def test_interleaved_rope_rotates_neighbors():
    x, positions = normal(3, 2, 8), jnp.asarray([0, 1, 700])
    cos, sin = rope_tables(positions, inverse_frequencies(8, 10000.0))
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # first the even numbers, then the odd ones
    halves = apply_rope(x[..., order], cos, sin)
    np.testing.assert_array_equal(apply_rope(x, cos, sin, interleaved=True)[..., order], halves)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones():
    theta, original = 10000.0, 4096
    frequencies = inverse_frequencies(64, theta)
    scale = dict(theta=theta, factor=8.0, original_max_position_embeddings=original)
    turns = original * frequencies / (2 * np.pi)
    for beta_fast, beta_slow in ((32.0, 1.0), (20.0, 3.0)):
        scaled = yarn_scaling(
            frequencies, beta_fast=beta_fast, beta_slow=beta_slow, truncate=False, **scale
        )
        fast, slow = turns > beta_fast, turns < beta_slow
        np.testing.assert_array_equal(scaled[fast], frequencies[fast])
        np.testing.assert_allclose(scaled[slow], frequencies[slow] / 8, rtol=1e-6)
        ratio = (scaled / frequencies)[~fast & ~slow]
        assert len(ratio) > 3
        np.testing.assert_allclose(np.diff(ratio, n=2), 0, atol=1e-6)  # linear in the pair
        whole = yarn_scaling(
            frequencies, beta_fast=beta_fast, beta_slow=beta_slow, truncate=True, **scale
        )
        assert (whole != scaled).any()
    assert yarn_attention_factor(1.0) == yarn_attention_factor(0.5) == 1.0
    assert yarn_attention_factor(4.0) == pytest.approx(0.1 * np.log(4) + 1)
    assert yarn_attention_factor(4.0, 0.5) == pytest.approx(0.05 * np.log(4) + 1)


def test_scaled_rope_frequencies_match_their_definition():
    frequencies = inverse_frequencies(128, 500000.0)
    np.testing.assert_allclose(linear_scaling(frequencies, 4.0), frequencies / 4, rtol=1e-6)
    scaled = llama3_scaling(
        frequencies,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    wavelength = 2 * np.pi / frequencies
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    np.testing.assert_array_equal(scaled[fast], frequencies[fast])
    np.testing.assert_allclose(scaled[slow], frequencies[slow] / 8, rtol=1e-6)
    between = ~fast & ~slow
    assert between.any()
    assert ((scaled > frequencies / 8) & (scaled < frequencies))[between].all()
