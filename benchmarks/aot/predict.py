"""Predict decode steps of one GPU, compiled without the GPU. Each GPU needs its own process."""

from __future__ import annotations

from benchmarks.aot import deviceless  # first, because jax reads its settings at import  # isort: skip

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.aot.attention import decode_attention
from benchmarks.aot.costs import NO_ATTENTION, Device, Totals, kernel_cost, step_cost
from benchmarks.aot.hlo import Kernel, kernels
from benchmarks.aot.steps import (
    BLOCK_SIZE,
    LLAMAS,
    MAX_BLOCKS,
    Q4_K_M,
    SEQS,
    Cache,
    StepOptions,
    compile_shared_step,
    compile_step,
    llama,
)
from forge_jax.errors import ConfigError
from forge_jax.models import build_model
from forge_jax.models.decoder import Model
from forge_jax.models.kv import element_dtype
from forge_jax.models.spec import ModelSpec
from forge_jax.step.inputs import StepShape
from forge_jax.step.options import compiler_options
from forge_jax.step.step_shapes import decode_sizes
from forge_jax.step.targets import Target
from forge_jax.weights.formats import WeightFormats, fused_values
from forge_jax.weights.partition import AXIS, possible_shards, shard_spec
from forge_kernels.linear import linear

ROUNDED = ("int8", "int4", "fp8")  # as in `--quantization`
MOST_GPUS = 8  # per host
MEMORY_PART = 0.9  # the default of `--memory-fraction`
RESERVED_BYTES = 1 << 30  # for temporary arrays and command buffers


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A step, which is predicted with each of `contexts`."""

    model: str
    quantization: str = "none"
    batch: int = 1
    contexts: tuple[int, ...] = (1024,)
    kv_dtype: str = "auto"
    layers: int | None = None  # default: all

    @property
    def name(self) -> str:
        kind = f"{self.model}, {self.quantization}, batch {self.batch}"
        return kind + ("" if self.kv_dtype == "auto" else f", {self.kv_dtype} cache")

    @property
    def unit(self) -> int:
        """Layers after which the types of the matrices repeat."""
        return 2 if self.quantization == Q4_K_M else 1

    def spec(self, layers: int | None = None) -> ModelSpec:
        count = layers or self.layers or LLAMAS[self.model].attention.layers
        return llama(count, self.quantization, self.model)

    def formats(self, target: Target) -> WeightFormats:
        rounded: Any = self.quantization if self.quantization in ROUNDED else None
        return WeightFormats(fused=fused_values(target), rounded=rounded)

    @property
    def shape(self) -> StepShape:
        """The engine's smallest decode step for the batch."""
        sizes = decode_sizes(1 << max(3, (self.batch - 1).bit_length()), "gpu")
        return StepShape.decode(next(size for size in sizes if size >= self.batch))


def predict(key: str, cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Return a row per cell and context."""
    target, rows = Target.read(key), []
    for cell in cells:
        print(f"{target.name}: {cell.name}", file=sys.stderr, flush=True)
        rows += predict_cell(target, key, cell)
    return rows


def predict_linears(key: str) -> list[dict[str, Any]]:
    """Return the times of the products that `benchmarks.gpu.linears` measures."""
    from benchmarks.gpu import linears

    compiler = deviceless.Compiler(target=key)
    fused, device = fused_values(compiler.target), Device.of(compiler.target)
    options = compiler_options("gpu", command_buffers=True, deterministic=False)
    rows = []
    for name in ("bfloat16", *linears.quantizations(fused)):
        for tokens in sorted(linears.TOKENS):
            x = jax.ShapeDtypeStruct((tokens, linears.INPUTS), jnp.bfloat16)
            matrix = linears.abstract(name, fused)
            program = compiler(linear, x, matrix, options=options)
            total = Totals()
            for kernel in kernels(program.hlo):
                total = total.plus(kernel_cost(kernel, device, NO_ATTENTION))
            rows.append(
                {
                    "device": compiler.target.key,
                    "matrix": name,
                    "tokens": tokens,
                    "kernels": round(total.kernels),
                    "moved_mb": 1e-6 * total.moved,
                    "predicted_us": 1e6 * total.seconds,
                }
            )
    return rows


def predict_cell(target: Target, key: str, cell: Cell) -> list[dict[str, Any]]:
    shards = count_gpus(target, cell)
    program = compile_cell(key, cell, 3 * cell.unit, shards)
    if (program.command_buffers, program.outside) != (1, ()):
        raise RuntimeError(f"the step is not one command buffer: {program.outside}")
    found = program_kernels(program, cell, 3 * cell.unit, shards)
    return [row_of(target, cell, found, context, shards) for context in cell.contexts]


def compile_cell(key: str, cell: Cell, layers: int, shards: int) -> deviceless.Program:
    compiler = deviceless.Compiler(shards, AXIS, key)
    options = StepOptions(
        compiler=compiler_options("gpu", command_buffers=True, deterministic=False, shards=shards),
        cache=_cache(cell),
        formats=cell.formats(compiler.target),
    )
    compile = compile_step if shards == 1 else compile_shared_step
    return compile(compiler, cell.shape, cell.spec(layers), options)


def program_kernels(
    program: deviceless.Program, cell: Cell, layers: int, shards: int
) -> list[Kernel]:
    spec = shard_spec(cell.spec(layers), shards)
    return kernels(program.hlo, _cache(cell).layer_bytes(spec))


def _cache(cell: Cell) -> Cache:
    blocks = max(MAX_BLOCKS, -(-max(cell.contexts) // BLOCK_SIZE))
    return Cache(dtype=cell.kv_dtype, max_blocks=blocks, seqs=max(SEQS, cell.batch))


def count_gpus(target: Target, cell: Cell) -> int:
    """Return the fewest GPUs that hold the weights and the cache.

    Raises:
      ConfigError: eight are not enough.
    """
    usable = MEMORY_PART * target.memory_bytes - RESERVED_BYTES
    spec, formats = cell.spec(), cell.formats(target)
    for shards in possible_shards(spec):
        if shards > MOST_GPUS:
            break
        model = build_model(spec, formats=formats, shards=shards)
        if model.param_bytes + kv_bytes(cell, shards, max(cell.contexts)) <= usable:
            return shards
    raise ConfigError(
        f"{cell.model} ({cell.quantization}, batch {cell.batch}, context {max(cell.contexts)}) "
        f"does not fit {MOST_GPUS} x {target.name}: use a smaller batch, context or quantization"
    )


def kv_bytes(cell: Cell, shards: int, context: int) -> float:
    """Return the bytes of the batch's keys and values on each GPU."""
    block = _cache(cell).shape(shard_spec(cell.spec(), shards)).block_bytes
    return cell.batch * context * block / BLOCK_SIZE


def weight_bytes(model: Model) -> float:
    """Return the bytes that each step must read: all but the rows of a separate embedding."""
    skipped = () if model.spec.tie_word_embeddings else ("embedding.",)
    return sum(
        leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) / 8
        for name, leaf in zip(model.names, model.leaves, strict=True)
        if not name.startswith(skipped)
    )


