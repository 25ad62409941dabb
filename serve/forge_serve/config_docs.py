"""Writes docs/configuration.md: `python -m forge_serve.config_docs [FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from forge_jax.profile.config import Workload
from forge_serve.batch.config import SERVER_FLAGS, BatchRunConfig
from forge_serve.cli import SECTIONS, Flag, flags
from forge_serve.config import ServerConfig
from forge_serve.limits import Limits, rows

DEFAULT_FILE = "docs/configuration.md"

_HEAD = """\
# Configuration

The flags of `forge-jax serve [MODEL]`. In Python the same names, with underscores, are the fields
of `EngineConfig` and `ServerConfig`; those of the limits, without `max_`, of `ServerConfig.limits`.
This page is generated from them by `python -m forge_serve.config_docs`.
"""

_PROFILE_HEAD = """
## Of forge-jax profile

`forge-jax profile [MODEL]` takes `--logdir DIR` (default `profile`), all flags of the model, the KV
cache, the batch, speculation and the device, and these ([profiling](profiling.md)):

"""

_LIMITS_HEAD = """\
What one request may ask for at most; more is refused with status 400, a larger body with 413. How
many tokens it may have is what the model's context has room for.

| at most | default | flag | which may be |
|---|---|---|---|
"""

_BATCH_HEAD = """
## Files of requests

`forge-jax batch IN OUT [MODEL]` ([batch.md](batch.md)) takes the flags above of the model, the KV
cache, the batch, speculation, the device and the limits; of the server,
{server}; and its own:

"""


def page() -> str:
    """The page as Markdown: one table per section."""
    parts = [_HEAD]
    for title, section in SECTIONS.items():
        parts.append(f"\n## {title[0].upper()}{title[1:]}\n\n")
        if section is Limits:
            parts.append(_limits())
            continue
        parts += _table(section)
    named = [f"`{flag.flag}`" for flag in flags(ServerConfig) if flag.name in SERVER_FLAGS]
    parts.append(_BATCH_HEAD.format(server=f"{', '.join(named[:-1])} and {named[-1]}"))
    parts += _table(BatchRunConfig)
    return "".join([*parts, _PROFILE_HEAD, *_table(Workload)])


def _table(section: type) -> list[str]:
    lines = [_row(flag) for flag in flags(section)]
    return ["| flag | default | what it does |\n|---|---|---|\n", *lines]


def _row(flag: Flag) -> str:
    return f"| `{_usage(flag)}` | `{flag.default_text}` | {_cell(flag.doc)} |\n"


def _limits() -> str:
    """Every row of the limits, with a flag or without."""
    lines = [_LIMITS_HEAD]
    for row in rows():
        flag = f"`{row.flag} N`" if row.flag else ""
        span = f"{row.low:,} to {row.high:,}" if row.flag else ""
        lines.append(f"| {_cell(row.doc)} | {row.default:,} | {flag} | {span} |\n")
    return "".join(lines)


def _usage(flag: Flag) -> str:
    if flag.switch:
        return flag.flag
    value = "\\|".join(flag.choices) if flag.choices else flag.metavar
    return f"{flag.flag} {value}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_FILE).write_text(page(), encoding="utf-8")
