"""A comparison as one self-contained page, drawn by the view of the web page.

The page contains its styles, its script and the report, and loads nothing. Its content security
policy allows this style and this script only, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any

from forge_serve.http.page_files import FOLDER

type Report = Mapping[str, Any]

_BASE = """
* { box-sizing: border-box; }
html { font-size: 16px; }
body { margin: 0; background: var(--paper); color: var(--ink); font-variant-numeric: tabular-nums;
  font: 0.875rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
h1, h2, h3, p, ol, ul, dl, dd { margin: 0; padding: 0; }
ol, ul { list-style: none; }
code { font: 0.92em ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
[hidden] { display: none !important; }
"""
_BEGIN = """
const data = document.getElementById("report").textContent;
document.querySelector("main").append(comparisonView(readComparison(data)));
"""
# In a script element, "<" could end the element, or begin a comment.
_IN_SCRIPT = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def html(report: Report) -> str:
    """Return the page of a report."""
    style = "".join((_read("palette.css"), _BASE, _read("comparison.css")))
    script = _read("comparison.js") + _BEGIN
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    title = " and ".join(side["label"] for side in report["sides"])
    data = json.dumps(report, allow_nan=False).translate(_IN_SCRIPT)
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style></head><body><main></main>",
            f'<script type="application/json" id="report">{data}</script>',
            f'<script type="module">{script}</script>',
            "<noscript><p>This page requires JavaScript.</p></noscript>",
            "</body></html>\n",
        )
    )


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
