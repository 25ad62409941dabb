"""The contract of the CPU kernels' packed linear layer, written without jax.

`test_cpu_kernels.py` uses it, and so does `cpu_child.py` in processes with another instruction set,
with one CPU, or with a library built from faulty sources.

The oracle models the kernels' promises. The rounding of weights and activation rows is repeated in
numpy to the bit, and sums are in float64. The tolerance therefore covers only float32 sums and the
final rounding. A chain of n sums is off by about sqrt(n) units of roundoff of the sum of magnitudes
(Higham and Mary 2019).
"""

import ctypes
import hashlib
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from forge_kernels.cpu.library import library, num_threads
from forge_kernels.linear import FORMATS, PackedWeight, Packing, linear, pack
from forge_kernels.linear.packed import GROUP
from forge_kernels.linear.panels import PANEL

BF16 = np.dtype(ml_dtypes.bfloat16)
EPS = 1e-5
U32, U16 = 2.0**-24, 2.0**-8  # units of roundoff of float32 and bfloat16


def bf16(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32).astype(BF16)


def f32(x: np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


# ---- quantization and layout, slowly ------------------------------------------------------------


@dataclass(frozen=True)
class Quantized:
    """Integers and their scales: the weight [N, K] is `values * scale`, in groups along K."""

    values: np.ndarray  # i64[N, K], or the floats themselves
    scale: np.ndarray  # f32[N, groups]
    group: int

    @property
    def floats(self) -> np.ndarray:  # Return f64[N, K].
        scale = np.repeat(self.scale.astype(np.float64), self.group, axis=1)
        return self.values * scale[:, : self.values.shape[1]]


def quantize(w: np.ndarray, form: str) -> Quantized:
    """Round bf16[N, K] as the format does."""
    x = f32(w)
    if form == "bf16":
        return Quantized(x.astype(np.float64), np.ones((len(x), 1), np.float32), x.shape[1])
    if form == "int8":
        values, scale = quantize_rows(x)
        return Quantized(values, scale[:, None], x.shape[1])
    x = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))).reshape(len(x), -1, GROUP)
    at = np.abs(x).argmax(axis=2)[..., None]
    scale = (np.take_along_axis(x, at, 2) / np.float32(-8)).astype(np.float16)
    step = f32(scale)
    inverse = np.divide(1, step, out=np.zeros_like(step), where=step != 0)
    nibbles = np.floor(f32(x.astype(np.float64) * inverse + 8.5)).clip(0, 15)
    values = (nibbles.astype(np.int64) - 8).reshape(len(x), -1)[:, : w.shape[1]]
    return Quantized(values, step[..., 0], GROUP)


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round each row of f32[T, K] to the nearest of 255 steps: (i64[T, K], f32[T])."""
    top = np.abs(x).max(axis=1)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(x * inverse[:, None]).astype(np.int64), top / np.float32(127)


def slow_pack(w: np.ndarray, packing: Packing) -> tuple[np.ndarray, np.ndarray | None]:
    """Pack as described in formats.h."""
    N, K = w.shape
    if packing.paired:  # 16 gates, then their 16 ups
        order = np.full((packing.panels, 2, 16), -1)
        order[:, 0].flat[: N // 2] = np.arange(N // 2)
        order[:, 1].flat[: N // 2] = np.arange(N // 2, N)
    else:
        order = np.full((packing.panels, PANEL), -1)
        order.flat[:N] = np.arange(N)
    order = order.ravel()
    rows = np.where((order >= 0)[:, None], f32(w)[order], 0)
    unit = {"bf16": 2, "int8": 4, "int4": GROUP}[packing.format]
    q = quantize(bf16(np.pad(rows, ((0, 0), (0, -K % unit)))), packing.format)
    panels = q.values.reshape(packing.panels, PANEL, -1, unit)
    if packing.format == "bf16":
        return panels.transpose(0, 2, 1, 3).astype(BF16).view(np.uint16), None
    if packing.format == "int8":
        return (panels + 128).transpose(0, 2, 1, 3).astype(np.uint8), q.scale[:, 0]
    # [panel, half of the lanes, lane, group, half of the words, word, byte]
    nibbles = (
        (panels + 8).reshape(packing.panels, 2, 16, -1, 2, 4, 4).transpose(4, 0, 3, 5, 1, 2, 6)
    )
    packed = nibbles[0] | nibbles[1] << 4
    scale = np.ascontiguousarray(q.scale.T).astype(np.float16)
    return packed.reshape(packing.weight.shape).astype(np.uint8), scale


# ---- cases --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    form: str
    rows: int = 5
    outputs: int = 64
    inputs: int = 96
    norm: bool = False
    residual: bool = False
    swiglu: bool = False
    wide: bool = True  # the result in float32
    seed: int = 0

    @property
    def packing(self) -> Packing:
        return Packing(self.form, self.outputs, self.inputs, self.swiglu)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Arrays:
    x: np.ndarray  # bf16[T, K]
    w: np.ndarray  # bf16[N, K]
    norm: np.ndarray  # bf16[K]
    residual: np.ndarray  # bf16[T, N]


def make(case: Case) -> Arrays:
    rng = np.random.default_rng([case.seed, case.outputs, case.inputs])
    x = rng.standard_normal((case.rows, case.inputs)) * rng.uniform(0.5, 3, (case.rows, 1))
    w = rng.standard_normal((case.outputs, case.inputs)) * case.inputs**-0.5
    w[:, case.inputs // 2] *= 3  # so that ranges differ between groups
    w[case.outputs // 2] = 0
    norm = rng.uniform(0.5, 1.5, case.inputs)
    residual = rng.standard_normal((case.rows, case.outputs))
    return Arrays(bf16(x), bf16(w), bf16(norm), bf16(residual))


@partial(jax.jit, static_argnames=("norm", "residual", "swiglu", "wide"))
def _linear(x, w, scaling, added, num_rows, *, norm, residual, swiglu, wide):
    return linear(
        x,
        w,
        norm=(scaling, EPS) if norm else None,
        residual=added if residual else None,
        swiglu=swiglu,
        num_rows=num_rows,
        out_dtype=jnp.float32 if wide else None,
    )


def packed(case: Case, w: np.ndarray) -> PackedWeight:
    weight, scale = pack(w, case.packing)
    return PackedWeight(
        jnp.asarray(weight), None if scale is None else jnp.asarray(scale), case.packing
    )


def run(case: Case, arrays: Arrays, num_rows: int | None = None) -> np.ndarray:
    """Return the kernels' result as f32 of the first `num_rows` rows."""
    num_rows = len(arrays.x) if num_rows is None else num_rows
    y = _linear(
        arrays.x,
        packed(case, arrays.w),
        arrays.norm,
        arrays.residual,
        np.int32(num_rows),
        norm=case.norm,
        residual=case.residual,
        swiglu=case.swiglu,
        wide=case.wide,
    )
    assert y.dtype == (jnp.float32 if case.wide else jnp.bfloat16)
    return f32(np.asarray(y)[:num_rows])


