"""A comparison as text, as one HTML file without requests to anywhere, and for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from forge_jax.errors import ConfigError
from forge_jax.profile.compare import (
    COMPILED,
    OPERATIONS,
    PARTS,
    PHASES,
    Comparison,
    Row,
    Table,
)

_TAGS = {OPERATIONS: "op_time_us", PARTS: "part_time_us", PHASES: "host_time_us"}
_HEAD = ("", "before", "after", "difference", "%", "")

_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
       color: #1b1f24; background: #fff; }
table { border-collapse: collapse; margin: .5em 0 2em; width: 100%; }
th, td { padding: .2em .6em; border-bottom: 1px solid #d8dee4; text-align: right; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace;
       overflow-wrap: anywhere; }
td { font-variant-numeric: tabular-nums; }
.slower td:last-child, .more td:last-child, .appeared td:last-child { color: #b3261e; }
.faster td:last-child, .less td:last-child, .vanished td:last-child { color: #1a6b33; }
.same { color: #6e7781; }
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117; } th, td { border-color: #30363d; }
  .slower td:last-child, .more td:last-child, .appeared td:last-child { color: #ff8f88; }
  .faster td:last-child, .less td:last-child, .vanished td:last-child { color: #6fd08c; }
}
"""


def text(comparisons: Iterable[Comparison], *, everything: bool = False) -> str:
    """For a terminal.

    Args:
      everything: what has not changed, too.
    """
    parts = []
    for comparison in comparisons:
        parts.append(_heading(comparison))
        parts += [f"before: {comparison.runs[0]}", f"after:  {comparison.runs[1]}", ""]
        for table in comparison.tables:
            rows = table.rows if everything else table.changed
            parts.append(_caption(table, len(rows)))
            parts += [*_aligned(table, rows), ""]
    return "\n".join(parts)


def _heading(comparison: Comparison) -> str:
    return f"== {comparison.name or 'profile'} =="


def _caption(table: Table, shown: int) -> str:
    same = len(table.rows) - shown
    unit = f", {table.unit}" if table.unit else ""
    return f"{table.title}{unit}" + (f" ({same} unchanged)" if same else "")


def _aligned(table: Table, rows: tuple[Row, ...]) -> list[str]:
    cells = [_HEAD, *(_cells(table, row) for row in rows)] if rows else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in (0, 5) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cells(table: Table, row: Row) -> tuple[str, ...]:
    number = "{:,.0f}" if table.title == COMPILED else "{:,.1f}"

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    signed = number.replace(":", ":+")
    return (
        row.name,
        cell(row.before, number),
        cell(row.after, number),
        signed.format(row.delta),
        cell(row.percent, "{:+.1f}"),
        row.change,
    )


def markdown(comparison: Comparison) -> str:
    """The tables of what has changed, as TensorBoard's Text tab shows them."""
    parts = [f"before: {comparison.runs[0]}\n\nafter: {comparison.runs[1]}\n"]
    for table in comparison.tables:
        parts.append(f"\n## {_caption(table, len(table.changed))}\n\n")
        lines = [_HEAD, ("---",) + ("---:",) * 4 + ("---",)] if table.changed else []
        lines += [_cells(table, row) for row in table.changed]
        parts += ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |\n" for line in lines]
    return "".join(parts)


def html(comparisons: Iterable[Comparison], title: str = "Difference of two profiles") -> str:
    """One page that needs nothing but itself: all rows, what has not changed folded away."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
    ]
    for comparison in comparisons:
        parts.append(f"<h2>{escape(comparison.name or 'profile')}</h2>")
        parts.append(
            f"<p>before: {escape(comparison.runs[0])}<br>after: {escape(comparison.runs[1])}</p>"
        )
        for table in comparison.tables:
            same = tuple(row for row in table.rows if row.change == "same")
            parts.append(f"<h3>{escape(_caption(table, len(table.changed)))}</h3>")
            parts.append(_html_table(table, table.changed))
            if same:
                parts.append(f"<details><summary>{len(same)} unchanged</summary>")
                parts.append(_html_table(table, same) + "</details>")
    return "\n".join([*parts, "</body></html>\n"])


def _html_table(table: Table, rows: tuple[Row, ...]) -> str:
    if not rows:
        return "<p>nothing</p>"
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in _HEAD) + "</tr>"]
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(table, row))
        lines.append(f'<tr class="{row.change}">{cells}</tr>')
    return f"<table>{''.join(lines)}</table>"


def write_tensorboard(comparisons: Iterable[Comparison], folder: Path) -> None:
    """Writes the runs "before" and "after", whose scalars TensorBoard draws over each other, and
    "difference", whose table is in its Text tab.

    Raises:
      ConfigError: the extra `profile` has not been installed.
    """
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "--logdir writes TensorBoard's files, which needs the extra profile: "
            "pip install -c constraints.txt -e '.[profile]'"
        ) from error
    writers: dict[str, Any] = {
        run: SummaryWriter(str(folder / run)) for run in ("before", "after", "difference")
    }
    try:
        for comparison in comparisons:
            below = f"{comparison.name}/" if comparison.name else ""
            writers["difference"].add_text(
                f"{below}difference", markdown(comparison), global_step=0
            )
            for table in comparison.tables:
                tag = _TAGS.get(table.title)
                for row in table.rows if tag is not None else ():
                    name = f"{tag}/{below}{row.name.replace(': ', '/')}"
                    for run, value in (("before", row.before), ("after", row.after)):
                        if value is not None:
                            writers[run].add_scalar(name, value, global_step=0)
    finally:
        for writer in writers.values():
            writer.close()
