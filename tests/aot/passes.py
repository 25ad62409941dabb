"""Kernels and bytes of a step by named scope, from its optimized HLO.

    python tests/aot/passes.py [--only TEXT] [--cublas] [--layers N] [--output FILE]

A kernel's bytes are a lower bound: for a gather or slice the size of the result, for a scatter the
written part. The lower bound of a part counts each array that crosses its border once: its inputs
from other parts, and its outputs for other parts.

Matrix products are listed but not counted, because XLA selects their kernels by measuring. The
cache that attention reads is not counted either, because its size depends on the contexts.
"""

import deviceless  # first, because jax reads its settings at import  # isort: skip

import argparse
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cuda_compile import BLOCKS, LLAMA_3_1_8B, SEQS, compile_step
from hlo import SIZES

from forge_jax.step.inputs import StepShape

NO_WORK = {"parameter", "get-tuple-element", "bitcast", "tuple", "constant", "opt-barrier"}
SLICES = {"gather", "slice", "dynamic-slice"}
IN_PLACE = {"scatter", "dynamic-update-slice"}
# Scopes that name a part; the innermost one counts.
PARTS = (
    "inputs", "rope_tables", "embed", "norm", "rope_write", "attention", "swiglu", "residual",
    "product", "final_norm", "rows", "sample", "fault", "changed", "bias", "penalties",
    "min_tokens", "greedy", "random", "filter", "top_k", "top_p", "logprobs",
)  # fmt: skip
BANDWIDTH = 4.0e12  # bytes/s
LAYER_BYTES = BLOCKS * 2 * LLAMA_3_1_8B.kv_heads * 64 * LLAMA_3_1_8B.head_dim * 2


@dataclass
class Instruction:
    name: str
    opcode: str
    sizes: list[int]  # bytes of each array
    operands: list[str]
    called: list[str]
    scope: str
    target: str  # of a custom call
    number: int  # of a parameter, or of a tuple's element

    @property
    def bytes(self) -> int:
        return sum(self.sizes)


@dataclass
class Computation:
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""


def parse(hlo: str) -> tuple[dict[str, Computation], Computation]:
    """Return all computations, and the entry."""
    computations: dict[str, Computation] = {}
    current = entry = Computation()
    for line in hlo.splitlines():
        header = re.match(r"(ENTRY )?%([\w.-]+) \(.*\{$", line)
        if header is not None:
            current = computations[header[2]] = Computation()
            entry = current if header[1] else entry
            continue
        made = re.match(r"\s+(ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$", line)
        if made is None:
            continue
        root, name, shape, opcode, rest = made.groups()
        arguments = rest.split("), ", 1)[0]
        scope = re.search(r'op_name="([^"]*)"', rest)
        target = re.search(r'custom_call_target="([^"]*)"', rest)
        number = re.search(r"\bindex=(\d+)", rest) or re.match(r"(\d+)\)", rest)
        current.instructions[name] = Instruction(
            name=name,
            opcode=opcode,
            sizes=[
                SIZES[kind] * math.prod(int(size) for size in dimensions.split(",") if size)
                for kind, dimensions in re.findall(r"(\w+)\[([\d,]*)\]", shape)
                if kind in SIZES
            ],
            operands=re.findall(r"%([\w.-]+)", arguments),
            called=re.findall(r"(?:calls|true_computation|false_computation)=%([\w.-]+)", rest),
            scope=scope[1] if scope else "",
            target=target[1] if target else "",
            number=int(number[1]) if number else 0,
        )
        if root:
            current.root = name
    return computations, entry


def used(fused: Computation) -> dict[int, float]:
    """Return the bytes that the computation reads of each parameter."""
    read: dict[str, float] = {}
    order = list(fused.instructions.values())
    for instruction in reversed(order):
        name, wanted = instruction.name, read.get(instruction.name, 0.0)
        if name == fused.root:
            wanted = instruction.bytes
        part = min(1.0, wanted / instruction.bytes) if instruction.bytes else 1.0
        for position, operand in enumerate(instruction.operands):
            source = fused.instructions.get(operand)
            if source is None:
                continue
            if position == 0 and instruction.opcode in IN_PLACE:
                continue
            if position == 0 and instruction.opcode in SLICES:
                count = wanted
            elif instruction.opcode in IN_PLACE:
                count = source.bytes
            else:
                count = part * source.bytes
            read[operand] = min(source.bytes, read.get(operand, 0.0) + count)
    return {i.number: read.get(i.name, 0.0) for i in order if i.opcode == "parameter"}


def written(i: Instruction, computations: dict[str, Computation]) -> dict[str, float]:
    """Return the bytes that a kernel writes, by array."""
    if i.opcode != "fusion":
        return {_element(i.name, n, len(i.sizes)): float(size) for n, size in enumerate(i.sizes)}
    fused = computations[i.called[0]]
    root = fused.instructions[fused.root]
    makers = [fused.instructions[o] for o in root.operands] if root.opcode == "tuple" else [root]
    writes = {}
    for n, maker in enumerate(makers):
        while maker.opcode == "bitcast":
            maker = fused.instructions[maker.operands[0]]
        size = maker.bytes
        if maker.opcode in IN_PLACE:
            size = fused.instructions[maker.operands[2 if maker.opcode == "scatter" else 1]].bytes
        writes[_element(i.name, n, len(makers))] = float(size)
    return writes


def _element(name: str, number: int, count: int) -> str:
    return name if count == 1 else f"{name}#{number}"


def multiplies(fused: Computation, computations: dict[str, Computation]) -> bool:
    return any(
        i.opcode == "dot" or any(multiplies(computations[name], computations) for name in i.called)
        for i in fused.instructions.values()
    )


