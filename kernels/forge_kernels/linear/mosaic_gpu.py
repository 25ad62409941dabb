"""Products of a few rows with quantized matrices for NVIDIA GPUs, in Pallas' Mosaic GPU back end.

One thread block (CTA) multiplies TILE rows of the matrix by all rows of x. Copies of both to shared
memory run several steps ahead. They are TMA from compute capability 9.0 on and `cp.async` before.
The scales of the next step are loaded into registers meanwhile.

Values of 4 or 8 bits are multiplied without their scales, by `mma`. The sum of each group is scaled
in float32, so no value is rounded. For the minima, a second `mma` adds up x. SwiGLU and residual
are part of the kernel. XLA computes the norm.

The order of summation depends on the matrix only, so the bits of a row do not depend on other rows.
"""

from __future__ import annotations

import functools
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

Factors = list[list[jax.Array]]  # [TILE, n] per level, of the scales, and of any minima
STAGES = 6  # copies in shared memory
LANES = {"int4": 8, "int8": 4}  # consecutive inputs that a lane multiplies: 32 bits of the matrix
# Exclusive or of a 4-bit value and these bits is the float `value + offset`.
OFFSETS = {"bfloat16": (0x4308, 136.0), "float16": (0x6408, 1032.0)}
AND_XOR = (0xF0 & 0xCC) ^ 0xAA  # the truth table of (a & b) ^ c

# Type checkers see these as abstract classes.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform

BY_OUTPUT = plgpu.Layout.WGMMA_TRANSPOSED  # the transpose of sums, for rows in memory


