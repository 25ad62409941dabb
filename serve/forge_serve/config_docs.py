"""Writes the pages of flags and of commands: `python -m forge_serve.config_docs [ROOT]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from forge_jax.profile.config import Workload
from forge_serve import profile_cli
from forge_serve.batch.config import SERVER_FLAGS, BatchRunConfig
from forge_serve.cli import SECTIONS, make_parser, subparsers
from forge_serve.config import ServerConfig
from forge_serve.flags import Flag, HelpFormatter, Parser, flags
from forge_serve.limits import Limits, rows

HELP_WIDTH = 96

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

_CLI_HEAD = """\
# The command line

`forge-jax COMMAND --help` says all of this, too; the page is generated from it by
`python -m forge_serve.config_docs`. [configuration.md](configuration.md) has the flags as tables.

What is wrong is one line on stderr that begins with `forge-jax: error:` and says what to do; where
it comes from, `--debug` shows, which every command takes. What was asked for is on stdout,
everything else on stderr.

| exit status | means |
|---|---|
| 0 | done |
| 1 | an error, a problem that `doctor` has found, or a failed request of `bench` |
| 2 | the command line cannot be read |
| 130, 143 | ended by Ctrl-C, by SIGTERM (`serve` drains, and ends with 0) |
| 141 | nobody reads the output any more, as in a pipe to `head`; without a line |

A model's text goes to files and pipes as it is. On a terminal the control characters in it are
shown as pictures (`␛` for escape), so that nothing a model writes can drive the terminal; so are
those in a server's messages.

In `chat`, Ctrl-C stops an answer, which stays in the conversation as far as it came; Ctrl-D ends
the chat. Reasoning is shown dimmed, and no part of what is sent again. What was typed can be called
back with the arrow keys until the chat ends; nothing of it is written to a file. `--url` talks to
any server of OpenAI's protocol; its key comes from `--api-key-file`, never from the environment.
"""


def cli_page() -> str:
    """The help of every command, as Markdown."""
    parser = make_parser()
    parsers = [parser, *subparsers(parser).values(), profile_cli.make_diff_parser()]
    return "".join([_CLI_HEAD, *map(_help, parsers)])


def _help(parser: Parser) -> str:
    parser.formatter_class = partial(HelpFormatter, width=HELP_WIDTH)  # type: ignore[assignment]
    return f"\n## {parser.prog}\n\n```text\n{parser.format_help()}```\n"


def page() -> str:
    """The flags as Markdown: one table per section."""
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


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": page,
    "docs/cli.md": cli_page,
}

if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for file, text in PAGES.items():
        (root / file).write_text(text(), encoding="utf-8")
