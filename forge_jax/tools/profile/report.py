"""A comparison as text, as a self-contained HTML file, and for TensorBoard."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forge_jax.errors import ConfigError
from forge_jax.tools.profile.compare import (
    COMPILED,
    KERNELS,
    OPERATIONS,
    PARTS,
    PHASES,
    Comparison,
    Row,
    Table,
)
from forge_jax.tools.profile.summary import (
    METHOD,
    headline,
    largest,
    step_times,
    suggestions,
    within_part,
)

_TAGS = {OPERATIONS: "op_time_us", PARTS: "part_time_us", PHASES: "host_time_us"}
_WHAT = {
    PARTS: "part",
    OPERATIONS: "scope: kernel",
    KERNELS: "kernel",
    PHASES: "phase",
    COMPILED: "figure",
}
WIDTH = 100  # columns of a terminal
_OURS = ".forge-jax"  # the end of the names of event files
_MOST_POINTS = 1000  # points per scalar, because TensorBoard shows no more by default

_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
       color: #1b1f24; background: #fff; overflow-wrap: anywhere; }
table { border-collapse: collapse; margin: .5em 0 2em; width: 100%; table-layout: fixed; }
th, td { padding: .2em .6em; border-bottom: 1px solid #d8dee4; text-align: right; width: 7em; }
th:first-child, td:first-child { text-align: left; width: auto; }
td:first-child { font-family: ui-monospace, monospace; }
td { font-variant-numeric: tabular-nums; }
.times, .times th, .times td { width: auto; table-layout: auto; white-space: nowrap; }
.verdict { font-size: 1.25em; font-weight: 600; }
summary { cursor: pointer; }
.slower td:last-child, .more td:last-child, .appeared td:last-child { color: #b3261e; }
.faster td:last-child, .less td:last-child, .vanished td:last-child { color: #1a6b33; }
.same { color: #6e7781; }
@media (max-width: 60em) {  /* a name is on a separate line above its figures */
  tr { display: grid; grid-template-columns: repeat(3, 1fr) 4.5em 4.5em; padding: .2em 0;
       border-bottom: 1px solid #d8dee4; }
  th, td { width: auto; border: 0; padding: .1em .2em; font-size: 12px; }
  th:first-child, td:first-child { grid-column: 1 / -1; width: auto; font-size: 13px; }
  .times { display: block; overflow-x: auto; }
  .times tr { display: table-row; }
}
@media (prefers-color-scheme: dark) {
  body { color: #e6edf3; background: #0d1117; } th, td, tr { border-color: #30363d; }
  .same { color: #8b949e; }
  .slower td:last-child, .more td:last-child, .appeared td:last-child { color: #ff8f88; }
  .faster td:last-child, .less td:last-child, .vanished td:last-child { color: #6fd08c; }
}
"""


def text(comparisons: Iterable[Comparison], *, everything: bool = False) -> str:
    """Return comparisons as text for a terminal: verdict, largest differences, suggestions.

    Args:
      everything: adds all tables, with unchanged rows.
    """
    parts = []
    for comparison in comparisons:
        heading = f"== {comparison.name or 'profile'}: {headline(comparison)}"
        parts += [*_wrapped(heading, "   "), ""]
        if comparison.verdict is not None:
            parts += [*_columns(step_times(comparison.verdict)), *METHOD.splitlines(), ""]
        parts += [*_described(comparison), ""]
        parts += [*_largest(comparison), ""]
        parts += [*_suggested(comparison), ""]
        for table in comparison.tables if everything else ():
            parts += [_caption(table, len(table.rows)), *_aligned(table, table.rows), ""]
    return "\n".join(parts)


def _described(comparison: Comparison) -> list[str]:
    lines = [f"before: {comparison.runs[0]}", f"after: {comparison.runs[1]}"]
    before, after = comparison.command_buffers
    if before or after:
        same = before if before == after else f"{before or 'unknown'}, then {after or 'unknown'}"
        lines.append(f"command buffers (CUDA graphs): {same}")
    return [line for each in lines for line in _wrapped(each, "  ")]


def _largest(comparison: Comparison) -> list[str]:
    """Return the table of the largest differences, with the operations below their parts."""
    operations = comparison.table(OPERATIONS)
    groups = largest(comparison)
    shown = sum(len(group.operations) for group in groups)
    if not shown:
        return [f"operations: none of {len(operations.rows)} changed"]
    cells: list[tuple[str, ...]] = [("part, operation", *_head(operations)[1:])]
    for group in groups:
        only = group.operations[0]
        if (only.before, only.after) == (group.part.before, group.part.after):
            name = f"{group.part.name}: {within_part(only)}"
            cells.append((name, *_cells(operations, only)[1:]))
            continue
        cells.append(_cells(operations, group.part))
        for row in group.operations:
            cells.append((f"  {within_part(row)}", *_cells(operations, row)[1:]))
    room = WIDTH - sum(2 + max(len(line[i]) for line in cells) for i in range(1, 6))
    cells = [(_cut(name, room), *others) for name, *others in cells]
    count = f"{shown} of {len(operations.changed)} that changed"
    return [f"largest differences of operations, us per step ({count})", *_columns(cells)]


def _suggested(comparison: Comparison) -> list[str]:
    found = suggestions(comparison)
    return ["to try:", *(line for each in found for line in _wrapped(f"- {each}", "  "))]


