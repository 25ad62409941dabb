"""The GPU kernels' interface to Pallas' Mosaic GPU back end and its interpreter.

Pallas changes from one release of JAX to the next, so the kernels use it only through this file.
`interpreted` runs them on a CPU, with simulated memory, barriers and copies, and a race detector.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

ROWS = 64  # rows of a warpgroup's matrix product

# Type checkers see these as abstract classes, or as objects other than arrays.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform
_accumulator: Any = plgpu.WGMMAAccumulatorRef
_inline: Any = plgpu.inline_mgpu

_interpret: contextvars.ContextVar[plgpu.InterpretGPUParams | None] = contextvars.ContextVar(
    "interpret", default=None
)


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Run kernels that are traced in this context in the interpreter."""
    token = _interpret.set(plgpu.InterpretGPUParams(detect_races=detect_races))
    try:
        yield
    finally:
        _interpret.reset(token)


def interpreter() -> plgpu.InterpretGPUParams | None:
    """Return what `interpreted` has set; part of the key of cached traced functions."""
    return _interpret.get()


def launch(
    body: Callable[..., None],
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    name: str,
    grid: int,
    warpgroups: int,
    shared: Sequence[Any] = (),
    interpret: plgpu.InterpretGPUParams | None,
    by_lane: bool = False,
) -> list[jax.Array]:
    """Run `body(cta, warpgroup, inputs, outputs, shared)` on `grid` CTAs of `warpgroups`."""
    num_in, num_out = len(arrays), len(outputs)

    def entry(*refs):
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        inputs, results = refs[:num_in], refs[num_in : num_in + num_out]
        if not shared:
            body(cta, warpgroup, inputs, results, ())
            return

        def scoped(*allocated):
            body(cta, warpgroup, inputs, results, allocated)

        pl.run_scoped(scoped, *shared, collective_axes="warpgroup")

    call = plgpu.kernel(
        entry,
        out_type=list(outputs),
        grid=(grid,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=_Semantics.Lane if by_lane else _Semantics.Warpgroup,
        ),
        kernel_name=name,
        interpret=interpret,
    )
    return call(*arrays)


_Semantics = plgpu.LoweringSemantics


def matrix(shape: tuple[int, ...], dtype: DTypeLike, *, width: int = 128) -> Any:
    """Allocate shared memory for matrices [..., rows, columns] of the tensor cores and copies.

    Parts that are read or written start at a multiple of `width` bytes, a power of two.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = math.gcd(width, shape[-1] * itemsize)  # bytes
    if swizzle == 16:
        return plgpu.SMEM(shape, dtype)  # consecutive rows, each in other banks than its neighbors
    transforms = (_tiling((8, swizzle // itemsize)), _swizzle(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def vector(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    return plgpu.SMEM(shape, dtype)


def barriers(count: int, arrivals: int) -> Any:
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """Return f32[ROWS, n] or f32[ROWS] in registers, in the layout of a product's result."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def index(shape: tuple[int, int], axis: int) -> jax.Array:
    """Return i32[ROWS, n] of row or column numbers."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)


def row_index() -> jax.Array:
    """Return i32[ROWS] of row numbers."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=layout)


def column_index(size: int) -> jax.Array:
    """Return i32[size] of column numbers of a product's result."""
    layout = plgpu.Layout.WGMMA.reduce(0)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def columns(values: jax.Array, size: int) -> jax.Array:
    """Broadcast [ROWS] to [ROWS, size]."""
    return lax.broadcast_in_dim(values, (ROWS, size), (0,))


def rows(values: jax.Array) -> jax.Array:
    """Broadcast [n] to [ROWS, n]."""
    return lax.broadcast_in_dim(values, (ROWS, values.shape[0]), (1,))


def load_columns(ref: Any, *, device_memory: bool = False) -> jax.Array:
    """Load [n] from memory to registers, one per column of a product's result."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0), optimized=not device_memory)


def load_rows(ref: Any, *, device_memory: bool = False) -> jax.Array:
    """Load [ROWS] from memory to registers, one per row of a product's result."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=not device_memory)


def load_matrix(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA)