def values_by_lane(lane: int) -> Any:
    """Lay out [TILE, K] so that each lane has `lane` consecutive inputs of a row."""
    width = 4 * lane
    return plgpu.Layout.TILED(
        plgpu.Tiling(((TILE, width), (16, width), (8, width), (lane,))),
        warp_dims=(-7,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def inputs_by_lane(lane: int) -> Any:
    """Lay out [K, MOST_ROWS] so that each lane has `lane` consecutive inputs of a row of x."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4 * lane, MOST_ROWS), (lane, 1))),
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
    def depth(self) -> int:
        """The inputs of a step."""
        return DEPTH[self.quantization.values]

    @property
    def groups(self) -> int:
        """The groups of a step."""
        return self.depth // self.quantization.group

    @property
    def lane(self) -> int:
        return LANES[self.quantization.values]

    def __call__(
        self, x: jax.Array, w: QuantizedWeight, residual: jax.Array | None, out_dtype: DTypeLike
    ) -> jax.Array:
        outputs = self.quantization.outputs // (2 if self.swiglu else 1)
        both = ((w.scale, w.group_scale), (w.minimum, w.group_minimum))
        levels = [[a for a in arrays if a is not None] for arrays in both]
        flat, structure = jax.tree.flatten([arrays for arrays in levels if arrays])

        def entry(*refs):
            x_ref, w_ref, *others = refs
            factor_refs = jax.tree.unflatten(structure, others[: len(flat)])
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
        return call(x, w.weight, *flat, *([] if residual is None else [residual]))

    def _multiply(
        self, x_ref: Any, w_ref: Any, factor_refs: list[list[Any]], tiles: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, ...]:
        """Return the sums of each tile of the matrix, f32[TILE, T].

        `factor_refs` lists the scales, and the minima if there are any: one array per level.
        """
        steps = self.quantization.inputs // self.depth
        zero = plgpu.layout_cast(jnp.zeros((TILE, self.rows), jnp.float32), self._sums)

        def factors(step: jax.Array) -> list[Factors]:
            def loaded(tile: jax.Array, ref: Any) -> jax.Array:
                size = self.quantization.inputs // ref.shape[1]  # inputs per factor
                columns = max(1, self.depth // size)
                at = step * columns if self.depth >= size else lax.div(step, size // self.depth)
                return plgpu.load(
                    ref.at[pl.ds(tile * TILE, TILE), pl.ds(at, columns)],
                    layout=factors_by_row(columns, ref.dtype),
                    optimized=False,
                )

            return [jax.tree.map(functools.partial(loaded, tile), factor_refs) for tile in tiles]

        def step(index, x, *rest):
            *parts, (sums, current) = rest
            following = factors(jnp.minimum(index[0] + 1, steps - 1))
            now = jax.tree.map(self._factor, current)
            words = [plgpu.load(part, layout=values_by_lane(self.lane)) for part in parts]
            for group in range(self.groups):
                right = self._right(x, group)
                sums = tuple(
                    self._add_group(s, w, right, f, group)
                    for s, w, f in zip(sums, words, now, strict=True)
                )
            if self.capability >= (9, 0) or self.interpret is not None:
                plgpu.commit_smem()  # orders these reads before the next copy to the same place
            return sums, following

        pipeline = plgpu.emit_pipeline(
            step,
            grid=(steps,),
            in_specs=[
                _copies(self.rows, self.depth, self.dtype, 0, swizzle=self.depth // 2),
                *(_copies(TILE, self.depth, w_ref.dtype, t) for t in tiles),
            ],
            max_concurrent_steps=min(STAGES // len(tiles), steps),
            init_carry=((zero,) * len(tiles), factors(jnp.int32(0))),
        )
        return pipeline(x_ref, *(w_ref for _ in tiles))[0]

    def _add_group(
        self,
        sums: jax.Array,  # f32[TILE, T]
        words: jax.Array,  # s4 or s8[TILE, depth]
        right: jax.Array,  # [group, T]
        factors: Factors,
        group: int,
    ) -> jax.Array:
        size = self.quantization.group
        raised = self.quantization.native and len(factors) > 1
        left = self._left(words[:, group * size : (group + 1) * size], raised=raised)
        zero = plgpu.layout_cast(jnp.zeros((TILE, self.rows), jnp.float32), self._sums)
        dot = self._add(zero, left, right)
        scale, *minima = (
            lax.broadcast_in_dim(
                functools.reduce(jnp.multiply, [self._column(level, group) for level in levels]),
                sums.shape,
                (0,),
            )
            for levels in factors
        )
        if minima:
            ones = plgpu.layout_cast(jnp.ones((TILE, size), self.dtype), self._layout("LHS"))
            total = self._add(zero, ones, right)
            sums = sums + total * minima[0]
            if raised:
                dot = dot + total * (MIDDLE - self._offset)
        return sums + dot * scale

    # ---- operands in registers -------------------------------------------------------------------
    #
    # `mma` gives each of four lanes two pairs of 16 inputs. A lane takes consecutive inputs
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
        width = max(size, self.depth // 4)  # one swizzle, or several
        at = group * size
        part = x.at[:, pl.ds(at // width * width, width)].transpose((1, 0))
        by_lane = inputs_by_lane(self.lane)
        loaded = plgpu.load(part, layout=by_lane)[at % width : at % width + size]
        if self.interpret is not None:
            return loaded
        layout = self._layout("RHS")

        @plgpu.inline_mgpu(
            arg_types=(by_lane,),
            return_type=plgpu.ShapeDtypeStruct(loaded.shape, self.dtype, layout=layout),
        )
        def pairs(_, array):
            made = _registers(layout, array.shape)
            fill_right(made, array.registers, self.lane, mgpu.utils.vector_slice)
            return _array(made, layout)

        return cast(Any, pairs)(loaded)

    @property
    def _offset(self) -> float:
        return OFFSETS[jnp.dtype(self.dtype).name][1]

    def _left(self, words: jax.Array, *, raised: bool) -> jax.Array:
        """Return s4 or s8[TILE, group] in x's type, larger by the offset if `raised`."""
        if self.interpret is not None:
            numbers = words.astype(self.dtype)
            return numbers + jnp.array(self._offset, self.dtype) if raised else numbers
        layout = self._layout("LHS")

        @plgpu.inline_mgpu(
            arg_types=(values_by_lane(self.lane),),
            return_type=plgpu.ShapeDtypeStruct(words.shape, self.dtype, layout=layout),
        )
        def converted(_, array):
            made = _registers(layout, array.shape)
            of_int4 = functools.partial(_pairs_of_int4, dtype=self.dtype, raised=raised)
            of_int8 = functools.partial(_pairs_of_int8, dtype=self.dtype)
            fill_left(made, array.registers, of_int4 if self.quantization.native else of_int8)
            return _array(made, layout)

        return cast(Any, converted)(words)

    def _factor(self, factors: jax.Array) -> jax.Array:
        """Return [TILE, n] as floats."""
        if factors.dtype != jnp.int8:
            return factors
        if self.interpret is not None:
            return factors.astype(jnp.bfloat16)
        count = factors.shape[1]
        layout = factors_by_row(count, jnp.bfloat16)

        @plgpu.inline_mgpu(
            arg_types=(factors_by_row(count, jnp.int8),),
            return_type=plgpu.ShapeDtypeStruct(factors.shape, jnp.bfloat16, layout=layout),
        )
        def converted(_, array):
            made = _registers(layout, array.shape)
            for index, register in np.ndenumerate(array.registers):
                words = (
                    mgpu.utils.vector_slice(register, slice(at, at + 4))
                    for at in range(0, count, 4)
                )
                pairs = [pair for word in words for pair in _pairs_of_int8(word, jnp.bfloat16)]
                made[index] = mgpu.utils.vector_concat(pairs)
            return _array(made, layout)

        return cast(Any, converted)(factors)

    def _column(self, factors: jax.Array, group: int) -> jax.Array:
        """Return the column of [TILE, n] for a group, f32[TILE]."""
        count = factors.shape[1]
        at = group * count // self.groups
        if self.interpret is not None:
            return factors[:, at].astype(jnp.float32)
        layout = self._sums.reduce(1)
        by_row = factors_by_row(count, factors.dtype)
        length = by_row.to_mgpu().vector_length

        @plgpu.inline_mgpu(
            arg_types=(by_row,),
            return_type=plgpu.ShapeDtypeStruct((TILE,), factors.dtype, layout=layout),
        )
        def column(_, array):
            made = _registers(layout, (TILE,))
            fill_column(made, array.registers, at, length, mgpu.utils.vector_slice)
            return _array(made, layout)

        return cast(Any, column)(factors).astype(jnp.float32)


def _pairs_of_int4(register: Any, dtype: Any, raised: bool) -> list[Any]:
    """Return a register of eight 4-bit values as four of two floats."""
    i32 = ir.IntegerType.get_signless(32)
    low = mgpu.utils.bitcast(register, i32)
    high = arith.shrui(low, mgpu.utils.c(4, i32))
    return [
        _two_floats([low, high], int4_to_float(pair, dtype, raised), dtype) for pair in range(4)
    ]


def _pairs_of_int8(register: Any, dtype: Any) -> list[Any]:
    """Return a register of four int8 values as two of two floats."""
    word = mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32))
    return [_two_floats([word], int8_to_float(pair, dtype), dtype) for pair in range(2)]


