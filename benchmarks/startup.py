"""Measure the time from a start to the first answer and to full speed, next to bare imports.

    python -m benchmarks.startup [--model forge-tiny] [--rounds 5] [--kinds warm cold bundle]
                                 [--output FILE.json]

Each round starts processes in turn: Python with a server's imports, and a server of each kind. All
times count from the start of a process, as seen from outside. Imports end with a printed line. A
server prints its address, and `/health` later reports "ready".

- warm: with a compilation cache that an earlier start filled.
- cold: with a new empty folder as its cache each time.
- bundle: with executables that `forge-jax compile` wrote before the first round.

Files are in the page cache, and the C++ kernels are
built, except in the first run, which is not counted. For models in a folder or file the report has
floors (`benchmarks.floors`). They are the times to read the bytes, to write as much new memory, and
to copy it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report as reports
from benchmarks.floors import FLOORS, seconds_at_best
from benchmarks.serving_process import started
from forge_serve.bench.errors import BenchmarkError

# The server's third-party imports, and JAX's backend, which it also needs.
IMPORTS = (
    "jax, flax.nnx, numpy, ml_dtypes, aiohttp.web, uvloop, msgspec, prometheus_client, "
    "tokenizers, jinja2, psutil, tqdm"
)
BARE = f"import {IMPORTS}; jax.devices(); print('imported', flush=True)"
KINDS = ("warm", "cold", "bundle")
DEFAULT_KINDS = ("warm", "cold")
TITLES = {"warm": "warm cache", "cold": "cold cache", "bundle": "bundle"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = reports.parser(
        "startup", "Measure the time that a start takes.", model="forge-tiny", rounds=5
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=DEFAULT_KINDS, help="of starts"
    )
    parser.add_argument("--serve-args", default="", help='more flags, such as "--max-num-seqs 8"')
    args = parser.parse_args(argv)
    arguments = [args.model, *args.serve_args.split()]

    def measure_all() -> dict[str, Any]:
        about = {"arguments": arguments, "imports": IMPORTS}
        return about | measure(arguments, args.rounds, args.kinds)

    return reports.publish("startup", args, measure_all, table)


def measure(
    arguments: Sequence[str], num_rounds: int, kinds: Sequence[str] = DEFAULT_KINDS
) -> dict[str, Any]:
    """Return all rounds and their medians, in seconds."""
    rounds, floors = [], []
    with tempfile.TemporaryDirectory() as folder:
        warm, bundle = f"{folder}/warm", f"{folder}/bundle"
        if "bundle" in kinds:
            write_bundle(arguments, bundle)
        start(arguments, warm)  # fills the cache
        for index in range(num_rounds):
            figures: dict[str, Any] = {"imports_s": bare_imports()}
            if "warm" in kinds:
                figures["warm"] = start(arguments, warm)
            if "cold" in kinds:
                with tempfile.TemporaryDirectory() as cold:
                    figures["cold"] = start(arguments, cold)
            if "bundle" in kinds:
                figures["bundle"] = start(arguments, bundle)
            if Path(arguments[0]).exists():
                floors.append(seconds_at_best(Path(arguments[0])))
            rounds.append(figures)
            reports.progress(f"round {index + 1} of {num_rounds}: {_line(figures)}")
    return {"rounds": rounds, "median": medians(rounds), "floors": floors}


def start(arguments: Sequence[str], cache_folder: str) -> dict[str, Any]:
    """Start a server with this compilation cache and stop it when it is ready."""
    with started([*arguments, "--compile-cache", cache_folder]) as server:
        with urllib.request.urlopen(f"{server.url}/stats", timeout=10) as response:
            phases = json.load(response)["startup_seconds"]
        return {
            "serving_s": server.serving_s,
            "ready_s": server.ready_s,
            "peak_bytes": peak_bytes(server.pid),
            "phases_s": phases,
        }


def write_bundle(arguments: Sequence[str], folder: str) -> None:
    command = [sys.executable, "-m", "forge_serve", "compile", *arguments, "--output", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"no bundle was written: {done.stderr.strip()}")
    reports.progress(done.stdout.strip())


def peak_bytes(pid: int) -> int:
    """Return the peak memory of the process, mapped files included (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def bare_imports() -> float:
    """Return seconds from the start of a process until the server's imports are done."""
    begin_s = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", BARE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"imported\n":
            raise BenchmarkError("the imports of the server failed: is it installed?")
        return time.perf_counter() - begin_s


def medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of each figure; `serving_per_imports` is of the ratios within a round."""
    result: dict[str, Any] = {"imports_s": statistics.median(r["imports_s"] for r in rounds)}
    for kind in (kind for kind in KINDS if kind in rounds[0]):
        result[kind] = {
            **{
                name: statistics.median(r[kind][name] for r in rounds)
                for name in ("serving_s", "ready_s", "peak_bytes")
            },
            "serving_per_imports": statistics.median(
                r[kind]["serving_s"] / r["imports_s"] for r in rounds
            ),
            "phases_s": {
                phase: statistics.median(r[kind]["phases_s"][phase] for r in rounds)
                for phase in rounds[0][kind]["phases_s"]
            },
        }
    return result


def table(report: dict[str, Any]) -> str:
    median = report["median"]
    rows: list[tuple[str, ...]] = [
        ("bare imports", reports.number(median["imports_s"], 2), "-", "1.00", "-", "-")
    ]
    for kind in (kind for kind in KINDS if kind in median):
        figures = median[kind]
        phases = figures["phases_s"].items()
        inner = ", ".join(f"{n} {s:.2f}" for n, s in phases if n not in ("serving", "ready"))
        values = [figures[name] for name in ("serving_s", "ready_s", "serving_per_imports")]
        cells = [reports.number(value, 2) for value in (*values, figures["peak_bytes"] / 1e9)]
        rows.append((TITLES[kind], *cells, inner))
    for name, title in FLOORS.items() if report["floors"] else ():
        seconds = statistics.median(floors[name] for floors in report["floors"])
        rows.append((title, "-", reports.number(seconds, 2), "-", "-", "-"))
    header = ("start", "serving, s", "ready, s", "serving / imports", "peak, GB")
    header = (*header, "phases, s (they overlap)")
    title = f"{reports.heading(report)}; medians of {len(report['rounds'])} rounds"
    return "\n".join((title, "", reports.table(header, rows)))


def _line(figures: dict[str, Any]) -> str:
    starts = (
        f"{kind} {figures[kind]['serving_s']:.2f} / {figures[kind]['ready_s']:.2f} s"
        for kind in KINDS
        if kind in figures
    )
    return f"imports {figures['imports_s']:.2f} s, serving / ready: " + ", ".join(starts)


if __name__ == "__main__":
    sys.exit(main())
