"""Check the GPU's kernels and measure them: one command, under nine minutes.

    python -m benchmarks.gpu [--output REPORT.json] [--parts device numerics ...] [--limit 520]

Each part runs in a process of its own with a time limit, the most important first. A part that
fails or lacks a dependency costs only its own section. After every part the report is rewritten as
JSON and Markdown. `--tiny` runs everything on small shapes, also on a CPU. It shows that the parts
work, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report as reports
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.tables import markdown

ENOUGH_S = 8.0  # remaining time that is enough to start a part


def main(argv: Sequence[str] | None = None) -> int:
    parser = reports.parser("gpu", "Measure this GPU.")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--limit", type=float, default=520.0, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="use small shapes, on any device")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.part is not None:  # in the child process
        assert args.output is not None
        args.output.write_text(json.dumps(PARTS[args.part].run(args.tiny)))
        return 0
    report = measure(args.parts, args.limit, tiny=args.tiny, output=args.output)
    print(markdown(report))
    return 0 if any("figures" in part for part in report["parts"].values()) else 1


def measure(
    names: Sequence[str], limit_s: float, *, tiny: bool, output: Path | None
) -> dict[str, Any]:
    """Run all parts, each in a process of its own."""
    end_s = time.monotonic() + limit_s
    report = reports.new("gpu", tiny=tiny, parts={})
    for name in names:
        left_s = end_s - time.monotonic()
        begin_s = time.monotonic()
        if left_s < ENOUGH_S:
            result: dict[str, Any] = {"skipped": "no time left"}
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            result = run(name, PARTS[name], min(left_s, PARTS[name].seconds), tiny)
        report["parts"][name] = {**result, "seconds": round(time.monotonic() - begin_s, 1)}
        if output is not None:
            reports.write(report, output)
            output.with_suffix(".md").write_text(markdown(report) + "\n")
    return report


def run(name: str, part: Part, limit_s: float, tiny: bool) -> dict[str, Any]:
    """Return the figures of one part, or the reason why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "part.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--output", str(output)]
        if tiny:
            command.append("--tiny")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"took more than {limit_s:.0f} s"}
        if done.returncode or not output.exists():
            last = done.stderr.strip().splitlines()[-6:]
            return {"failed": "\n".join(last) or f"ended with status {done.returncode}"}
        return json.loads(output.read_text())


if __name__ == "__main__":
    sys.exit(main())
