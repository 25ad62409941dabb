"""Compiles the experts of Qwen3 30B-A3B for five GPUs: part of `make test-cuda-compile`.

    python tests/aot/experts.py [--only TEXT] [--target TARGET] [--quick] [--output FILE]

Prints a table. The exit code is 1 if a program reads experts that no token chose, copies their
matrices, spills registers or leaves the command buffer. The GPU kernel reads experts by its plan,
which `tests/kernels` counts.
"""

from benchmarks.aot import deviceless  # first, because jax reads its settings at import  # isort: skip

import argparse
import itertools
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from each_target import run_each_target
from jax.dtypes import itemsize_bits

from benchmarks.aot.hlo import large_results, parse, used
from forge_jax.step.options import compiler_options
from forge_jax.step.targets import TARGETS, Target
from forge_jax.weights.formats import fused_values
from forge_jax.weights.ggml import BY_NAME
from forge_kernels.experts import mix_experts
from forge_kernels.linear import Quantization, QuantizedWeight
from forge_kernels.linear.quantized import convertible

EXPERTS, PER_TOKEN, WIDTH, INNER = 128, 8, 2048, 768
MATRICES = ((EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
TOKENS = (1, 4, 16, 64, 512, 2048)
QUICK_TOKENS, QUICK_TARGETS = (4, 64), ("h200",)
KERNELS = 2  # calls per layer
CONVERTED_KERNELS = 6  # kernels if matrices are converted in chunks of 256 MiB
GRAPHS = {"xla_gpu_graph_min_graph_size": 1}  # a command buffer for any number of kernels
OPTIONS = compiler_options("gpu", command_buffers=True, deterministic=False) | GRAPHS
FUSED_TOKENS = 128  # limit of other formats; more tokens convert some experts at a time


def quantized(
    values: Any, group: int, target: Target, **options: Any
) -> tuple[QuantizedWeight, ...]:
    """Return gate_up and down as the loaders make them for a GPU."""
    return tuple(
        QuantizedWeight.abstract(
            Quantization(
                values=values, outputs=outputs, inputs=inputs, group=min(group, inputs),
                experts=EXPERTS, fused=values in fused_values(target), **options,
            )
        )
        for _, outputs, inputs in MATRICES
    )  # fmt: skip


def in_blocks(name: str, target: Target) -> tuple[QuantizedWeight, ...]:
    blocks = BY_NAME[name].blocks
    assert blocks is not None
    return tuple(
        QuantizedWeight.abstract(
            Quantization.of_blocks(
                blocks, outputs, inputs, EXPERTS, fused=blocks.values in fused_values(target)
            )
        )
        for _, outputs, inputs in MATRICES
    )


FORMATS: dict[str, Callable[[Target], tuple[Any, ...]]] = {
    "bfloat16": lambda _: tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in MATRICES),
    "fp8, blocks of 128": partial(quantized, "fp8", 128, activations="fp8"),
    "int8, per row, W8A8": partial(quantized, "int8", 2048, activations="int8"),
    "int4, groups of 128": partial(quantized, "int4", 128),
    "int4, groups of 128, zeros": partial(quantized, "int4", 128, zeros=True),
    "Q4_K": partial(in_blocks, "Q4_K"),
    "Q6_K": partial(in_blocks, "Q6_K"),
}


def compile_experts(
    compiler: deviceless.Compiler,
    tokens: int,
    mix: Callable[..., jax.Array] = mix_experts,
    format: str = "bfloat16",
) -> deviceless.Program:
    gate_up, down = FORMATS[format](compiler.target)
    return compiler(
        mix,
        jax.ShapeDtypeStruct((tokens, WIDTH), jnp.bfloat16),
        gate_up,
        down,
        jax.ShapeDtypeStruct((tokens, PER_TOKEN), jnp.int32),
        jax.ShapeDtypeStruct((tokens, PER_TOKEN), jnp.float32),
        options=OPTIONS,
    )


def expert_faults(
    program: deviceless.Program, tokens: int, layers: int = 1, format: str = "bfloat16"
) -> Iterator[str]:
    """Return the faults of a program.

    XLA may read the matrices of one expert per pair of a token and an expert. If these are many,
    only the GPU kernel may read matrices, or products of all experts that convert them. For more
    tokens, the kernel reads converted ones.
    """
    made = large_results(program.hlo, sys.maxsize, MATRICES)
    yield from (f"copies the experts' matrices: {line}" for line in made)
    calls = len(expert_calls(program))
    weights = [getattr(w, "weight", w) for w in FORMATS[format](program.target)]
    sizes = [w.size * itemsize_bits(w.dtype) // 8 for w in weights]
    read, one = bytes_read(program.hlo, set(sizes)), sum(sizes) / EXPERTS
    pairs, few = tokens * PER_TOKEN, tokens <= few_tokens(format)
    if calls and format != "bfloat16":
        if (read, calls) != (layers * sum(sizes), CONVERTED_KERNELS * layers):
            yield f"{read} bytes of experts' matrices are converted for {calls} calls"
    elif calls == KERNELS * layers:
        if read:
            yield f"{read} bytes of experts' matrices are read outside the kernel"
    elif calls:
        yield f"{calls} calls of the experts' kernels in {layers} layers"
    elif not few and (format == "bfloat16" or tokens > FUSED_TOKENS):
        yield f"no experts' kernels for {tokens} tokens"
    elif not few:
        if read != layers * sum(sizes):
            yield f"{read} bytes of experts' matrices are read, of {sum(sizes)}"
        pairs = EXPERTS
    elif read > 1.2 * layers * pairs * one:
        yield f"{read} bytes of experts' matrices are read; {pairs} pairs need {pairs * one}"
    elif read < layers * pairs * one:
        yield f"only {read} bytes of experts' matrices are read"
    if not calls:  # a gathered matrix must not be written
        limit = pairs * min(sizes) // EXPERTS
        made = large_results(program.hlo, limit)
        yield from (f"makes an array as large as a matrix: {line}" for line in made)


def few_tokens(format: str) -> int:
    """Return the tokens up to which XLA reads the matrices of each one's experts."""
    return EXPERTS // PER_TOKEN // (4 if format == "bfloat16" else 1)


def expert_calls(program: deviceless.Program) -> list[str]:
    """Return the calls of the experts' kernels."""
    calls = [line for line in program.hlo.splitlines() if 'custom_call_target="mosaic_gpu' in line]
    return [line for line in calls if "/forge_experts" in line]


def bytes_read(hlo: str, sizes: Collection[int]) -> float:
    """Return the bytes that XLA's instructions read of the parameters of these sizes.

    The kernels of Mosaic are not counted, because HLO does not show what they read.
    """
    computations, entry = parse(hlo)
    matrices = {
        i.name
        for i in entry.instructions.values()
        if i.opcode == "parameter" and len(i.sizes) == 1 and i.sizes[0] in sizes
    }
    total = 0.0
    for i in entry.instructions.values():
        if i.opcode == "bitcast" and i.operands[0] in matrices:
            matrices.add(i.name)
        elif i.opcode == "get-tuple-element":
            source = entry.instructions[i.operands[0]]
            if source.opcode == "tuple" and source.operands[i.number] in matrices:
                matrices.add(i.name)
        elif i.opcode == "tuple":  # tuple of a barrier, which reads nothing
            continue
        elif i.opcode != "parameter" and "mosaic" not in i.target:
            counts = used(computations[i.called[0]]) if i.opcode == "fusion" else {}
            for position, operand in enumerate(i.operands):
                if operand in matrices:
                    whole = float(entry.instructions[operand].bytes)
                    total += counts.get(position, whole)
    return total


def faults(program: deviceless.Program, tokens: int, format: str) -> Iterator[str]:
    yield from expert_faults(program, tokens, format=format)
    if (program.command_buffers, program.outside) != (1, ()):
        yield f"{program.command_buffers} command buffers, and {program.outside} outside of them"
    for kernel in program.kernels:
        if kernel.spilled:
            yield f"{kernel.name} spills {kernel.spilled} bytes of registers"
    for shared in program.shared_bytes:
        if shared > program.target.shared_limit:
            yield f"{shared} bytes of shared memory"


def row(program: deviceless.Program, name: str) -> list[str]:
    registers = [str(k.registers) for k in program.kernels if k.name.startswith("forge_")]
    shared = max(program.shared_bytes, default=0)
    temp = f"{program.temp_bytes / 1e6:.1f}"
    return [program.target.name, name, " / ".join(registers), str(shared), temp]


HEADER = ["device", "experts", "registers", "shared", "temp MB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--target", choices=TARGETS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="one target and two batch sizes")
    parser.add_argument("--output", type=Path, help="write the table of all targets there too")
    args = parser.parse_args()
    if args.target is None:
        sys.exit(run_each_target(HEADER, args.output, QUICK_TARGETS if args.quick else TARGETS))
    compiler, failed, rows = deviceless.Compiler(target=args.target), False, 0
    for tokens, format in itertools.product(QUICK_TOKENS if args.quick else TOKENS, FORMATS):
        name = f"{format}, {tokens} tokens"
        if args.only not in name or is_copied(format, tokens, compiler.target):
            continue
        program, rows = compile_experts(compiler, tokens, format=format), rows + 1
        print(f"| {' | '.join(row(program, name))} |", flush=True)
        for fault in faults(program, tokens, format):
            print(f"    FAULT: {fault}", flush=True)
            failed = True
    sys.exit(1 if failed or not rows else 0)


def is_copied(format: str, tokens: int, target: Target) -> bool:
    """Return True if XLA multiplies all experts, which it converts first, some at a time."""
    if format == "bfloat16":
        return False
    weights = FORMATS[format](target)
    if not all(w.quantization.fused for w in weights):
        return tokens > few_tokens(format)
    return tokens > FUSED_TOKENS and not all(map(convertible, weights))


if __name__ == "__main__":
    main()
