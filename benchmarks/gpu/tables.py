"""The report in Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks import report as reports


def markdown(report: dict[str, Any]) -> str:
    """Return a section for each part: a table of its cases, and what failed."""
    sections = [reports.heading(report)]
    if report["tiny"]:
        sections.append("Small shapes: these figures mean nothing.")
    for name, rows in report["parts"].items():
        seconds = sum(row.get("seconds", 0.0) for row in rows)
        sections.append(f"## {name} ({seconds:.0f} s)")
        measured = [row for row in rows if "failed" not in row and "skipped" not in row]
        if measured:
            sections.append(_table(measured))
        for kind in ("failed", "skipped"):
            sections += [
                f"{row['case']} {kind}:\n\n```\n{row[kind]}\n```" for row in rows if kind in row
            ]
        if not rows:
            sections.append("no time left")
    return "\n\n".join(sections)


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return reports.table(columns, [[_text(row.get(column)) for column in columns] for row in rows])


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value and not 1e-3 <= abs(value) < 1e6:
            return f"{value:.3g}"
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    return str(value)
