"""Rounding a row of keys or values to 8 bits and a scale."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from forge_kernels.attention import quantized as quantized_file
from forge_kernels.attention.quantized import LARGEST, dequantize_rows, quantize_rows

TYPES = ("int8", "float8_e4m3fn")
D = 64

_quantize = jax.jit(quantize_rows, static_argnums=1)
_dequantize = jax.jit(dequantize_rows)


def rows_of_all_sizes(count: int = 4000) -> np.ndarray:
    """Return f32[count, D]: magnitudes from 1e-30 to 1e30, and some far smaller in each row."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((count, D)) * 10.0 ** rng.uniform(-30, 30, (count, 1))
    rows[::3] *= 10.0 ** rng.uniform(-5, 0, (len(rows[::3]), D))
    rows[::7, ::5] = 0.0
    return rows.astype(np.float32)


def quantize(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the data as float64."""
    data, scale = _quantize(rows, dtype)
    assert data.dtype == dtype
    assert scale.dtype == jnp.float32
    return np.asarray(data).astype(np.float64), np.asarray(scale)


def bits(array) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def check_error(dtype: str, dequantize=_dequantize) -> None:
    rows = rows_of_all_sizes()
    error = np.abs(np.asarray(dequantize(*_quantize(rows, dtype)), np.float64) - rows)
    step = quantize(rows, dtype)[1][:, None].astype(np.float64)
    if dtype == "int8":
        bound = step / 2
    else:  # 3 bits of mantissa down to 2**-6, then steps of 2**-9
        bound = np.maximum(np.abs(rows) * 2.0**-4, step * 2.0**-10)
    assert (error <= bound * (1 + 1e-5)).all(), f"{(error / bound).max():.4g} of the bound"


@pytest.mark.parametrize("dtype", TYPES)
def test_rounding_error_is_at_most_half_a_step(dtype):
    check_error(dtype)


def test_rounding_check_detects_values_one_step_off():
    with pytest.raises(AssertionError, match="3 of the bound"):
        check_error("int8", lambda data, scale: _dequantize(data - jnp.sign(data), scale))


@pytest.mark.parametrize("dtype", TYPES)
def test_whole_range_is_used_and_zero_stays_zero(dtype):
    rows = rows_of_all_sizes()
    data, _ = quantize(rows, dtype)
    np.testing.assert_array_equal(np.abs(data).max(axis=1), LARGEST[jnp.dtype(dtype)])
    assert (data[rows == 0] == 0).all()
    assert (data * rows >= 0).all(), "a sign has changed"


@pytest.mark.parametrize("dtype", TYPES)
def test_rounding_is_monotonic(dtype):
    rows = np.sort(rows_of_all_sizes(), axis=1)
    data, _ = quantize(rows, dtype)
    assert (np.diff(data, axis=1) >= 0).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_row_is_independent_of_its_neighbors(dtype):
    """The shape of the array in which it is rounded does not matter either."""
    rows = rows_of_all_sizes(300)
    data, scale = _quantize(rows, dtype)
    spoilt = rows.copy()
    spoilt[1::2] = np.nan
    others = _quantize(spoilt, dtype)
    np.testing.assert_array_equal(bits(others[0])[::2], bits(data)[::2])
    np.testing.assert_array_equal(others[1][::2], scale[::2])
    for shape in ((300, 1, 1, D), (3, 2, 50, D)):
        apart = _quantize(rows.reshape(shape), dtype)
        np.testing.assert_array_equal(bits(apart[0]).reshape(300, D), bits(data))
        np.testing.assert_array_equal(np.asarray(apart[1]).ravel(), scale)
    alone = [quantize_rows(jnp.asarray(row), dtype) for row in rows[:3]]
    np.testing.assert_array_equal(bits([d for d, _ in alone]), bits(data[:3]))
    np.testing.assert_array_equal([s for _, s in alone], scale[:3])


@pytest.mark.parametrize("dtype", TYPES)
def test_rounding_twice_equals_rounding_once(dtype):
    data, scale = _quantize(rows_of_all_sizes(), dtype)
    again = _quantize(_dequantize(data, scale), dtype)
    np.testing.assert_array_equal(bits(again[0]), bits(data))
    np.testing.assert_array_equal(again[1], scale)


def test_rounding_twice_drifts_with_a_full_precision_scale(monkeypatch):
    monkeypatch.setattr(quantized_file, "SCALE_MANTISSA_BITS", 23)
    fresh = jax.jit(partial(quantize_rows, dtype="int8"))
    data, scale = fresh(rows_of_all_sizes())
    assert (np.asarray(fresh(_dequantize(data, scale))[1]) != scale).any()


@pytest.mark.parametrize("dtype", TYPES)
def test_dequantized_value_is_the_exact_product(dtype):
    data, scale = quantize(rows_of_all_sizes(), dtype)
    read = np.asarray(_dequantize(data.astype(dtype), scale), np.float64)
    np.testing.assert_array_equal(read, data * scale[:, None].astype(np.float64))


def test_float8_may_be_stored_as_bits():
    every = np.arange(256, dtype=np.uint8)[:, None]
    scale = np.full(256, 0.5, np.float32)
    want = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * 0.5
    np.testing.assert_array_equal(_dequantize(every, scale), want)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-39, -1e-39])
def test_tiny_rows_become_zero(dtype, value):
    data, scale = quantize(np.full((2, D), value, np.float32), dtype)
    assert not data.any()
    assert not scale.any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("beside", [0.0, 1.0, 1e-39, 3e38])
def test_non_finite_row_dequantizes_to_nan(dtype, fault, beside):
    rows = np.full((3, D), beside, np.float32)
    rows[1, 5] = fault
    data, scale = _quantize(rows, dtype)
    assert np.isnan(np.asarray(_dequantize(data, scale))[1]).all()
    assert np.isfinite(scale)[[0, 2]].all()


def test_float16_and_bfloat16_are_widened_first():
    rows = np.random.default_rng(0).standard_normal((50, D)).astype(np.float32)
    for narrow in (jnp.bfloat16, jnp.float16):
        values = jnp.asarray(rows, narrow)
        got, want = _quantize(values, "int8"), _quantize(values.astype(jnp.float32), "int8")
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
