"""Writes docs/configuration.md: `python -m forge_serve.config_docs [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from forge_serve.cli import SECTIONS, Flag, flags

DEFAULT_FILE = "docs/configuration.md"

_HEAD = """\
# Configuration

The flags of `forge-jax serve [MODEL]`. In Python the same names, with underscores, are the fields
of `EngineConfig` and `ServerConfig`. This page is generated from them by
`python -m forge_serve.config_docs`.
"""


def page() -> str:
    """The page as Markdown: one table per section."""
    parts = [_HEAD]
    for title, section in SECTIONS.items():
        parts.append(f"\n## {title[0].upper()}{title[1:]}\n\n| flag | default | what it does |\n")
        parts.append("|---|---|---|\n")
        parts += [
            f"| `{_usage(flag)}` | `{flag.default_text}` | {_cell(flag.doc)} |\n"
            for flag in flags(section)
        ]
    return "".join(parts)


def _usage(flag: Flag) -> str:
    if flag.switch:
        return flag.flag
    value = "\\|".join(flag.choices) if flag.choices else flag.metavar
    return f"{flag.flag} {value}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_FILE).write_text(page(), encoding="utf-8")
