"""The report in Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks import report as reports


def markdown(report: dict[str, Any]) -> str:
    """Return a section for each part: a table, or the reason why there is none."""
    sections = [reports.heading(report)]
    if report["tiny"]:
        sections.append("Small shapes: these figures mean nothing.")
    for name, part in report["parts"].items():
        sections.append(f"## {name} ({part['seconds']:.0f} s)")
        if "failed" in part:
            sections.append(f"failed: `{part['failed']}`")
        elif "skipped" in part:
            sections.append(f"skipped: {part['skipped']}")
        else:
            sections.append(_section(part["figures"]))
    return "\n\n".join(sections)


def _section(figures: Any) -> str:
    """Format rows as a table, with other figures one per line above it."""
    if isinstance(figures, list):
        return _table(figures)
    lines = [f"- {key}: {_text(value)}" for key, value in figures.items() if key != "rows"]
    text = "\n".join(lines)
    return f"{text}\n\n{_table(figures['rows'])}" if "rows" in figures else text


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
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
    return str(value)