def row_of(
    target: Target, cell: Cell, found: list[Kernel], context: int, shards: int
) -> dict[str, Any]:
    """Return the figures of one prediction. Bytes and times are per GPU."""
    cost = cost_of(target, cell, found, context, shards)
    device = Device.of(target)
    model = build_model(cell.spec(), formats=cell.formats(target), shards=shards)
    least = weight_bytes(model) + kv_bytes(cell, shards, context)
    if cost.moved < least:
        raise RuntimeError(
            f"{cell.name}: {cost.moved:.4g} bytes are counted, but {least:.4g} are needed. The "
            "names of layers are missing in the compiled program."
        )
    floor_s = least / device.bandwidth
    return {
        "device": target.key,
        "gpu": target.name,
        "gpus": shards,
        "model": cell.model,
        "quantization": cell.quantization,
        "kv_dtype": cell.kv_dtype,
        "batch": cell.batch,
        "context": context,
        "step": cell.shape.name,
        "kernels": round(cost.kernels),
        "collectives": round(cost.collectives),
        "moved_gb": 1e-9 * cost.moved,
        "least_gb": 1e-9 * least,
        "busy_ms": 1e3 * cost.busy_s,
        "start_ms": 1e3 * cost.start_s,
        "collective_ms": 1e3 * cost.collective_s,
        "predicted_ms": 1e3 * cost.seconds,
        "floor_ms": 1e3 * floor_s,
        "of_floor": cost.seconds / floor_s,
    }


def compiled_cost(key: str, cell: Cell, layers: int, shards: int) -> Totals:
    """Return the cost of a step whose program has `layers` layers: all, or 3 * `cell.unit`."""
    target = Target.read(key)
    found = program_kernels(compile_cell(key, cell, layers, shards), cell, layers, shards)
    return cost_of(target, cell, found, max(cell.contexts), shards, compiled=layers)


def cost_of(
    target: Target,
    cell: Cell,
    found: list[Kernel],
    context: int,
    shards: int,
    *,
    compiled: int | None = None,
) -> Totals:
    """Return the cost of the step, extrapolated from `compiled` layers (default: 3 units)."""
    spec = cell.spec()
    whole = LLAMAS[cell.model].attention
    attention = decode_attention(
        dataclasses.replace(
            whole, heads=whole.heads // shards, kv_heads=max(1, whole.kv_heads // shards)
        ),
        target.gpu,
        batch=cell.batch,
        context=context,
        tokens=cell.shape.num_tokens,
        max_context=_cache(cell).max_blocks * BLOCK_SIZE,
        kv_dtype=element_dtype(cell.kv_dtype, spec.dtype),
    )
    return step_cost(
        found,
        Device.of(target),
        attention,
        layers=spec.num_hidden_layers,
        compiled=compiled or 3 * cell.unit,
        unit=cell.unit,
        shards=shards,
    )