def convert(source: Any, target: Any, columns: int) -> None:
    """Convert [ROWS, D] in shared memory from 8 to 16 bits, `columns` at a time in registers."""
    of_fp8 = jnp.dtype(source.dtype) == jnp.float8_e4m3fn
    if source.shape[1] % 32:  # stored row by row, which cannot be split
        columns = source.shape[1]
    for column in range(0, source.shape[1], columns):
        part = (slice(None), pl.ds(column, min(columns, source.shape[1] - column)))
        values = plgpu.load(source.at[part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        if of_fp8 and target.dtype == jnp.bfloat16:  # the hardware converts to float16 only
            values = values.astype(jnp.float16).astype(jnp.float32)
        target.at[part][...] = values.astype(target.dtype)
    commit()


def convert_8_bits(source: Any, target: Any, capability: tuple[int, int]) -> None:
    """Convert [KV tile, D] in shared memory from 8 bits to bfloat16."""
    columns = source.shape[1]
    if columns % 32 == 0:  # otherwise stored row by row, which cannot be split
        columns = min(64 if columns <= 128 else 32, columns)
    for column in range(0, source.shape[1], columns):
        part = (slice(None), pl.ds(column, min(columns, source.shape[1] - column)))
        values = plgpu.load(source.at[part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
        if jnp.dtype(source.dtype) == jnp.float8_e4m3fn:
            values = values.astype(jnp.float16) if capability >= (8, 9) else _float8(values)
            values = values.astype(jnp.float32)
        elif capability < (9, 0):  # which have no conversion to bfloat16
            values = values.astype(jnp.float32)
        target.at[part][...] = values.astype(target.dtype)


def _float8(values: jax.Array) -> jax.Array:
    """Return float8_e4m3fn as f32 by integer operations; NaN becomes 480.

    Its bits, shifted, are those of a float16 that is 256 times smaller.
    """
    bits = lax.bitcast_convert_type(values, jnp.int8).astype(jnp.int32)
    halves = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    halves = lax.bitcast_convert_type(halves.astype(jnp.int16), jnp.float16)
    return halves.astype(jnp.float32) * 256.0


def times_transposed(
    a_ref: Any, b_ref: Any, meanwhile: Callable[[], None] = lambda: None
) -> jax.Array:
    """Return a[ROWS, D] @ b[n, D].T as f32[ROWS, n]; both are in shared memory.

    `meanwhile` runs while the tensor cores compute.
    """

    def product(acc):
        plgpu.wgmma(acc, a_ref, b_ref.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(product, _accumulator((ROWS, b_ref.shape[0]), jnp.float32))


def add_product(acc: jax.Array, a: jax.Array, b_ref: Any, interpret: Any) -> jax.Array:
    """Return acc f32[ROWS, D] + a[ROWS, n] @ b[n, D]; `a` is in registers, b in shared memory."""
    if interpret is not None:
        # The interpreter supports neither accumulators with a value nor operands in registers.
        acc = acc + jnp.dot(a, b_ref[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # orders this ordinary read before the next copy to the same memory
        return acc

    def product(acc_ref):
        plgpu.wgmma(acc_ref, a, b_ref)

    run: Any = pl.run_state(product)
    return run(_accumulator.init(acc))


def copy_width(rows: int, row_bytes: int, most: int) -> int | None:
    """Return the width in bytes of a matrix's parts, with which `cp.async` can copy `rows` rows.

    Parts have eight rows. The four warps copy four parts at a time, which must be in a column, in a
    row, or two by two. Return None if no width fits.
    """
    for width in (128, 64, 32):
        high, wide = rows // 8, row_bytes // width
        evenly = high % 4 == 0 or (high % 2 == 0 and wide % 2 == 0) or wide % 4 == 0
        if width <= most and row_bytes % width == 0 and evenly:
            return width
    return None


def load_left(ref: Any) -> jax.Array:
    """Load the left operand [ROWS, k] of `multiply_add` from device memory to registers."""
    return plgpu.load(ref, layout=plgpu.Layout.MMA_LHS(jnp.dtype(ref.dtype)), optimized=False)


def load_right(ref: Any) -> jax.Array:
    """Load the right operand [k, n] of `multiply_add` from shared memory to registers."""
    return plgpu.load(ref, layout=plgpu.Layout.MMA_RHS(jnp.dtype(ref.dtype)))


def load_right_transposed(ref: Any) -> jax.Array:
    """Load [n, k] as `load_right` loads [k, n]."""
    return load_right(ref.transpose((1, 0)))


def right_row_index(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Return i32[k, n] of row numbers in a right operand of `dtype`."""
    layout = plgpu.Layout.MMA_RHS(jnp.dtype(dtype))
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)


def as_left(a: jax.Array, interpret: Any) -> jax.Array:
    """Return 16-bit values [ROWS, k] in the layout of a product's result as a left operand."""
    if interpret is not None:
        return a
    layout = mgpu.MMALayouts(jnp.dtype(a.dtype), m_warps=4).lhs

    @_inline(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=plgpu.Layout.MMA_LHS(a.dtype)),
    )
    def relabel(_, a):
        # A thread has the same values in both layouts, in the same order.
        registers = a.registers.reshape(layout.registers_shape(a.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=a.is_signed)

    return relabel(a)


def multiply_add(acc: jax.Array, a: jax.Array, b: jax.Array, interpret: Any) -> jax.Array:
    """Return acc f32[ROWS, n] + a[ROWS, k] @ b[k, n], all in registers."""
    if interpret is not None:  # the interpreter does not simulate this instruction
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, a, b)


def synchronize() -> None:
    """Wait until the whole warpgroup is here, as `commit` does, before sm_90 too."""

    @_inline()
    def barrier(_):
        mgpu.warpgroup_barrier()

    barrier()


wait_copied_in = plgpu.wait_gmem_to_smem


def loop(low: Any, high: Any, step: Callable[[jax.Array], None]) -> None:
    def run(i, _):
        step(i)
        return jnp.int32(0)

    lax.fori_loop(low, high, run, jnp.int32(0))


def varying_zero(i: jax.Array) -> jax.Array:
    """Return 0, computed from a loop's index.

    The compiler moves constant loads and addresses before the loop, where they take registers that
    the loop needs. It cannot move values that depend on this one.
    """
    return lax.shift_right_arithmetic(i, jnp.int32(30))


def copy_in(source: Any, target: Any, barrier: Any | None) -> None:
    """Start a copy from device memory to shared memory."""
    if barrier is None:
        plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)
    else:
        plgpu.copy_gmem_to_smem(source, target, barrier)


copy_out = plgpu.copy_smem_to_gmem
commit = plgpu.commit_smem
wait = plgpu.barrier_wait
arrive = plgpu.barrier_arrive
set_max_registers = plgpu.set_max_registers


def load_slice(ref: Any) -> jax.Array:
    """Load a small matrix from device memory to registers, its elements spread over all threads."""
    return plgpu.load(ref, layout=_strided(ref.shape, ref.dtype), optimized=False)


def is_even(shape: tuple[int, int]) -> bool:
    """Return True if `load_slice` can spread a matrix of this shape evenly over all threads."""
    return math.prod(shape) % 128 == 0


def zero_slice(shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """Return zeros in the layout of `load_slice`."""
    return plgpu.layout_cast(jnp.zeros(shape, dtype), _strided(shape, dtype))


def store_slice(ref: Any, values: jax.Array) -> None:
    ref[...] = values


def rows_of(scalars: Sequence[jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Return f32[n, size] whose row i is scalar i, in the layout of `load_slice`."""
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_strided(shape, jnp.float32))
    values = jnp.where(row == 0, scalars[0], scalars[-1])
    for i, scalar in enumerate(scalars[1:-1], 1):
        values = jnp.where(row == i, scalar, values)
    return values


def _strided(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    per_thread = math.prod(shape) // 128
    return plgpu.Layout.WG_STRIDED(
        shape, vec_size=math.gcd(per_thread, 16 // jnp.dtype(dtype).itemsize)
    )


def wait_copied_out(*, read_only: bool = False) -> None:
    """Wait for this warpgroup's copies out; if `read_only`, until their source may change."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=read_only)
