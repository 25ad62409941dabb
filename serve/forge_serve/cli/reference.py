"""Writes the pages of flags and of commands: `python -m forge_serve.cli.reference [ROOT]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from forge_jax.config.aliases import REFUSED_VALUES, VALUES, flag_of
from forge_jax.tools.profile.config import Workload
from forge_serve.batch.config import SERVER_FLAGS, BatchRunConfig
from forge_serve.cli import aliases
from forge_serve.cli import profile as profile_cli
from forge_serve.cli.flags import Flag, HelpFormatter, Parser, flags
from forge_serve.cli.main import SECTIONS, make_parser, subparsers
from forge_serve.config import ServerConfig
from forge_serve.limits import Limits, rows

HELP_WIDTH = 96

_HEAD = """\
# Configuration

The flags of `forge-jax serve [MODEL]`. In Python the same names, with underscores, are the fields
of `EngineConfig` and `ServerConfig`; those of the limits, without `max_`, of `ServerConfig.limits`.
This page is generated from them by `python -m forge_serve.cli.reference`.

`forge-jax serve --help` shows the essential flags, `--help-all` every flag.

## A file of flags

`--config FILE` reads flags from a TOML file. Every command takes it, for its own flags:

```toml
model = "Qwen/Qwen3-0.6B"
port = 8001
max-num-seqs = 64          # --max-num-seqs; max_num_seqs is the same key
no-prefix-cache = true     # or, by the field's name: prefix_cache = false
lora = ["sql=adapters/sql", "chat=adapters/chat"]
```

Keys are flags without their dashes, at the top level of the file. The command line overrides the
file; a flag that may be repeated replaces the file's whole list. Where "auto" is a value, it is a
text. A key that is no flag of the command, or a value of the wrong type, is an error.
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

_ALIASES_HEAD = """
## Names of other engines

Flags of vLLM, SGLang and smaller engines are accepted, also in `--config`. No help shows them.
`LLM` and `EngineConfig.from_options` accept those of the engine as arguments, with underscores.
The opposite of a switch, such as `--enable-prefix-caching`, is accepted, too.

| flag elsewhere | here |
|---|---|
"""

_VALUES_HEAD = """
Values of other engines:

| flag | value elsewhere | here |
|---|---|---|
"""

_IMPLIED_HEAD = """
These switches ask for what always holds. They are accepted and change nothing:

| flag elsewhere | why |
|---|---|
"""

_REFUSED_HEAD = """
These have no counterpart. They are refused, with this reason:

| flag elsewhere | reason |
|---|---|
"""

_CLI_HEAD = """\
# The command line

`forge-jax COMMAND --help-all` says all of this, too; `--help` shows the essential flags. The page
is generated from them by `python -m forge_serve.cli.reference`.
[configuration.md](configuration.md) has the flags as tables,
[files of flags](configuration.md#a-file-of-flags) for `--config`, and the
[names of other engines](configuration.md#names-of-other-engines) that are accepted.

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
    return f"\n## {parser.prog}\n\n```text\n{parser.format_help(everything=True)}```\n"


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
    return "".join([*parts, _PROFILE_HEAD, *_table(Workload), *_other_names()])


def _other_names() -> Iterator[str]:
    """The tables of flags of other engines."""
    ours = {flag.name: flag for section in SECTIONS.values() for flag in flags(section)}
    yield _ALIASES_HEAD
    for alias in aliases.ALIASES:
        flag = ours.get(alias.option)
        names = f"`{alias.flag}`" + (f", `{alias.short}`" if alias.short else "")
        if alias.convert is not None:
            target = {
                "lora": "`--lora` for each adapter",
                "speculation": "`--speculation`, `--max-draft-tokens` and `--draft-model`",
                "cors_origin": "`--cors-origin` for each origin",
            }[alias.option]
        elif flag is None:
            target = "`MODEL`"
        elif flag.switch:
            on = alias.inverted if flag.default else not alias.inverted
            names = f"`{alias.flag if on else alias.negative}`"
            target = f"`{flag.flag}`"
        else:
            target = f"`{flag.flag}`"
        yield f"| {names} | {target} |\n"
    yield _VALUES_HEAD
    for option, values in VALUES.items():
        for theirs, value in values.items():
            yield f"| `{ours[option].flag}` | `{theirs}` | `{value}` |\n"
    for option, reasons in REFUSED_VALUES.items():
        for theirs, reason in reasons.items():
            yield f"| `{ours[option].flag}` | `{theirs}` | refused: {_cell(reason)} |\n"
    yield _IMPLIED_HEAD
    for implied in aliases.IMPLIED:
        yield f"| `{implied.flag}` | {_cell(implied.reason)} |\n"
    yield _REFUSED_HEAD
    for name, reason in aliases.REFUSED.items():
        yield f"| `{flag_of(name)}` | {_cell(reason)} |\n"


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
