"""Check the GPU's kernels and measure them: one command, under nine minutes.

    python -m benchmarks.gpu [--output REPORT.json] [--parts device numerics ...] [--limit 520]
        [--resume]

Each part runs in a separate process, the most important first. Each case has a time limit. Its
row is appended to REPORT.jsonl as soon as it exists. A case that hangs ends the process with a
traceback in its row, and the next process continues after it. `--resume` continues an earlier run:
cases with a row are skipped. To repeat a case, delete its line.

`--tiny` runs everything on small shapes, also on a CPU. It shows that the parts work, and its
figures mean nothing.

    python -m benchmarks.gpu --predict DEVICE[,DEVICE...] MODEL[,MODEL...] [--batch N ...]
        [--context N ...] [--quantization TYPE ...] [--kv-dtype TYPE] [--output REPORT.json]

This predicts the time of decode steps from compiled programs instead. It needs no GPU, but the CUDA
compiler of `.venv-aot`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report as reports
from benchmarks.gpu import predictions
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.tables import markdown
from benchmarks.gpu.worker import append, drop_partial_line, read_rows, unfinished, work

GRACE_S = 10.0  # after which a process that does not end by itself is killed
POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> int:
    parser = reports.parser("gpu", "Measure this GPU.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--limit", type=float, default=520.0, help="seconds for everything")
    parser.add_argument("--resume", action="store_true", help="skip the cases that have a row")
    parser.add_argument("--tiny", action="store_true", help="use small shapes, on any device")
    for name in ("--work", "--rows", "--trace", "--until"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    predictions.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.predict is not None:
        return predictions.run(args)
    if args.work is not None:  # this process runs one part
        work(args.work, Path(args.rows), Path(args.trace), float(args.until), tiny=args.tiny)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.json" if args.output is None else args.output
        rows = output.with_suffix(".jsonl")
        if rows.exists() and not args.resume:
            parser.error(f"{rows} exists: continue it with --resume, or choose another --output")
        report = measure(args.parts, args.limit, tiny=args.tiny, output=output)
    print(markdown(report))
    return 0 if any("failed" not in row for part in report["parts"].values() for row in part) else 1


def measure(names: Sequence[str], limit_s: float, *, tiny: bool, output: Path) -> dict[str, Any]:
    """Run the parts, each in a separate process, and write the report after each."""
    end_s = time.time() + limit_s
    report = reports.new("gpu", tiny=tiny, parts={})
    rows = output.with_suffix(".jsonl")
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        run(name, rows, end_s, tiny=tiny)
        found = [row for row in read_rows(rows) if row["part"] == name and "case" in row]
        report["parts"][name] = [{k: v for k, v in row.items() if k != "part"} for row in found]
        reports.write(report, output)
        output.with_suffix(".md").write_text(markdown(report) + "\n")
    return report


def run(name: str, rows: Path, end_s: float, *, tiny: bool) -> None:
    """Run a part, with another process after each case that ends its process."""
    with tempfile.TemporaryDirectory() as folder:
        trace, errors = Path(folder) / "trace", Path(folder) / "errors"
        while time.time() < end_s:
            drop_partial_line(rows)
            command = [sys.executable, "-m", "benchmarks.gpu", "--work", name]
            command += ["--rows", str(rows), "--trace", str(trace), "--until", str(end_s)]
            with errors.open("wb") as file:
                process = subprocess.Popen(
                    command + ["--tiny"] * tiny, stdout=file, stderr=subprocess.STDOUT
                )
                status = _wait(process, name, rows, end_s)
            if status == 0:
                return
            case = unfinished(read_rows(rows), name)
            why = _tail(trace) or _tail(errors) or f"ended with status {status}"
            failed = {"failed": f"the process ended: {why}"}
            if case is None:  # before or between cases: it would happen again
                append(rows, {"part": name, "case": "start", **failed})
                return
            append(rows, {"part": name, "case": case["begun"], **failed})


def _wait(process: subprocess.Popen[bytes], name: str, rows: Path, end_s: float) -> int:
    """Return a process's exit status; kill it if its case is far beyond its limit."""
    case, begin_s = None, time.time()
    while process.poll() is None:
        now_s = time.time()
        latest = unfinished(read_rows(rows), name)
        if latest != case:
            case, begin_s = latest, now_s
        limit_s = end_s - begin_s if case is None else case["limit_s"]
        if now_s > min(begin_s + limit_s, end_s) + GRACE_S:
            process.kill()
            process.wait()
            break
        time.sleep(POLL_S)
    assert process.returncode is not None
    return process.returncode


def _tail(file: Path) -> str:
    """Return the end of a file with an error or a traceback."""
    if not file.exists():
        return ""
    return "\n".join(file.read_text(errors="replace").strip().splitlines()[-12:])[-1200:]


if __name__ == "__main__":
    sys.exit(main())
