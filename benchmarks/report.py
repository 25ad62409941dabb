"""The form of all reports: a JSON object that says where it was made, and tables in Markdown."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forge_jax.errors import ForgeError
from forge_serve.bench import machine
from forge_serve.bench.errors import BenchmarkError


def new(benchmark: str, **body: Any) -> dict[str, Any]:
    """A report: which benchmark, date, machine and versions, then its own figures."""
    return {"benchmark": benchmark, **machine.describe(), **body}


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def publish(
    benchmark: str,
    args: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
) -> int:
    """Measures in `args.rounds`, prints the report, and writes it to `args.output` if that is told.

    Returns the exit status.
    """
    try:
        if args.rounds < 1:
            raise BenchmarkError(f"--rounds must be at least 1, not {args.rounds}")
        report = new(benchmark, **measure())
        if args.output is not None:
            write(report, args.output)
    except (BenchmarkError, ForgeError, OSError) as error:
        print(f"{benchmark}: {error}", file=sys.stderr)
        return 1
    print(markdown(report))
    return 0


def heading(report: dict[str, Any]) -> str:
    """One line: when and where."""
    versions = report["versions"]
    stack = f", jax {versions['jax']}" if "jax" in versions else ""
    return f"{report['date']}, {cpu(report)}, {report['cores']} cores{stack}"


def cpu(report: dict[str, Any]) -> str:
    """The CPU of a report, with its instruction sets."""
    sets = " ".join(report.get("instruction_sets", ()))
    return f"{report['cpu']} ({sets})" if sets else report["cpu"]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