@dataclass
class Kernel:
    part: str
    layer: int | None
    asked: bool  # runs only in steps in which a row requests it
    matrices: bool
    reads: dict[str, float]  # bytes, by array
    writes: dict[str, float]


def kernels(hlo: str) -> list[Kernel]:
    """Return all kernels of a program, including the branches of its conditions."""
    computations, entry = parse(hlo)
    return list(_kernels(entry, computations, "", "", False))


def _kernels(
    computation: Computation,
    computations: dict[str, Computation],
    branch: str,
    scope: str,
    asked: bool,
) -> Iterator[Kernel]:
    origin: dict[str, str] = {}  # through bitcasts and tuples
    for i in computation.instructions.values():
        given = [origin.get(operand, operand) for operand in i.operands]
        if i.opcode == "conditional":
            for n, name in enumerate(i.called):  # the true branch comes first
                below = (f"{branch}/{name}", i.scope or scope, asked or n == 0)
                yield from _kernels(computations[name], computations, *below)
        elif i.opcode == "get-tuple-element":
            origin[i.name] = f"{given[0]}#{i.number}"
        elif i.opcode in ("bitcast", "opt-barrier"):
            origin[i.name] = given[0]
        elif i.opcode == "parameter":
            origin[i.name] = f"{branch}:{i.name}"
        elif i.opcode not in NO_WORK:
            fused = computations[i.called[0]] if i.opcode == "fusion" else None
            counts = {} if fused is None else used(fused)
            reads: dict[str, float] = {}
            for position, (operand, source) in enumerate(zip(i.operands, given, strict=True)):
                size = float(computation.instructions[operand].bytes)
                if fused is None and size >= LAYER_BYTES:
                    size = 0.0  # the cache
                reads[source] = max(reads.get(source, 0.0), counts.get(position, size))
            path = i.scope if "/" in i.scope else scope
            names = [name for name in path.split("/") if name in PARTS]
            layer = re.search(r"layer_(\d+)", path)
            yield Kernel(
                part=" ".join(dict.fromkeys(names[-2:])) or "other",
                layer=int(layer[1]) if layer else None,
                asked=asked,
                matrices="cublas" in i.target
                or (fused is not None and multiplies(fused, computations)),
                reads=reads,
                writes=written(i, computations),
            )


@dataclass
class Row:
    part: str
    kernels: int = 0
    moved: float = 0.0  # bytes
    least: float = 0.0

    def less(self, other: "Row") -> "Row":
        return Row(
            self.part,
            self.kernels - other.kernels,
            self.moved - other.moved,
            self.least - other.least,
        )


def rows(program: list[Kernel], layer: int | None, asked: bool = False) -> dict[str, Row]:
    """Return the kernels and bytes of each part of one layer, or of the parts outside layers."""
    found: dict[str, Row] = {}

    def belongs(k: Kernel, part: str) -> bool:
        return (k.part, k.layer, k.asked) == (part, layer, asked)

    for part in dict.fromkeys(k.part for k in program if belongs(k, k.part)):
        own = [k for k in program if belongs(k, part)]
        others = [k for k in program if not belongs(k, part)]
        row = found[part] = Row(part, len(own))
        if any(k.matrices for k in own):
            continue
        row.moved = sum(sum(k.reads.values()) + sum(k.writes.values()) for k in own)
        made = {name: size for k in own for name, size in k.writes.items()}
        read: dict[str, float] = {}
        for k in own:
            for name, size in k.reads.items():
                if name not in made:
                    read[name] = max(read.get(name, 0.0), size)
        inside = {name for k in own for name in k.reads}
        outside = {name for k in others for name in k.reads}
        leaves = sum(s for name, s in made.items() if name in outside or name not in inside)
        row.least = sum(read.values()) + leaves
    return found


def table(program: list[Kernel], layers: int) -> str:
    first, last = rows(program, 0), rows(program, layers - 1)
    lines = [
        "| part | kernels | MB moved | least MB | moved / least | us at 4 TB/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for title, parts in (
        ("each layer", last),
        ("layers, once", {p: r.less(last[p]) for p, r in first.items() if p in last}),
        ("once", rows(program, None)),
        ("on demand", rows(program, None, asked=True)),
    ):
        for row in parts.values():
            if row.kernels > 0:
                lines.append(_line(f"{title}: {row.part}", row))
    return "\n".join(lines)


def _line(name: str, row: Row) -> str:
    if not row.moved:
        return f"| {name} | {row.kernels} | - | - | - | - |"
    figures = (
        f"{row.moved / 1e6:.2f}",
        f"{row.least / 1e6:.2f}",
        f"{row.moved / max(row.least, 1.0):.2f}",
        f"{1e6 * row.moved / BANDWIDTH:.1f}",
    )
    return f"| {name} | {row.kernels} | {' | '.join(figures)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--only", default="", help="steps whose names contain this")
    parser.add_argument("--cublas", action="store_true", help="all products by cuBLAS")
    parser.add_argument("--output", type=Path, help="write the tables there too")
    args = parser.parse_args()
    options = {"xla_gpu_enable_triton_gemm": False} if args.cublas else {}
    note = ", products by cuBLAS" if args.cublas else ""
    compiler, sections = deviceless.Compiler(), []
    for shape in (
        StepShape.decode(1),
        StepShape.decode(64),
        StepShape.decode(256),
        StepShape.mixed(512, SEQS, SEQS, 64),
    ):
        if args.only in shape.name:
            program = compile_step(compiler, shape, args.layers, options)
            section = f"## {shape.name}{note}\n\n{table(kernels(program.hlo), args.layers)}"
            print(section, flush=True)
            sections.append(section)
    if args.output is not None:
        args.output.write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    main()
