"""Kernels and bytes of a step by named scope, from its optimized HLO.

    python tests/aot/passes.py [--only TEXT] [--cublas] [--layers N] [--output FILE]

A kernel's bytes are a lower bound: for a gather or slice the size of the result, for a scatter the
written part. The lower bound of a part counts each array that crosses its border once: its inputs
from other parts, and its outputs for other parts.

Matrix products are listed but not counted, because XLA selects their kernels by measuring. The
cache that attention reads is not counted either, because its size depends on the contexts.
"""

from benchmarks.aot import deviceless  # first, because jax reads its settings at import  # isort: skip

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.aot.hlo import Kernel, kernels
from benchmarks.aot.steps import SEQS, Cache, StepOptions, compile_step, llama
from forge_jax.step.inputs import StepShape

BANDWIDTH = 4.0e12  # bytes/s


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
            spec = llama(args.layers)
            program = compile_step(compiler, shape, spec, StepOptions(compiler=options))
            found = kernels(program.hlo, Cache().layer_bytes(spec))
            section = f"## {shape.name}{note}\n\n{table(found, args.layers)}"
            print(section, flush=True)
            sections.append(section)
    if args.output is not None:
        args.output.write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    main()
