"""Products of a few rows with 4-bit matrices for NVIDIA GPUs, in Pallas' Mosaic GPU back end.

One thread block (CTA) multiplies TILE rows of the matrix by all rows of x. Copies of both to shared
memory run several steps ahead. They are TMA from compute capability 9.0 on and `cp.async` before.
The scales of the next step are loaded into registers meanwhile.

Values are multiplied as they are stored, by `mma`. The sum of each group is scaled in float32, so
no value is rounded. A second `mma` with ones adds up x, for the minima. The norm is computed by
XLA, but SwiGLU and residual are part of the kernel.

The order of summation depends on the matrix only, so the bits of a row do not depend on other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from forge_kernels.linear.blocks import MIDDLE
from forge_kernels.linear.tiles import DEPTH, MOST_ROWS, TILE

if TYPE_CHECKING:
    from forge_kernels.linear.quantized import Quantization, QuantizedWeight

STAGES = 6  # copies in shared memory
LANE = 8  # consecutive inputs that a lane multiplies
WORDS = 32  # inputs of four lanes
# Exclusive or of a 4-bit value and these bits is the float `value + offset`.
OFFSETS = {"bfloat16": (0x4308, 136.0), "float16": (0x6408, 1032.0)}
AND_XOR = (0xF0 & 0xCC) ^ 0xAA  # the truth table of (a & b) ^ c

# Type checkers see these as abstract classes.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform

NIBBLES = plgpu.Layout.WGMMA_UPCAST_4X  # LANE consecutive inputs of a row
BY_OUTPUT = plgpu.Layout.WGMMA_TRANSPOSED  # the transpose of sums, for rows in memory
# LANE consecutive inputs of a row of x^T.
INPUTS = plgpu.Layout.TILED(
    plgpu.Tiling(((WORDS, MOST_ROWS), (LANE, 1))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-3, -4),
    vector_dim=-2,
)


def few_rows_product(
    x: jax.Array,  # bf16 or f16[T, K]
    w: QuantizedWeight,  # [N, K]
    residual: jax.Array | None,  # [T, N]
    *,
    swiglu: bool,
    out_dtype: DTypeLike,
    capability: tuple[int, int],
    interpret: Any = None,
) -> jax.Array:  # [T, N], or [T, N / 2] with `swiglu`
    """Return `residual + swiglu(x w^T)`."""
    rows = len(x)
    padding = ((0, MOST_ROWS - rows), (0, 0))
    x = jnp.pad(x, padding)
    residual = None if residual is None else jnp.pad(residual, padding)
    kernel = _Kernel(w.quantization, x.dtype, len(x), swiglu, capability, interpret)
    return kernel(x, w, residual, out_dtype)[:rows]


# Traced and lowered once for all layers of a model.
jitted_product = jax.jit(
    few_rows_product, static_argnames=("swiglu", "out_dtype", "capability", "interpret")
)


@dataclass(frozen=True)
class _Kernel:
    quantization: Quantization
    dtype: Any
    rows: int
    swiglu: bool
    capability: tuple[int, int]
    interpret: Any

    @property
    def groups(self) -> int:
        return DEPTH // self.quantization.group

    def __call__(
        self, x: jax.Array, w: QuantizedWeight, residual: jax.Array | None, out_dtype: DTypeLike
    ) -> jax.Array:
        outputs = self.quantization.outputs // (2 if self.swiglu else 1)
        arrays = [a for a in (x, w.weight, w.scale, w.minimum, residual) if a is not None]
        minima = w.minimum is not None

        def entry(*refs):
            x_ref, w_ref, *factor_refs = refs[: 3 + minima]
            tile = lax.axis_index("cta")
            tiles = (tile, tile + outputs // TILE) if self.swiglu else (tile,)
            sums = [
                plgpu.layout_cast(part, BY_OUTPUT)
                for part in self._multiply(x_ref, w_ref, factor_refs, tiles)
            ]
            at = (slice(None), pl.ds(tile * TILE, TILE))
            y = _silu(sums[0]) * sums[1] if self.swiglu else sums[0]
            if residual is not None:
                above = plgpu.load(
                    refs[-2].at[at].transpose((1, 0)), layout=BY_OUTPUT, optimized=False
                )
                # The product is rounded before the sum, as in XLA.
                y = above.astype(jnp.float32) + y.astype(out_dtype).astype(jnp.float32)
            refs[-1].at[at].transpose((1, 0))[...] = y.astype(out_dtype)

        call = plgpu.kernel(
            entry,
            out_type=jax.ShapeDtypeStruct((self.rows, outputs), out_dtype),
            grid=(outputs // TILE,),
            grid_names=("cta",),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
            ),
            kernel_name="forge_linear_few_rows",
            interpret=self.interpret,
        )
        return call(*arrays)

    def _multiply(
        self, x_ref: Any, w_ref: Any, factor_refs: list[Any], tiles: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Return the sums of each tile of the matrix, f32[TILE, T]."""
        steps = self.quantization.inputs // DEPTH
        zero = plgpu.layout_cast(jnp.zeros((TILE, self.rows), jnp.float32), self._sums)

        def factors(step: jax.Array) -> list[list[jax.Array]]:
            columns = pl.ds(step * self.groups, self.groups)
            return [
                [
                    plgpu.load(
                        ref.at[pl.ds(tile * TILE, TILE), columns],
                        layout=factors_by_row(self.groups, ref.dtype),
                        optimized=False,
                    )
                    for ref in factor_refs
                ]
                for tile in tiles
            ]

        def step(index, x, *rest):
            *parts, (sums, current) = rest
            following = factors(jnp.minimum(index[0] + 1, steps - 1))
            words = [plgpu.load(part, layout=NIBBLES) for part in parts]
            for group in range(self.groups):
                right = self._right(x, group)
                sums = tuple(
                    self._add_group(s, w, right, f, group)
                    for s, w, f in zip(sums, words, current, strict=True)
                )
            if self.capability >= (9, 0) or self.interpret is not None:
                plgpu.commit_smem()  # orders these reads before the next copy to the same place
            return sums, following

        pipeline = plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[
                _copies(self.rows, self.dtype, 0),
                *(_copies(TILE, jnp.int4, t) for t in tiles),
            ],
            max_concurrent_steps=min(STAGES // len(tiles), steps),
            init_carry=((zero,) * len(tiles), factors(jnp.int32(0))),
        )
        return pipeline(x_ref, *(w_ref for _ in tiles))[0]

    def _add_group(
        self,
        sums: jax.Array,  # f32[TILE, T]
        words: jax.Array,  # s4[TILE, DEPTH]
        right: jax.Array,  # [group, T]
        factors: list[jax.Array],  # scales, and minima if there are any, [TILE, groups]
        group: int,
    ) -> jax.Array:
        size = self.quantization.group
        raised = len(factors) > 1
        left = self._left(words[:, group * size : (group + 1) * size], raised=raised)
        zero = plgpu.layout_cast(jnp.zeros((TILE, self.rows), jnp.float32), self._sums)
        dot = self._add(zero, left, right)
        scale, *minima = (
            lax.broadcast_in_dim(self._column(factor, group).astype(jnp.float32), sums.shape, (0,))
            for factor in factors
        )
        if minima:
            ones = plgpu.layout_cast(jnp.ones((TILE, size), self.dtype), self._layout("LHS"))
            total = self._add(zero, ones, right)
            sums = sums + total * minima[0]
            dot = dot + total * (MIDDLE - self._offset)
        return sums + dot * scale

    # ---- operands in registers -------------------------------------------------------------------
    #
    # `mma` gives each of four lanes two pairs of 16 inputs. A lane takes LANE consecutive inputs
    # instead, the same ones of x and of the matrix. The sum does not depend on their order.

    def _layout(self, operand: str) -> Any:
        return getattr(plgpu.Layout, f"MMA_{operand}")(self.dtype)

    @property
    def _sums(self) -> Any:
        return self._layout("ACC")

    def _add(self, acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return acc + a @ b."""
        if self.interpret is not None:  # the interpreter does not simulate this instruction
            return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(acc, a, b)

    def _right(self, x: Any, group: int) -> jax.Array:
        """Return a group of x^T, [group, T]."""
        size = self.quantization.group
        width = max(size, 64)  # width of a swizzle
        at = group * size
        part = x.at[:, pl.ds(at // width * width, width)].transpose((1, 0))
        loaded = plgpu.load(part, layout=INPUTS)[at % width : at % width + size]
        if self.interpret is not None:
            return loaded
        layout = self._layout("RHS")

        @plgpu.inline_mgpu(
            arg_types=(INPUTS,),
            return_type=plgpu.ShapeDtypeStruct(loaded.shape, self.dtype, layout=layout),
        )
        def pairs(_, array):
            made = _registers(layout, array.shape)
            fill_right(made, array.registers, mgpu.utils.vector_slice)
            return _array(made, layout)

        return cast(Any, pairs)(loaded)

    @property
    def _offset(self) -> float:
        return OFFSETS[jnp.dtype(self.dtype).name][1]

    def _left(self, words: jax.Array, *, raised: bool) -> jax.Array:
        """Return s4[TILE, group] as numbers of x's type, larger by the offset if `raised`."""
        if self.interpret is not None:
            numbers = words.astype(self.dtype)
            return numbers + jnp.array(self._offset, self.dtype) if raised else numbers
        layout = self._layout("LHS")

        @plgpu.inline_mgpu(
            arg_types=(NIBBLES,),
            return_type=plgpu.ShapeDtypeStruct(words.shape, self.dtype, layout=layout),
        )
        def converted(_, array):
            made = _registers(layout, array.shape)
            fill_left(made, array.registers, lambda v: _converted(v, self.dtype, raised))
            return _array(made, layout)

        return cast(Any, converted)(words)

    def _column(self, factors: jax.Array, group: int) -> jax.Array:
        """Return one column of [TILE, groups]."""
        if self.interpret is not None:
            return factors[:, group]
        layout = self._sums.reduce(1)
        by_row = factors_by_row(self.groups, factors.dtype)
        length = by_row.to_mgpu().vector_length

        @plgpu.inline_mgpu(
            arg_types=(by_row,),
            return_type=plgpu.ShapeDtypeStruct((TILE,), factors.dtype, layout=layout),
        )
        def column(_, array):
            made = _registers(layout, (TILE,))
            fill_column(made, array.registers, group, length, mgpu.utils.vector_slice)
            return _array(made, layout)

        return cast(Any, column)(factors)


def _converted(vector: Any, dtype: Any, raised: bool) -> list[Any]:
    """Return a register of eight 4-bit values as four of two floats."""
    i32 = ir.IntegerType.get_signless(32)
    low = mgpu.utils.bitcast(vector, i32)
    high = arith.shrui(low, mgpu.utils.c(4, i32))
    element = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
    pairs = []
    for pair in range(LANE // 2):
        register = llvm.inline_asm(i32, [low, high], conversion(pair, dtype, raised), "=r,r,r")
        pairs.append(mgpu.utils.bitcast(register, ir.VectorType.get((2,), element)))
    return pairs


def conversion(pair: int, dtype: Any, raised: bool) -> str:
    """Return PTX that makes two floats, $0, of a pair in a register, $1, and $2 = $1 >> 4."""
    name = jnp.dtype(dtype).name
    bits, offset = OFFSETS[name]
    kind = "bf16" if name == "bfloat16" else "f16"
    one = int(np.array(1.0, dtype).view(np.uint16)) * 0x10001
    minus = int(np.array(-offset, dtype).view(np.uint16)) * 0x10001
    lowered = f"fma.rn.{kind}x2 values, values, one, minus;"
    # Two values in the low bits of two halves, then their numbers plus the offset.
    return f"""
        {{
        .reg .b32 values, one, minus;
        mov.b32 one, {one:#x};
        mov.b32 minus, {minus:#x};
        prmt.b32 values, $1, $2, 0x0{pair + 4}0{pair};
        lop3.b32 values, values, 0x000F000F, {bits * 0x10001:#x}, {AND_XOR:#x};
        {"" if raised else lowered}
        mov.b32 $0, values;
        }}
        """


def fill_left(
    made: np.ndarray, registers: np.ndarray, pairs_of: Callable[[Any], Sequence[Any]]
) -> None:
    """Put the pairs of registers of NIBBLES into `made`, those of the left operand of `mma`."""
    for k in range(registers.shape[1]):
        for half, vector in enumerate(registers[0, k].flat):  # eight rows each
            for pair, floats in enumerate(pairs_of(vector)):
                made[0, 2 * k + pair // 2].reshape(-1)[2 * (pair % 2) + half] = floats


def fill_right(made: np.ndarray, registers: np.ndarray, part: Callable[[Any, slice], Any]) -> None:
    """Put the pairs of registers of INPUTS into `made`, those of the right operand of `mma`."""
    for k, n in np.ndindex(registers.shape[:2]):
        vector = registers[k, n].item()
        for pair in range(LANE // 2):
            place = made[2 * k + pair // 2, n].reshape(-1)
            place[pair % 2] = part(vector, slice(2 * pair, 2 * pair + 2))


def fill_column(
    made: np.ndarray,
    registers: np.ndarray,
    group: int,
    length: int,
    part: Callable[[Any, slice], Any],
) -> None:
    """Put a column of registers of `length` factors into `made`, for the rows of sums."""
    for half, vector in enumerate(registers[0, group // length].flat):
        at = group % length
        made.reshape(-1)[half] = part(vector, slice(at, at + 1))


def _registers(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)


def _array(registers: np.ndarray, layout: Any) -> Any:
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)


def factors_by_row(groups: int, dtype: Any) -> Any:
    """Lay out [TILE, groups] so that each lane has the factors of the rows of its sums."""
    length = min(groups, 16 // jnp.dtype(dtype).itemsize)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((TILE, length), (16, length), (8, length))),
        warp_dims=(-6,),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def _copies(height: int, dtype: DTypeLike, index: jax.Array | int) -> Any:
    """Describe the copies of [height, DEPTH] from row `index * height` on."""
    swizzle = 128
    return plgpu.BlockSpec(
        (height, DEPTH),
        lambda step: (index, step),
        transforms=(
            _tiling((8, 8 * swizzle // jax.dtypes.itemsize_bits(dtype))),
            _swizzle(swizzle),
        ),
        oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )


def _silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))