def normalized(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return RMSNorm of bf16 rows as f32, rounded where Hugging Face rounds to bf16."""
    x = f32(x)
    scale = f32(1 / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + EPS))
    return f32(bf16(f32(bf16(x * scale)) * f32(weight)))


def expected(case: Case, arrays: Arrays, *, slips: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return (f64[T, N], the tolerance of the kernels).

    The norm's float32 sum has another order, so once in some thousand elements its result rounds to
    a neighbor. `slips` adds that to the tolerance.
    """
    x = normalized(arrays.x, arrays.norm) if case.norm else f32(arrays.x)
    w = quantize(arrays.w, case.form)
    largest = (np.abs(x)[:, None, :] * np.abs(w.floats)).max(axis=2)
    error = 2 * U16 * largest if slips else 0
    if case.form == "bf16":
        y = x.astype(np.float64) @ w.floats.T
        error = error + 4 * case.inputs**0.5 * U32 * (
            np.abs(x).astype(np.float64) @ np.abs(w.floats).T
        )
    else:
        steps, scale = quantize_rows(x)
        y = steps @ w.floats.T * scale[:, None]
        # A slip may be one step more. Within a group the products are exact.
        nudged = scale[:, None] * np.abs(w.floats).max(axis=1) if slips else 0
        groups = 3 + w.scale.shape[1]
        padded = np.pad(steps, ((0, 0), (0, -case.inputs % w.group)))
        values = np.pad(w.floats, ((0, 0), (0, -case.inputs % w.group)))
        parts = np.einsum(
            "tgk,ngk->tgn",
            padded.reshape(len(x), -1, w.group),
            values.reshape(len(values), -1, w.group),
        )
        magnitude = np.abs(parts).sum(axis=1) * scale[:, None]
        error = error + nudged + groups * U32 * magnitude
    if case.swiglu:
        (gate, up), (by_gate, by_up) = np.split(y, 2, axis=1), np.split(error, 2, axis=1)
        silu = gate / (1 + np.exp(-gate))
        y = silu * up
        # The slope of silu is at most 1.1; its own arithmetic is accurate to 16 units.
        error = 1.1 * by_gate * np.abs(up) + (np.abs(silu) + 1.1 * by_gate) * by_up
        error = error + 16 * U32 * np.abs(y)
    if case.residual:
        y = y + f32(arrays.residual)
        error = error + U32 * np.abs(y)
    if not case.wide:
        error = error + U16 * (np.abs(y) + error)
    return y, error + 1e-30


def check(case: Case) -> None:
    """Raise AssertionError if rounding does not explain the kernels' result."""
    arrays = make(case)
    out, (want, tolerance) = run(case, arrays), expected(case, arrays)
    assert out.shape == want.shape
    worst = (np.abs(out - want) / tolerance).max(axis=1)
    if case.norm and 0 < (worst > 1).sum() <= max(1, case.rows // 10):
        want, tolerance = expected(case, arrays, slips=True)
        worst = (np.abs(out - want) / tolerance).max(axis=1)
    assert (worst <= 1).all(), f"{case}: off by {worst.max():.3g} times the tolerance"


SHAPES = {  # outputs, inputs
    "whole panels": (64, 64),
    "three panels": (96, 128),
    "one element": (1, 1),
    "half a panel, one word": (16, 2),
    "odd K": (33, 7),
    "K of no whole group": (48, 36),
    "a tail of 15 columns": (95, 100),
    "a tail of 17 columns": (49, 34),
    "K one beyond": (64, 257),
    "K one short": (160, 1023),
}
OPTIONS = {
    "plain": {},
    "norm": {"norm": True},
    "residual": {"residual": True},
    "norm, swiglu": {"norm": True, "swiglu": True},
    "norm, residual, bf16": {"norm": True, "residual": True, "wide": False},
    "swiglu, bf16": {"swiglu": True, "wide": False},
}


def wide_outputs(threads: int) -> int:
    """Return the column count from which a thread takes two panels at a time, with few rows."""
    return 64 * threads * PANEL


def cases(form: str) -> dict[str, Case]:
    """Return by name: every shape, every option on a shape with tails, several tiles."""
    found = {
        name: Case(form, outputs=N, inputs=K, rows=1 + 3 * i % 7)
        for i, (name, (N, K)) in enumerate(SHAPES.items())
    }
    for name, options in OPTIONS.items():
        found[name] = Case(form, rows=7, outputs=86, inputs=99, **options)
        wide = wide_outputs(num_threads())
        found[f"{name}, wide tiles"] = Case(form, rows=3, outputs=wide, inputs=37, **options)
    found["many rows"] = Case(form, rows=130, outputs=200, inputs=99, norm=True, residual=True)
    return found


# ---- the bits of a row --------------------------------------------------------------------------


def invariance_case(form: str, option: str) -> Case:
    return Case(form, rows=40, outputs=200, inputs=99, **OPTIONS[option])


def check_invariance(case: Case) -> None:
    """Check that a row's bits are independent of the other rows, their number and its position."""
    arrays = make(case)
    whole = run(case, arrays)
    for rows in range(1, case.rows):
        np.testing.assert_array_equal(run(case, arrays, rows), whole[:rows], f"of {rows} rows")
    broad = replace(case, outputs=wide_outputs(num_threads()), inputs=37)
    mine = make(broad)
    every = run(broad, mine)
    for rows in range(1, 8):
        np.testing.assert_array_equal(run(broad, mine, rows), every[:rows], f"of {rows}, broad")
    order = np.random.default_rng(1).permutation(case.rows)
    moved = run(case, replace(arrays, x=arrays.x[order], residual=arrays.residual[order]))
    np.testing.assert_array_equal(moved, whole[order], "in another place")
    crowd = make(replace(case, rows=130, seed=1))
    for array, mine in ((crowd.x, arrays.x), (crowd.residual, arrays.residual)):
        array[50 : 50 + case.rows] = mine
    among = run(case, replace(arrays, x=crowd.x, residual=crowd.residual))
    np.testing.assert_array_equal(among[50 : 50 + case.rows], whole, "in a crowd")


def check_not_finite(case: Case) -> None:
    """Check that a non-finite value makes its row non-finite and leaves others unchanged."""
    arrays = make(case)
    clean, others = run(case, arrays), np.arange(case.rows) != 3
    for value in (np.nan, np.inf, -np.inf):
        for at in (0, case.inputs // 2, case.inputs - 1):
            x = arrays.x.copy()
            x[3, at] = value
            out = run(case, replace(arrays, x=x))
            assert not np.isfinite(out[3]).any(), f"{value} at {at}"
            np.testing.assert_array_equal(out[others], clean[others])


def check_fma_bits() -> None:
    """Check that without BF16, products are summed as a chain of FMAs in the order of k."""
    case = Case("bf16", rows=40, outputs=95, inputs=99)
    arrays = make(case)
    x, w = f32(arrays.x), f32(arrays.w)
    want = np.zeros((case.rows, case.outputs), np.float32)
    for k in range(
        case.inputs
    ):  # a product of two bfloat16 is exact, so this rounds as an FMA does
        want += x[:, k, None] * w[None, :, k]
    np.testing.assert_array_equal(run(case, arrays), want)


def check_tile_bits() -> None:
    """Check that tiles sum each 32 values of k separately: even and odd ones, then both."""
    case = Case("bf16", rows=40, outputs=95, inputs=99)
    arrays = make(case)
    x, w = (np.pad(f32(a), ((0, 0), (0, 29))).reshape(-1, 4, 16, 2) for a in (arrays.x, arrays.w))
    want = np.zeros((case.rows, case.outputs), np.float32)
    for step in range(4):
        sums = np.zeros((2, case.rows, case.outputs), np.float32)
        for k in range(16):
            for i in range(2):
                sums[i] += x[:, None, step, k, i] * w[None, :, step, k, i]
        want += sums[0] + sums[1]
    np.testing.assert_array_equal(run(case, arrays), want)


def check_tiles_by_shape() -> None:
    """Check that tiles are used from 64 rows of x on, whatever part of the rows is computed."""
    case = Case("bf16", rows=70, outputs=95, inputs=99)
    arrays = make(case)
    in_tiles = run(case, arrays)
    few = replace(arrays, x=arrays.x[:63], residual=arrays.residual[:63])
    library().forge_use_tiles(*(ctypes.c_int64(rows) for rows in (64, -1, -1)))
    try:
        for rows in (1, 16, 63, 70):
            np.testing.assert_array_equal(run(case, arrays, rows), in_tiles[:rows], f"{rows} rows")
        without = run(case, few)
        assert not np.array_equal(without, in_tiles[:63])
        for rows in (1, 16):
            np.testing.assert_array_equal(run(case, few, rows), without[:rows], f"{rows} of few")
    finally:
        library().forge_use_tiles(*(ctypes.c_int64(1) for _ in range(3)))


def digest(case: Case) -> str:
    return hashlib.sha256(run(case, make(case)).tobytes()).hexdigest()


def digests() -> dict[str, str]:
    """Return hashes for widths at which one thread takes two panels at a time, two threads one."""
    return {
        f"{form}, {option}": digest(
            replace(invariance_case(form, option), rows=rows, outputs=wide_outputs(1) + 2 * PANEL)
        )
        for form in FORMATS
        for option, rows in (("norm", 3), ("norm, swiglu", 40), ("residual", 130))
    }
