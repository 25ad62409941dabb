"""Compiles predicted steps again and compares them: part of `make test-cuda-compile`.

    python tests/aot/predictions.py [--quick] [--target TARGET] [--output FILE] [--page]

The exit code is 1 if a cell differs from the committed predictions by more than 1%. It is also 1 if
a step that is extrapolated from a few layers differs from one with more layers by more than 2%.
`--quick` compiles one cell only.

`--output` writes the predictions of the compiled targets to FILE instead, and keeps its other rows.
`--page` compiles nothing: it writes the committed predictions into docs/gpu.md.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import report as reports
from benchmarks.gpu.predictions import (
    MODELS,
    linears_on,
    markdown,
    new_report,
    page_tables,
    predict_on,
)

type Row = dict[str, Any]

TARGETS = ("h200", "b200", "a100", "l4", "rtx5090")  # in the order of docs/gpu.md
COMMITTED = Path(__file__).parents[2] / "benchmarks/results/2026-11-27-gpu-predictions.json"
QUANTIZATIONS, CONTEXTS = ("none", "int4", "Q4_K_M"), (1024, 8192)
# The steps that `python -m benchmarks.gpu` measures.
MEASURED = {
    "h200": [(16, "auto"), (64, "auto"), (128, "auto"), (256, "auto"), (64, "fp8"), (256, "fp8")]
}
PAGE = Path(__file__).parents[2] / "docs/gpu.md"
MARKS = (
    "<!-- predictions: written by `python tests/aot/predictions.py --page` -->\n",
    "<!-- end of predictions -->\n",
)
KEY = ("device", "model", "quantization", "kv_dtype", "batch", "context")
COMPARED = ("gpus", "kernels", "collectives", "moved_gb", "predicted_ms")
LINEAR_KEY = ("device", "matrix", "tokens")
LINEAR_COMPARED = ("kernels", "moved_mb", "predicted_us")
TOLERANCE = 0.01
EXTRAPOLATION_TOLERANCE = 0.02  # in one of two layers XLA may fuse one kernel more
QUICK = {"l4": ("llama-3.2-1b", "int4")}
# Layers of the compiled step, GPUs and quantization.
EXTRAPOLATED = ((8, 1, "none"), (8, 1, "Q4_K_M"), (8, 2, "int4"))


def cells(target: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the committed cells of a target."""
    for model, quantization in itertools.product(MODELS, QUANTIZATIONS):
        yield {"model": model, "quantization": quantization, "contexts": CONTEXTS}
    for batch, kv_dtype in MEASURED.get(target, ()):
        yield {"model": "llama-3.1-8b", "batch": batch, "kv_dtype": kv_dtype}


def faults(
    rows: list[Row],
    committed: list[Row],
    names: Sequence[str] = KEY,
    compared: Sequence[str] = COMPARED,
) -> Iterator[str]:
    """Return the figures that differ from the committed ones by more than the tolerance."""
    by_key = {tuple(row[name] for name in names): row for row in committed}
    for row in rows:
        key = tuple(row[name] for name in names)
        known = by_key.get(key)
        if known is None:
            yield f"{key}: not in {COMMITTED.name}"
            continue
        for name in compared:
            if abs(row[name] - known[name]) > TOLERANCE * known[name]:
                yield f"{key}: {name} is {row[name]:.6g}, committed: {known[name]:.6g}"


def extrapolation_faults(target: str) -> list[str]:
    """Return the steps whose extrapolated cost differs from that of all compiled layers."""
    from benchmarks.aot import predict

    found = []
    for layers, shards, quantization in EXTRAPOLATED:
        cell = predict.Cell(model="llama-3.1-8b", quantization=quantization, layers=layers)
        short = predict.compiled_cost(target, cell, 3 * cell.unit, shards)
        whole = predict.compiled_cost(target, cell, layers, shards)
        for name in ("kernels", "collectives", "moved", "seconds"):
            was, should = getattr(short, name), getattr(whole, name)
            if abs(was - should) > EXTRAPOLATION_TOLERANCE * should:
                found.append(f"{cell}, {shards} GPUs: {name} is {was:.6g}, not {should:.6g}")
    return found


def in_process(function: Any, *args: Any) -> Any:
    """Run in a new process, because Mosaic compiles for only one GPU per process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *args).result()


def compile_again(target: str, *, quick: bool) -> list[Row]:
    wanted = list(cells(target))
    if quick:
        model, quantization = QUICK[target]
        named = {"model": model, "quantization": quantization, "contexts": CONTEXTS}
        wanted = [cell for cell in wanted if cell == named]
    return in_process(predict_on, target, wanted)


def write(output: Path, target: str, rows: list[Row], linears: list[Row]) -> None:
    """Replace the target's rows in a report, and write its tables."""
    old = json.loads(output.read_text()) if output.exists() else {"rows": [], "linears": []}

    def merged(table: str, new: list[Row]) -> list[Row]:
        every = [*(row for row in old[table] if row["device"] != target), *new]
        return sorted(every, key=lambda row: TARGETS.index(row["device"]))

    report = new_report(merged("rows", rows), merged("linears", linears))
    reports.write(report, output)
    output.with_suffix(".md").write_text(markdown(report) + "\n")


def write_page() -> None:
    rows = json.loads(COMMITTED.read_text())["rows"]
    page = PAGE.read_text()
    (before, _), (_, after) = page.split(MARKS[0]), page.split(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}{page_tables(rows)}\n{MARKS[1]}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cell only")
    parser.add_argument("--target", choices=TARGETS, help="default: all")
    parser.add_argument("--output", type=Path, help="write the predictions there instead")
    parser.add_argument("--page", action="store_true", help="write docs/gpu.md")
    args = parser.parse_args()
    if args.page:
        write_page()
        return
    targets = [args.target] if args.target else list(QUICK if args.quick else TARGETS)
    failed, start_s = False, time.perf_counter()

    def compiled(target: str) -> tuple[list[Row], list[Row], list[str]]:
        """Return the predicted steps, the predicted products and the extrapolation faults."""
        rows, measured = compile_again(target, quick=args.quick), target in MEASURED
        if args.quick or not measured:
            return rows, [], []
        wrong = [] if args.output is not None else in_process(extrapolation_faults, target)
        return rows, in_process(linears_on, target), wrong

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for target, found in zip(targets, pool.map(compiled, targets), strict=True):
            rows, linears, wrong = found
            if args.output is not None:
                write(args.output, target, rows, linears)
                continue
            committed = json.loads(COMMITTED.read_text())
            wrong += faults(rows, committed["rows"])
            wrong += faults(linears, committed["linears"], LINEAR_KEY, LINEAR_COMPARED)
            taken_s = time.perf_counter() - start_s
            print(
                f"{target}: {len(rows)} predictions, {len(wrong)} faults, after {taken_s:.0f} s",
                flush=True,
            )
            for fault in wrong:
                print(f"    FAULT: {fault}", flush=True)
            failed = failed or bool(wrong) or not rows
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