def _wrapped(line: str, indent: str) -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _cut(name: str, room: int) -> str:
    return name if len(name) <= room else f"{name[: room - 1]}…"


def _caption(table: Table, shown: int) -> str:
    others = len(table.rows) - shown
    unit = f", {table.unit}" if table.unit else ""
    return f"{table.title}{unit}" + (f" ({others} hardly changed)" if others else "")


def _head(table: Table) -> tuple[str, ...]:
    return (_WHAT[table.title], "before", "after", "difference", "%", "change")


def _aligned(table: Table, rows: tuple[Row, ...]) -> list[str]:
    return _columns([_head(table), *(_cells(table, row) for row in rows)] if rows else [])


def _columns(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines with the first and the sixth column aligned left."""
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
    """Return the verdict and the changed rows as Markdown for TensorBoard's Text tab."""
    parts = [
        f"**{headline(comparison)}**\n\n",
        f"before: `{comparison.runs[0]}`\n\nafter: `{comparison.runs[1]}`\n",
    ]
    for table in comparison.tables:
        parts.append(f"\n## {_caption(table, len(table.changed))}\n\n")
        rule = ("---",) + ("---:",) * 4 + ("---",)
        lines = [_head(table), rule] if table.changed else []
        lines += [_cells(table, row) for row in table.changed]
        parts += ["| " + " | ".join(c.replace("|", "\\|") for c in line) + " |\n" for line in lines]
    return "".join(parts)


def html(comparisons: Iterable[Comparison], title: str = "Difference of two profiles") -> str:
    """Return a self-contained HTML page: the verdict, then all rows, unchanged ones collapsed."""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(title)}</h1>"
    ]
    for comparison in comparisons:
        parts.append(f"<h2>{escape(comparison.name or 'profile')}</h2>")
        parts += _html_verdict(comparison)
        for table in comparison.tables:
            parts.append(f"<h3>{escape(_caption(table, len(table.changed)))}</h3>")
            parts.append(_html_table(table, table.changed))
            if table.others:
                parts.append(f"<details><summary>{len(table.others)} hardly changed</summary>")
                parts.append(_html_table(table, table.others) + "</details>")
    return "\n".join([*parts, "</body></html>\n"])


def _html_verdict(comparison: Comparison) -> list[str]:
    parts = [f'<p class="verdict">{escape(headline(comparison))}</p>']
    if comparison.verdict is not None:
        head, *rows = step_times(comparison.verdict)
        lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
        for row in rows:
            lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
        parts.append(f'<table class="times">{"".join(lines)}</table><p>{escape(METHOD)}</p>')
    about = "<br>".join(map(escape, _described(comparison)))
    items = "".join(f"<li>{escape(each)}</li>" for each in suggestions(comparison))
    return [*parts, f"<p>{about}</p>", f"<h3>to try</h3><ul>{items}</ul>" if items else ""]


def _html_table(table: Table, rows: tuple[Row, ...]) -> str:
    if not rows:
        return "<p>nothing</p>"
    lines = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in _head(table)) + "</tr>"]
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in _cells(table, row))
        lines.append(f'<tr class="{row.change}">{cells}</tr>')
    return f"<table>{''.join(lines)}</table>"


def write_tensorboard(comparisons: Iterable[Comparison], folder: Path) -> None:
    """Write comparisons as TensorBoard runs, and replace the files of an earlier call.

    TensorBoard overlays the scalars of the runs "before" and "after". The table of the run
    "difference" is in its Text tab.

    Raises:
      ConfigError: the extra `profile` is not installed.
    """
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            "--logdir writes TensorBoard's files, which needs the extra profile: "
            "pip install -c constraints.txt -e '.[profile]'"
        ) from error
    writers: dict[str, Any] = {}
    for run in ("before", "after", "difference"):
        for written in (folder / run).glob(f"events.out.tfevents.*{_OURS}"):
            written.unlink()
        writers[run] = SummaryWriter(str(folder / run), filename_suffix=_OURS)
    try:
        for comparison in comparisons:
            below = f"{comparison.name}/" if comparison.name else ""
            writers["difference"].add_text(
                f"{below}difference", markdown(comparison), global_step=0
            )
            for table in comparison.tables:
                tag = _TAGS.get(table.title)
                for row in table.rows if tag is not None else ():
                    name = f"{tag}/{_tag(comparison.name, row.name)}"
                    values = (row.before, row.after)
                    for run, points, mean in zip(
                        ("before", "after"), comparison.points, values, strict=True
                    ):
                        if mean is not None:
                            line = points[table.title].get(row.name, [mean])
                            _add_line(writers[run], name, line)
    finally:
        for writer in writers.values():
            writer.close()


def _tag(comparison: str, name: str) -> str:
    """Return a tag such as "decode/layers.attention.forge_attention" in a comparison "decode".

    TensorBoard's cards show the text after the last slash, and as much before it as fits.
    """
    kind, *rest = re.split(": |/", name)
    parts = [part for part in dict.fromkeys((comparison, kind)) if part]
    return "/".join([*parts, ".".join(rest)] if rest else parts)


def _add_line(writer: Any, name: str, values: list[float]) -> None:
    """Add one point per step, or evenly spaced ones if there are too many steps."""
    for step in range(0, len(values), -(-len(values) // _MOST_POINTS)):
        writer.add_scalar(name, values[step], global_step=step)
