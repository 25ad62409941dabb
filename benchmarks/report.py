"""The form of all reports: a JSON object that says where it was made, and tables in Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_serve.bench import machine


def new(benchmark: str, **body: Any) -> dict[str, Any]:
    """A report: which benchmark, date, machine and versions, then its own figures."""
    return {"benchmark": benchmark, **machine.describe(), **body}


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def heading(report: dict[str, Any]) -> str:
    """One line: when and where."""
    versions = report["versions"]
    stack = f", jax {versions['jax']}" if "jax" in versions else ""
    return f"{report['date']}, {report['cpu']}, {report['cores']} cores{stack}"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
