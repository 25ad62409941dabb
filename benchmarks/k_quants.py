"""Rounding of floats to the K and IQ4 types of GGUF, which the gguf package can only read.

Values are rounded to nearest, with scales from the largest values of each group. The losses
measured here are upper bounds, because llama.cpp searches for better scales. The blocks are equally
valid.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from forge_kernels.blocks import IQ4_VALUES

SIZE = 256


def rounded_rows(values: np.ndarray, kind: str) -> np.ndarray:
    """Round f32[n, K] to u8[n, bytes of a row] of any type, also those of the gguf package."""
    if kind in KINDS:
        return quantize(values, kind)
    import gguf

    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])


def quantize(values: np.ndarray, kind: str) -> np.ndarray:
    """Round f32[n, K] to u8[n, bytes of a row]; K is a multiple of 256."""
    blocks = values.astype(np.float32).reshape(-1, SIZE)
    return np.concatenate(KINDS[kind](blocks), axis=1).reshape(len(values), -1)


def _with_minima(
    x: np.ndarray, group: int, most: int, most_scale: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Round x[B, 256] to (values u8[B, 256], scales and minima u8[B, G], bytes of both factors)."""
    groups = x.reshape(len(x), -1, group)
    low = np.minimum(groups.min(axis=2), 0)
    scale, minimum = (np.maximum(groups.max(axis=2), 0) - low) / most, -low
    (d, scales), (dmin, minima) = (_in_steps(part, most_scale) for part in (scale, minimum))
    step = (_wide(d) * scales)[..., None]
    shifted = groups + (_wide(dmin) * minima)[..., None]
    numbers = np.rint(np.divide(shifted, step, out=np.zeros_like(groups), where=step > 0))
    return (
        _u8(numbers, most).reshape(x.shape),
        _u8(scales, most_scale),
        _u8(minima, most_scale),
        _bytes(d, dmin),
    )


def _in_steps(part: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Round f32[B, G] to (f16[B], integers up to `most` as f32[B, G])."""
    factor = (np.abs(part).max(axis=1) / most).astype(np.float16)
    wide = _wide(factor)
    return factor, np.rint(np.divide(part, wide, out=np.zeros_like(part), where=wide > 0))


def _without_minima(
    x: np.ndarray, half: int, most_scale: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Round x[B, 256] in groups of 16 to (values + half u8[B, 256], scales i8[B, 16], factors)."""
    groups = x.reshape(len(x), -1, 16)
    at = np.abs(groups).argmax(axis=2)[..., None]
    d, scales = _in_steps(np.take_along_axis(groups, at, 2)[..., 0] / -half, most_scale)
    step = (_wide(d) * scales)[..., None]
    numbers = np.rint(np.divide(groups, step, out=np.zeros_like(groups), where=step != 0))
    return _u8(numbers + half, 2 * half - 1).reshape(x.shape), scales.astype(np.int8), _bytes(d)


def _wide(factor: np.ndarray) -> np.ndarray:
    return factor.astype(np.float32)[:, None]


def _u8(numbers: np.ndarray, most: int) -> np.ndarray:
    return numbers.clip(0, most).astype(np.uint8)


def _bytes(*factors: np.ndarray) -> np.ndarray:
    return np.stack(factors, axis=1).view(np.uint8)


def _q2_k(x: np.ndarray) -> list[np.ndarray]:
    values, scales, minima, factors = _with_minima(x, 16, 3, 15)
    return [scales | minima << 4, _in_twos(values), factors]


def _in_twos(values: np.ndarray) -> np.ndarray:
    """Pack u8[B, 256] to u8[B, 64]: in each half, a byte holds four values that are 32 apart."""
    parts = (values & 3).reshape(len(values), 2, 4, 32)
    shifted = parts << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=2).reshape(len(values), 64)


def _in_bits(bits: np.ndarray) -> np.ndarray:
    """Pack 0 and 1 in u8[B, 256] to u8[B, 32]: a byte holds eight values that are 32 apart."""
    shifted = bits.reshape(len(bits), 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(shifted, axis=1)


def _q3_k(x: np.ndarray) -> list[np.ndarray]:
    values, scales, factors = _without_minima(x, 4, 31)
    six = (scales + 32).astype(np.uint8)
    low = six[:, :8] & 15 | (six[:, 8:] & 15) << 4
    high = (six >> 4).reshape(len(x), 4, 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    packed = [low, np.bitwise_or.reduce(high, axis=1)]
    return [_in_bits(values >> 2), _in_twos(values), *packed, factors]


def _sixes(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Pack u8[B, 8] of 6 bits each to u8[B, 12]."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4], axis=1)


def _nibbles(values: np.ndarray) -> np.ndarray:
    """Pack u8[B, 256] to u8[B, 128]: a byte holds two values that are 32 apart."""
    pairs = (values & 15).reshape(len(values), 4, 2, 32)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(len(values), 128)


def _q4_k(x: np.ndarray) -> list[np.ndarray]:
    values, scales, minima, factors = _with_minima(x, 32, 15, 63)
    return [factors, _sixes(scales, minima), _nibbles(values)]


def _q5_k(x: np.ndarray) -> list[np.ndarray]:
    values, scales, minima, factors = _with_minima(x, 32, 31, 63)
    return [factors, _sixes(scales, minima), _in_bits(values >> 4), _nibbles(values)]


def _q6_k(x: np.ndarray) -> list[np.ndarray]:
    values, scales, factors = _without_minima(x, 32, 127)
    quarters = values.reshape(len(x), 2, 4, 32)
    low = quarters & 15
    low = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(len(x), 128)
    return [low, _in_twos(values >> 4), scales.view(np.uint8), factors]


_IQ4 = IQ4_VALUES.astype(np.int64)
_IQ4_BORDERS = (_IQ4[1:] + _IQ4[:-1]) / 2  # midpoints between neighbors


def _sixteenths(groups: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Round f32[B, G, 32] by f32[B, G] to u8[B * G, 16]: low bits hold the first half."""
    wide = step[..., None]
    scaled = np.divide(groups, wide, out=np.zeros_like(groups), where=wide != 0)
    numbers = np.searchsorted(_IQ4_BORDERS, scaled).astype(np.uint8).reshape(-1, 2, 16)
    return numbers[:, 0] | numbers[:, 1] << 4


def _largest(groups: np.ndarray) -> np.ndarray:
    """Return the step f32[B, G] by which the largest value of each group becomes -127."""
    at = np.abs(groups).argmax(axis=2)[..., None]
    return np.take_along_axis(groups, at, 2)[..., 0] / _IQ4[0]


def _iq4_nl(x: np.ndarray) -> list[np.ndarray]:
    groups = x.reshape(len(x), 8, 32)
    d = _largest(groups).astype(np.float16)
    numbers = _sixteenths(groups, d.astype(np.float32))
    blocks = np.concatenate([_bytes(d.reshape(-1)), numbers], axis=1)
    return [blocks.reshape(len(x), -1)]


def _iq4_xs(x: np.ndarray) -> list[np.ndarray]:
    groups = x.reshape(len(x), 8, 32)
    d, scales = _in_steps(_largest(groups), 31)
    six = (scales + 32).astype(np.uint8)
    low = six[:, ::2] & 15 | (six[:, 1::2] & 15) << 4
    parts = (six >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16)
    high = np.bitwise_or.reduce(parts, axis=1).astype("<u2")[:, None].view(np.uint8)
    numbers = _sixteenths(groups, _wide(d) * scales)
    return [_bytes(d), high, low, numbers.reshape(len(x), -1)]


KINDS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