def _two_floats(operands: list[Any], ptx: str, dtype: Any) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    element = ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get()
    made = llvm.inline_asm(i32, operands, ptx, ",".join(["=r", *"r" * len(operands)]))
    return mgpu.utils.bitcast(made, ir.VectorType.get((2,), element))


def int8_to_float(pair: int, dtype: Any) -> str:
    """Return PTX that makes two floats, $0, of a pair of int8 values in a register, $1."""
    selector = f"0x4{2 * pair + 1}4{2 * pair}"  # bytes of the pair, each below a constant
    if dtype == jnp.bfloat16:
        # The float of 0x43 and a byte without its sign is 128 + the low 7 bits. That without the
        # low bits is 128, or 256 for a negative byte. The difference is the value.
        return f"""
            {{
            .reg .b32 values, low, high, minus;
            mov.b32 minus, {_twice(-1.0, dtype):#x};
            prmt.b32 values, $1, 0x43, {selector};
            and.b32 low, values, 0xFF7FFF7F;
            and.b32 high, values, 0xFF80FF80;
            fma.rn.bf16x2 $0, high, minus, low;
            }}
            """
    # The float of 0x64 and a byte is 1024 + the byte, here the value + 128.
    return f"""
        {{
        .reg .b32 values, one, minus;
        mov.b32 one, {_twice(1.0, dtype):#x};
        mov.b32 minus, {_twice(-1152.0, dtype):#x};
        xor.b32 values, $1, 0x80808080;
        prmt.b32 values, values, 0x64, {selector};
        fma.rn.f16x2 $0, values, one, minus;
        }}
        """


