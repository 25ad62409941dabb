"""Frame of SVG charts that follow the reader's light or dark theme. No other files are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

FONT = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
type Color = tuple[str, str, str, str]
# Class, property, and its value with a light and with a dark background.
COLORS: tuple[Color, ...] = (
    ("surface", "fill", "#ffffff", "#0d1117"),
    ("text", "fill", "#1f2328", "#f0f6fc"),
    ("muted", "fill", "#59636e", "#9198a1"),
    ("grid", "stroke", "#d1d9e0", "#30363d"),
)
BLUE, ORANGE = ("#2a78d6", "#4493f8"), ("#d9822b", "#e0964a")  # with a light and a dark background


def document(
    width: float,
    height: float,
    parts: Iterable[str],
    *,
    labelled_by: str,
    colors: Sequence[Color] = (),
    rules: Sequence[str] = (),
) -> str:
    """Return a whole SVG.

    Args:
      parts: elements, drawn in this order.
      labelled_by: ids of the texts that describe the chart to screen readers.
      colors: colors of the chart's own classes.
      rules: CSS rules, in addition to fonts and colors.
    """
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="{labelled_by}">',
        f"<style>{_style((*COLORS, *colors), rules)}</style>",
        f'<rect class="surface" width="{width}" height="{height}" rx="6"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _style(colors: Sequence[Color], rules: Sequence[str]) -> str:
    light, dark = (
        "\n".join(f".{row[0]} {{ {row[1]}: {row[column]} }}" for row in colors) for column in (2, 3)
    )
    fonts = (
        f"text {{ font: 13px {FONT} }}",
        ".title { font-size: 17px; font-weight: 600 }",
        ".value { font-size: 11px }",
    )
    lines = (*fonts, *rules, light, "@media (prefers-color-scheme: dark) {", dark, "}")
    return "\n" + "\n".join(lines) + "\n"


def text(
    x: float, y: float, text: str, kind: str, id_: str | None = None, *, anchor: str = "start"
) -> str:
    """Return a text element of the classes `kind`."""
    named = f' id="{id_}"' if id_ else ""
    placed = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{named} class="{kind}" x="{x:.1f}" y="{y:.1f}"{placed}>{escape(text)}</text>'
