"""Mixtures of experts for NVIDIA GPUs: a grouped matrix product in Pallas' Mosaic GPU back end.

The rows of x are gathered into tiles of one expert each (see `plan`). One thread block (CTA)
multiplies one tile by COLUMNS rows of its expert's matrix. Copies to shared memory run several
blocks of columns ahead. They are TMA from compute capability 9.0 on and `cp.async` before. Products
are `mma`, or `wgmma` on Hopper if a tile has 64 rows. CTAs of unused tiles return at once, so only
matrices of chosen experts are read.

The product with gates and ups multiplies a tile by both and applies SwiGLU. A second product
computes the outputs. XLA gathers and weights them. Quantized matrices are converted to floats
first, a chunk of experts at a time.

Tile size and order of summation depend on array shapes only, so a row's bits do not depend on other
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from forge_kernels.experts.plan import Geometry, Plan, make_plan
from forge_kernels.experts.xla import Matrices, chunk_of, num_experts, shape_of, some_experts
from forge_kernels.linear.quantized import QuantizedWeight, float_matrices, rounded_rows

COLUMNS = 64  # outputs of a CTA, or gates and as many ups
DEPTH = 64  # inputs per copy
STAGES = 4  # copies in shared memory
WGMMA_ROWS = 64

# Type checkers see these as abstract classes.
_tiling: Any = plgpu.TilingTransform
_swizzle: Any = plgpu.SwizzleTransform
_accumulator: Any = plgpu.WGMMAAccumulatorRef


def unsupported(outputs: int, inputs: int, dtype: DTypeLike) -> str | None:
    """Return why this kernel does not support such experts, or None if it does.

    Args:
      outputs: rows of an expert's down matrix, d.
      inputs: its columns, I.
      dtype: type of x and the matrices.
    """
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"x must be bfloat16 or float16, not {dtype}"
    if outputs % COLUMNS or inputs % COLUMNS:
        return f"sizes must be multiples of {COLUMNS}, not {outputs} and {inputs}"
    return None


def grouped_experts(
    x: jax.Array,  # bf16 or f16[T, d]
    gate_up: Matrices,  # [E, 2 I, d] of the same type, or `convertible` to it
    down: Matrices,  # [E, d, I]
    experts: jax.Array,  # i32[T, k]
    weights: jax.Array,  # f32[T, k]
    num_rows: jax.Array,  # i32[]
    *,
    capability: tuple[int, int],
    total: int | None = None,
    interpret: Any = None,
) -> jax.Array:  # [T, d] of x's type
    """Compute each pair of a token and its expert once, in tiles of one expert each."""
    geometry = Geometry(len(x), experts.shape[1], num_experts(gate_up), total)
    # Without the barrier, XLA computes the plan again in each kernel that uses it.
    plan = lax.optimization_barrier(make_plan(geometry, experts, num_rows))
    rows = x.at[plan.token].get(mode="clip")
    product = _Product(geometry, capability, interpret)
    inner = product(plan, rows, gate_up, paired=True, out_dtype=x.dtype)
    outputs = product(plan, inner, down, paired=False, out_dtype=jnp.float32)
    row = plan.row.astype(jnp.uint32)  # XLA computes nothing for negative numbers
    y = jnp.zeros(x.shape, jnp.float32)
    for j in range(experts.shape[1]):
        term = outputs.at[row[:, j]].get(mode="clip") * weights[:, j, None]
        if total is not None:  # pairs of other devices have no row
            term = jnp.where(experts[:, j, None] < geometry.experts, term, 0.0)
        y = y + term
    return y.astype(x.dtype)


# Traced and lowered once for all layers of a model.
jitted_experts = jax.jit(grouped_experts, static_argnames=("capability", "total", "interpret"))


@dataclass(frozen=True)
class _Product:
    geometry: Geometry
    capability: tuple[int, int]
    interpret: Any

    @property
    def wgmma(self) -> bool:
        return self.capability == (9, 0) and self.geometry.tile_rows == WGMMA_ROWS

    def __call__(
        self,
        plan: Plan,
        rows: jax.Array,  # [rows, K]
        w: Matrices,  # [E, N, K]
        **options: Any,
    ) -> jax.Array:  # [rows, N], or [rows, N / 2] if `paired`; unused tiles are undefined
        if not isinstance(w, QuantizedWeight):
            return self._multiply(plan.expert, rows, w, **options)
        rows = rounded_rows(rows, w)
        of_row = jnp.repeat(plan.expert, self.geometry.tile_rows)[:, None]
        count, outputs, inputs = shape_of(w)
        step = chunk_of(count, outputs * inputs * rows.dtype.itemsize)
        y: jax.Array | None = None
        for first in range(0, count, step):
            if y is not None:  # the floats of a chunk are freed before those of the next are made
                w, y = lax.optimization_barrier((w, y))
            floats = float_matrices(cast(QuantizedWeight, some_experts(w, first, step)), rows.dtype)
            part = self._multiply(plan.expert - first, rows, floats, **options)
            y = part if y is None else jnp.where(of_row >= first, part, y)
        assert y is not None
        return y

    def _multiply(
        self,
        experts: jax.Array,  # i32[num_tiles]; tiles without one of w's experts are not computed
        rows: jax.Array,  # [rows, K]
        w: jax.Array,  # [E, N, K]
        *,
        paired: bool,
        out_dtype: DTypeLike,
    ) -> jax.Array:
        count, outputs, inputs = w.shape
        outputs = outputs // 2 if paired else outputs
        blocks, height = outputs // COLUMNS, self.geometry.tile_rows
        steps = inputs // DEPTH
        delay = 1 if self.wgmma and steps > 1 else 0

        def entry(tile_experts, rows_ref, w_ref, out):
            cta = lax.axis_index("cta")
            tile, block = lax.div(cta, jnp.int32(blocks)), lax.rem(cta, jnp.int32(blocks))
            expert = tile_experts[tile]

            @pl.when((expert >= 0) & (expert < count))
            def _():
                parts = (block, block + blocks) if paired else (block,)
                specs = [_copies(height, rows.dtype, tile, delay)]
                specs += [_copies(COLUMNS, rows.dtype, part, delay) for part in parts]
                refs = (rows_ref, *(w_ref.at[expert] for _ in parts))
                multiply = self._by_wgmma if self.wgmma else self._by_mma
                sums = multiply(steps, specs, refs)
                result = _silu(sums[0]) * sums[1] if paired else sums[0]
                at = (pl.ds(tile * height, height), pl.ds(block * COLUMNS, COLUMNS))
                out.at[at][...] = result.astype(out_dtype)

        call = plgpu.kernel(
            entry,
            out_type=jax.ShapeDtypeStruct((self.geometry.rows, outputs), out_dtype),
            grid=(self.geometry.num_tiles * blocks,),
            grid_names=("cta",),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="forge_experts_gate_up" if paired else "forge_experts_down",
            interpret=self.interpret,
        )
        return call(experts, rows, w)

    def _by_wgmma(self, steps: int, specs: list[Any], refs: tuple[Any, ...]) -> list[jax.Array]:
        height = self.geometry.tile_rows

        def product(*sums):
            def step(_, rows, *parts):
                for acc, part in zip(sums, parts, strict=True):
                    plgpu.wgmma(acc, rows, part.transpose((1, 0)))
                plgpu.wgmma_wait(len(parts))  # waits for the products of the step before

            self._pipeline(step, steps, specs)(*refs)
            return [acc[...] for acc in sums]

        accumulator = _accumulator((height, COLUMNS), jnp.float32)
        return pl.run_scoped(product, *[accumulator] * (len(refs) - 1))

    def _by_mma(self, steps: int, specs: list[Any], refs: tuple[Any, ...]) -> tuple[jax.Array, ...]:
        height, dtype = self.geometry.tile_rows, refs[0].dtype
        warps = height // 16
        left = plgpu.Layout.MMA_LHS(dtype, m_warps=warps)
        right = plgpu.Layout.MMA_RHS(dtype, m_warps=warps)
        zero = jnp.zeros((height, COLUMNS), jnp.float32)
        zero = plgpu.layout_cast(zero, plgpu.Layout.MMA_ACC(dtype, m_warps=warps))

        def step(_, rows, *rest):
            *parts, sums = rest
            a = plgpu.load(rows, layout=left)
            added = tuple(
                self._add(acc, a, plgpu.load(part.transpose((1, 0)), layout=right))
                for acc, part in zip(sums, parts, strict=True)
            )
            if self.capability >= (9, 0) or self.interpret is not None:
                plgpu.commit_smem()  # orders these reads before the next copy to the same place
            return added

        sums = (zero,) * (len(refs) - 1)
        return self._pipeline(step, steps, specs, init_carry=sums)(*refs)

    def _add(self, acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return acc + a @ b."""
        if self.interpret is not None:  # the interpreter does not simulate this instruction
            return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return plgpu.mma(acc, a, b)

    def _pipeline(self, step: Any, steps: int, specs: list[Any], **options: Any) -> Any:
        stages = min(STAGES, steps)
        return plgpu.emit_pipeline(
            step, grid=(steps,), in_specs=specs, max_concurrent_steps=stages, **options
        )


def _copies(height: int, dtype: Any, index: jax.Array, delay: int) -> Any:
    """Describe the copies of [height, DEPTH] from row `index * height` on.

    A copy's place is used again `delay` steps after it is multiplied.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = DEPTH * itemsize
    while (height // 8) * (DEPTH * itemsize // swizzle) % 4:
        swizzle //= 2  # each of four warps copies whole parts of eight rows
    return plgpu.BlockSpec(
        (height, DEPTH),
        lambda step: (index, step),
        transforms=(_tiling((8, swizzle // itemsize)), _swizzle(swizzle)),
        delay_release=delay,
        oob_fill_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
    )


def _silu(x: jax.Array) -> jax.Array:
    return x / (1.0 + jnp.exp(-x))
