"""Generator of the pages of flags and commands: `python -m forge_serve.cli.reference [ROOT]`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from textwrap import fill

from forge_jax.config.aliases import REFUSED_VALUES, VALUES, Alias, flag_of
from forge_serve.cli import aliases
from forge_serve.cli import profile as profile_cli
from forge_serve.cli.flags import Flag, HelpFormatter, Parser, flags
from forge_serve.cli.main import SECTIONS, make_parser, subparsers
from forge_serve.limits import Limits, rows

HELP_WIDTH = 96

_HEAD = """\
# Configuration

Set flags on the command line, in a file, or as arguments in Python. [cli.md](cli.md) describes
every flag with its type and default. `python -m forge_serve.cli.reference` generates this page.

## Configuration file

`--config FILE` reads flags from a TOML file. Every command accepts it:

```toml
model = "Qwen/Qwen3-0.6B"
port = 8001
max-num-seqs = 64          # --max-num-seqs; max_num_seqs is the same key
no-prefix-cache = true     # or, by the field's name: prefix_cache = false
lora = ["sql=adapters/sql", "chat=adapters/chat"]
```

A key is `model`, a flag without its leading dashes, or a [field's name](#flags-and-python-classes).
Keys are at the top level of the file, without tables. Put text in quotes, also "auto". Any other
key is an error, and so is a value of the wrong type. The command line overrides the file. If a flag
is repeatable, its values on the command line replace the file's list.

## Flags and Python classes

In Python, each flag is a field of one of these classes. The field's name is the flag's, with
underscores, and with the suffix `_s` if its unit is seconds. `--no-x` becomes `x=False`, and
`--compile-cache` becomes `compile_cache_dir`. `LLM` and `EngineConfig.from_options` accept the
fields of all classes except `ServerConfig`. These are the flags of `forge-jax serve`, except those
of the [limits](#limits):

"""

_LIMITS_HEAD = """
## Limits

These limits apply to each request. If a request exceeds a limit, the server returns 400, or 413 for
a body that is too large. The model's context length also limits the number of tokens. In Python, a
limit with a flag is a field of `ServerConfig.limits`. The field's name has no `max_`.

| limit on | default | flag | range of the flag |
|---|---|---|---|
"""

_ALIASES_HEAD = """
## Names of other engines

The command line and `--config` accept many flags of vLLM, SGLang and other engines. Each of their
boolean flags also has an opposite: `--enable-prefix-caching` and `--no-enable-prefix-caching`. In
Python, `LLM` and `EngineConfig.from_options` accept these names as keyword arguments, with
underscores.

| forge-jax flag | flags of other engines |
|---|---|
"""

_VALUES_HEAD = """
These values of other engines are converted or rejected:

| flag | values of other engines | forge-jax value |
|---|---|---|
"""

_IMPLIED_HEAD = """
These flags have no effect:

| flag of another engine | reason |
|---|---|
"""

_REFUSED_HEAD = """
These flags are rejected. The error states the reason, and the replacement if there is one:

"""

_CLI_HEAD = """\
# The command line

This page has the `--help-all` output of every command. `--help` shows only the essential flags.
[configuration.md](configuration.md) describes the file for `--config`, the limits without a flag,
and the supported [flags of other engines](configuration.md#names-of-other-engines). `python -m
forge_serve.cli.reference` generates this page.

Results go to stdout, and everything else goes to stderr. An error is one line on stderr that begins
with `forge-jax: error:` and describes the fix. Every command accepts `--debug`, which adds the
traceback.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | an error, a problem found by `doctor`, or a failed request of `bench` |
| 2 | invalid command line |
| 130 | interrupted by Ctrl-C |
| 143 | ended by SIGTERM, except `serve`, which shuts down with status 0 |
| 141 | the output pipe was closed, for example by `head`; prints no error |

A model's output is written to files and pipes unchanged. On a terminal, control characters in it
are replaced by visible symbols (`␛` for escape), so that it cannot control the terminal. The same
applies to messages of a server.

In `chat`, Ctrl-C stops an answer and Ctrl-D ends the chat. A Ctrl-D during an answer ends the chat
after it. The text of a stopped answer stays in the conversation. Reasoning is dimmed and is not
sent back to the model. The arrow keys recall earlier input, also of earlier chats. `--no-history`
keeps it in memory only. `--url` connects to any OpenAI-compatible server.
The server's API key is read from `--api-key-file`, never from the environment.
"""


def cli_page() -> str:
    """Return the help of every command as Markdown."""
    parser = make_parser()
    parsers = [parser, *subparsers(parser).values(), profile_cli.make_diff_parser()]
    return "".join([_CLI_HEAD, *map(_help, parsers)])


def _help(parser: Parser) -> str:
    parser.formatter_class = partial(HelpFormatter, width=HELP_WIDTH)  # type: ignore[assignment]
    return f"\n## {parser.prog}\n\n```text\n{parser.format_help(everything=True)}```\n"


def page() -> str:
    """Return the flags by section, the limits, and other engines' names as Markdown."""
    return "".join([_HEAD, *_sections(), _LIMITS_HEAD, *_limits(), *_other_names()])


def _sections() -> Iterator[str]:
    """Yield the list of each class's flags, except the limits."""
    for section in SECTIONS.values():
        if section is not Limits:
            item = f"- `{section.__name__}`: {_codes(flag.flag for flag in flags(section))}"
            yield fill(item, 100, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def _limits() -> Iterator[str]:
    """Yield the rows of all limits, including those without a flag."""
    for row in rows():
        flag = f"`{row.flag} N`" if row.flag else ""
        span = f"{row.low:,} to {row.high:,}" if row.flag else ""
        yield f"| {_cell(row.doc)} | {row.default:,} | {flag} | {span} |\n"


def _other_names() -> Iterator[str]:
    """Yield the tables of other engines' flags."""
    ours = {flag.name: flag for section in SECTIONS.values() for flag in flags(section)}
    names: dict[str, list[str]] = defaultdict(list)
    for alias in aliases.ALIASES:
        target, *theirs = _alias(alias, ours.get(alias.option))
        names[target] += theirs
    yield _ALIASES_HEAD
    yield from (f"| {target} | {_codes(theirs)} |\n" for target, theirs in names.items())
    yield _VALUES_HEAD
    for option, values in VALUES.items():
        for their_value, value in values.items():
            yield f"| `{ours[option].flag}` | `{their_value}` | `{value}` |\n"
    for option, reasons in REFUSED_VALUES.items():
        by_reason: dict[str, list[str]] = defaultdict(list)
        for their_value, reason in reasons.items():
            by_reason[reason].append(their_value)
        for reason, refused in by_reason.items():
            because = f"rejected because {_cell(reason)}"
            yield f"| `{ours[option].flag}` | {_codes(refused)} | {because} |\n"
    yield _IMPLIED_HEAD
    yield from (f"| `{each.flag}` | {_cell(each.reason)} |\n" for each in aliases.IMPLIED)
    yield _REFUSED_HEAD
    yield fill(_codes(map(flag_of, aliases.REFUSED)), 100, break_on_hyphens=False) + "\n"


def _alias(alias: Alias, flag: Flag | None) -> tuple[str, ...]:
    """Return our flag in backticks, and another engine's flags that set it."""
    theirs = (alias.flag, alias.short) if alias.short else (alias.flag,)
    if alias.convert is not None:
        target = {
            "lora": "`--lora` for each adapter",
            "speculation": "`--speculation`, `--max-draft-tokens` and `--draft-model`",
            "cors_origin": "`--cors-origin` for each origin",
        }[alias.option]
        return target, *theirs
    if flag is None:
        return "`MODEL`", *theirs
    if flag.switch:
        on = alias.inverted if flag.default else not alias.inverted
        theirs = (alias.flag if on else alias.negative,)
    return f"`{flag.flag}`", *theirs


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


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
