"""Compiles products with quantized matrices for five GPUs: part of `make test-cuda-compile`.

    python tests/aot/linears.py [--only TEXT] [--target TARGET] [--quick] [--output FILE]

Prints a table of temporary bytes. The exit code is 1 if a product writes its matrix as floats, or
if one does not that should. Before compute capability 9.0, that is FP8, unless both operands are.
The exit code is also 1 if few rows read other adapters than their own.
"""

from benchmarks.aot import deviceless  # first, because jax reads its settings at import  # isort: skip

import argparse
import re
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from each_target import run_each_target
from experts import bytes_read

from benchmarks.aot.hlo import large_results
from forge_jax.step.options import compiler_options
from forge_jax.step.targets import TARGETS
from forge_jax.weights.formats import fused_values
from forge_jax.weights.ggml import FORMATS
from forge_kernels.linear import Quantization, QuantizedWeight, linear
from forge_kernels.lora import lora

OUTPUTS, INPUTS = 28672, 4096  # gate and up of Llama 3.1 8B
TOKENS = (1, 16, 64, 256)
QUICK_TOKENS, QUICK_TARGETS = (16,), ("h200", "a100")
OF_TWO_FP8 = r"_0: f8e4m3fn\[[\d,]+\], \w+_1: f8e4m3fn\[|__cublas\$lt\$matmul\$f8"
PLACES, RANK, ADAPTER_ROWS = 64, 16, (1, 16, 32)


def quantizations(fused: Collection[str]) -> Iterator[tuple[str, Quantization]]:
    """Yield the storage formats by name, as the loaders make them for a GPU."""

    def of(values: Any, group: int, **options: Any) -> Quantization:
        return Quantization(
            values=values,
            outputs=OUTPUTS,
            inputs=INPUTS,
            group=group,
            fused=values in fused,
            **options,
        )

    yield "fp8, blocks of 128", of("fp8", 128, activations="fp8")
    yield "fp8, per row", of("fp8", INPUTS)
    yield "fp8, per row, W8A8", of("fp8", INPUTS, activations="fp8")
    yield "int8, per row", of("int8", INPUTS)
    yield "int8, per row, W8A8", of("int8", INPUTS, activations="int8")
    for group in (128, 32):
        yield f"int4, groups of {group}", of("int4", group)
        yield f"int4, groups of {group}, zeros", of("int4", group, zeros=True)
    kinds: dict[Any, str] = {}
    for format in FORMATS.values():
        if format.blocks is not None:
            kinds.setdefault(format.blocks.in_bytes, format.name)
    for blocks, name in kinds.items():
        yield name, Quantization.of_blocks(blocks, OUTPUTS, INPUTS, fused=True)


def compile_linear(
    compiler: deviceless.Compiler, quantization: Quantization, tokens: int
) -> deviceless.Program:
    x = jax.ShapeDtypeStruct((tokens, INPUTS), jnp.bfloat16)
    options = compiler_options("gpu", command_buffers=True, deterministic=False)
    return compiler(linear, x, QuantizedWeight.abstract(quantization), options=options)


def faults(program: deviceless.Program, *, converted: bool, fp8: bool) -> Iterator[str]:
    """Return the faults of one product.

    Args:
      converted: the matrix is known to be written.
      fp8: both operands must be FP8.
    """
    if fp8 and not re.search(OF_TWO_FP8, program.hlo):
        yield "does not multiply FP8 by FP8"
    written = list(large_results(program.hlo, OUTPUTS * INPUTS // 2))
    if bool(written) != converted:
        yield f"writes an array as large as the matrix: {written}" if written else "writes none"
    for kernel in program.kernels:
        if kernel.spilled:
            yield f"{kernel.name} spills {kernel.spilled} bytes of registers"


def adapter_faults(compiler: deviceless.Compiler, rows: int) -> Iterator[str]:
    """Return the faults of the adapters' products for few rows of a gate or up."""
    arrays = (
        jax.ShapeDtypeStruct((rows, INPUTS), jnp.bfloat16),
        jax.ShapeDtypeStruct((PLACES, RANK, INPUTS), jnp.bfloat16),
        jax.ShapeDtypeStruct((OUTPUTS // 2, PLACES, RANK), jnp.bfloat16),
    )
    place = jax.ShapeDtypeStruct((rows,), jnp.int32)
    options = compiler_options("gpu", command_buffers=True, deterministic=False)
    program = compiler(lora, *arrays, place, options=options)
    one = RANK * (INPUTS + OUTPUTS // 2) * 2
    read = bytes_read(program.hlo, {array.size * 2 for array in arrays[1:]})
    if read != rows * one:
        yield f"{read} bytes of adapters are read; {rows} rows need {rows * one}"
    yield from (
        f"writes adapters: {line}" for line in large_results(program.hlo, rows * RANK * INPUTS * 2)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="formats whose names contain this, or adapters")
    parser.add_argument("--target", choices=TARGETS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="two targets and one batch size")
    parser.add_argument("--output", type=Path, help="write the table of all targets there too")
    args = parser.parse_args()
    tokens = QUICK_TOKENS if args.quick else TOKENS
    if args.target is None:
        header = ["matrix", "device", *(f"temp MB, {count} tokens" for count in tokens)]
        sys.exit(run_each_target(header, args.output, QUICK_TARGETS if args.quick else TARGETS))
    compiler, failed, rows = deviceless.Compiler(target=args.target), False, 0
    fused = fused_values(compiler.target)
    for name, quantization in quantizations(fused):
        if args.only not in name:
            continue
        row, rows = [name, compiler.target.name], rows + 1
        fp8 = name == "fp8, per row, W8A8" and compiler.target.gpu.has_fp8
        converted = quantization.values not in fused and not fp8
        for count in tokens:
            program = compile_linear(compiler, quantization, count)
            row.append(f"{program.temp_bytes / 1e6:.1f}")
            # A product with one row is a reduction.
            for fault in faults(program, converted=converted, fp8=fp8 and count > 1):
                print(f"    FAULT: {args.target}, {name}, {count} tokens: {fault}", flush=True)
                failed = True
        print(f"| {' | '.join(row)} |", flush=True)
    for count in ADAPTER_ROWS if args.only in "adapters" else ():
        rows += 1
        for fault in adapter_faults(compiler, count):
            print(f"    FAULT: {args.target}, adapters, {count} rows: {fault}", flush=True)
            failed = True
    sys.exit(1 if failed or not rows else 0)


if __name__ == "__main__":
    main()