def int4_to_float(pair: int, dtype: Any, raised: bool) -> str:
    """Return PTX that makes two floats, $0, of a pair in a register, $1, and $2 = $1 >> 4."""
    bits, offset = OFFSETS[jnp.dtype(dtype).name]
    kind = "bf16" if dtype == jnp.bfloat16 else "f16"
    one, minus = _twice(1.0, dtype), _twice(-offset, dtype)
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


def _twice(value: float, dtype: Any) -> int:
    """Return the bits of a float of 16 bits in both halves of a register."""
    return int(np.array(value, dtype).view(np.uint16)) * 0x10001


def fill_left(
    made: np.ndarray, registers: np.ndarray, pairs_of: Callable[[Any], Sequence[Any]]
) -> None:
    """Put the pairs of registers of `values_by_lane` into `made`, the left operand of `mma`."""
    for k in range(registers.shape[1]):
        for half, vector in enumerate(registers[0, k].flat):  # eight rows each
            pairs = pairs_of(vector)
            for pair, floats in enumerate(pairs):
                place = made[0, len(pairs) // 2 * k + pair // 2].reshape(-1)
                place[2 * (pair % 2) + half] = floats


def fill_right(
    made: np.ndarray, registers: np.ndarray, lane: int, part: Callable[[Any, slice], Any]
) -> None:
    """Put the pairs of registers of `inputs_by_lane` into `made`, the right operand of `mma`."""
    for k, n in np.ndindex(registers.shape[:2]):
        vector = registers[k, n].item()
        for pair in range(lane // 2):
            place = made[lane // 4 * k + pair // 2, n].reshape(-1)
            place[pair % 2] = part(vector, slice(2 * pair, 2 * pair + 2))


def fill_column(
    made: np.ndarray,
    registers: np.ndarray,
    column: int,
    length: int,
    part: Callable[[Any, slice], Any],
) -> None:
    """Put a column of registers of `length` factors into `made`, for the rows of sums."""
    for half, vector in enumerate(registers[0, column // length].flat):
        at = column % length
        made.reshape(-1)[half] = part(vector, slice(at, at + 1))


def _registers(layout: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(layout.to_mgpu().registers_shape(shape), dtype=object)


def _array(registers: np.ndarray, layout: Any) -> Any:
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)


def factors_by_row(count: int, dtype: Any) -> Any:
    """Lay out [TILE, count] so that each lane has the factors of the rows of its sums."""
    length = min(count, 16 // jnp.dtype(dtype).itemsize)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((TILE, length), (16, length), (8, length))),
        warp_dims=(-6,),
        lane_dims=(-2, plgpu.Replicated(4)),
        vector_dim=-1,
    )


def _copies(
    height: int, depth: int, dtype: DTypeLike, index: jax.Array | int, swizzle: int = 128
) -> Any:
    """Describe the copies of [height, depth] from row `index * height` on."""
    return plgpu.BlockSpec(
        (height, depth),
        lambda step: (index, step),
        transforms=(
            _tiling((8, 8 * swizzle // jax.dtypes.itemsize_bits(dtype))),
            _swizzle(swizzle),
        ),
        oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )


def _silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))
