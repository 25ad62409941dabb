"""Charts of `forge-jax bench` as SVG, and as a page with its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from forge_serve.bench.report import (
    FIGURES,
    Figure,
    Pair,
    Report,
    heading,
    measured,
    pairs,
    table,
)
from forge_serve.bench.svg import BLUE, ORANGE, document, text

WIDTH = 880
LEFT, TOP, GAP = 24, 116, 40
LEGEND_HEIGHT = 44
PANEL_WIDTH = (WIDTH - 2 * LEFT - GAP) / 2
CHAR_WIDTH, VALUE_WIDTH = 7.2, 92
BAR_HEIGHT, ROW_GAP, PANEL_GAP = 14, 10, 44
COLORS = (("saved", "fill", *ORANGE), ("now", "fill", *BLUE))


def svg(report: Report, saved: Report | None = None) -> str:
    """Return the chart of a report, or of a saved report next to it."""
    series = ("saved", "now") if saved else ("now",)
    top = TOP + (LEGEND_HEIGHT if saved else 0)
    parts = [text(LEFT, 30, f"Speed of {report['model']}", "text title", "title")]
    for number, line in enumerate(heading(report).splitlines()):
        parts.append(text(LEFT, 50 + 16 * number, line, "muted value", f"about{number}"))
    if saved:
        parts += _legend(report, saved)
    rows = len(report["runs"])
    height = rows * (len(series) * BAR_HEIGHT + ROW_GAP)
    for number, figure in enumerate(FIGURES):
        column, row = number % 2, number // 2
        left = LEFT + column * (PANEL_WIDTH + GAP)
        panel_top = top + row * (height + PANEL_GAP)
        parts += _panel(left, panel_top, figure, pairs(figure, report, saved), series)
    total = top + (len(FIGURES) + 1) // 2 * (height + PANEL_GAP)
    return document(WIDTH, total, parts, labelled_by="title about0 about1", colors=COLORS)


def _legend(report: Report, saved: Report) -> Iterator[str]:
    for number, (kind, of) in enumerate((("saved", saved), ("now", report))):
        y = 80 + 20 * number
        yield f'<rect class="{kind}" x="{LEFT}" y="{y}" width="12" height="12" rx="2"/>'
        yield text(LEFT + 18, y + 11, f"{kind}: {measured(of)}, {of['date']}", "text")


def _panel(
    left: float, top: float, figure: Figure, found: Sequence[Pair], series: Sequence[str]
) -> Iterator[str]:
    better = "higher" if figure.higher_is_better else "lower"
    yield text(left, top - 10, f"{figure.title} ({better} is better)", "text")
    most = max((value for pair in found for value in (pair.before, pair.after) if value), default=1)
    start = left + 12 + CHAR_WIDTH * max(len(pair.load) for pair in found)
    room = left + PANEL_WIDTH - start - VALUE_WIDTH
    for row, pair in enumerate(found):
        y = top + row * (len(series) * BAR_HEIGHT + ROW_GAP)
        middle = y + len(series) * BAR_HEIGHT / 2 + 4
        yield text(start - 8, middle, pair.load, "muted", anchor="end")
        for place, kind in enumerate(series):
            value = pair.before if kind == "saved" else pair.after
            if value is None:
                continue
            bar_y, length = y + place * BAR_HEIGHT, room * value / most
            yield (
                f'<rect class="{kind}" x="{start:.1f}" y="{bar_y + 1:.1f}" '
                f'width="{length:.1f}" height="{BAR_HEIGHT - 2}" rx="2"/>'
            )
            ratio = f" ({pair.ratio:.2f}x)" if kind == "now" and pair.ratio is not None else ""
            yield text(start + length + 6, bar_y + 11, f"{value:,.1f}{ratio}", "text value")


_STYLE = """
:root { color-scheme: light dark; }
body { font: 14px system-ui, sans-serif; margin: 2em auto; max-width: 900px; padding: 0 1em;
       color: #1f2328; background: #fff; }
svg { max-width: 100%; height: auto; }
pre { overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { color: #f0f6fc; background: #0d1117; } }
"""


def html(report: Report, saved: Report | None = None) -> str:
    """Return a self-contained page with the chart and the tables."""
    tables = {"now": report, "saved": saved} if saved else {"": report}
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Speed of {escape(report['model'])}</title><style>{_STYLE}</style></head>"
        f"<body>{svg(report, saved)}"
    ]
    for name, each in tables.items():
        assert each is not None
        parts.append(f"{f'<h2>{name}</h2>' if name else ''}<pre>{escape(table(each))}</pre>")
    return "\n".join([*parts, "</body></html>\n"])
