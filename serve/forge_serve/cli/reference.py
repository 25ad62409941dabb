"""Generator of the pages of flags and commands: `python -m forge_serve.cli.reference [ROOT]`."""

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

This page lists the flags of `forge-jax serve [MODEL]`. In Python, they are fields of `EngineConfig`
and `ServerConfig`, with underscores. Times in seconds end in `_s`, `--no-x` is `x=False`, and
`--compile-cache` is `compile_cache_dir`. Limits are fields of `ServerConfig.limits`, without
`max_`. `python -m forge_serve.cli.reference` generates this page.

`forge-jax serve --help` shows the essential flags. `--help-all` shows every flag.

## Configuration file

`--config FILE` reads flags from a TOML file. Every command accepts it for its own flags:

```toml
model = "Qwen/Qwen3-0.6B"
port = 8001
max-num-seqs = 64          # --max-num-seqs; max_num_seqs is the same key
no-prefix-cache = true     # or, by the field's name: prefix_cache = false
lora = ["sql=adapters/sql", "chat=adapters/chat"]
```

Keys are flags without their dashes, at the top level of the file. The command line overrides the
file. A repeatable flag on the command line replaces the file's whole list. Write "auto" as a
string. A key that is not a flag of the command, or a value of the wrong type, is an error.
"""

_PROFILE_HEAD = """
## Flags of forge-jax profile

`forge-jax profile [MODEL]` ([profiling](profiling.md)) accepts `--logdir DIR` (default `profile`)
and the flags above in the sections Model, KV cache, Batch, Speculation and Device. It also accepts:

"""

_LIMITS_HEAD = """\
These limits apply to each request. If a request exceeds a limit, the server returns 400, or 413 for
a body that is too large. The model's context length limits the number of tokens.

| limit on | default | flag | range of the flag |
|---|---|---|---|
"""

_BATCH_HEAD = """
## Flags of forge-jax batch

`forge-jax batch IN OUT [MODEL]` ([batch.md](batch.md)) accepts the flags above in the sections
Model, KV cache, Batch, Speculation, Device and Limits. It also accepts these server flags:
{server}. Its own flags are:

"""

_ALIASES_HEAD = """
## Names of other engines

Many flags of vLLM, SGLang and other engines are accepted on the command line and in `--config`.
`--help` and `--help-all` do not list them. `LLM` and `EngineConfig.from_options` accept the ones
that configure the engine as keyword arguments, with underscores. The opposite of a switch, such as
`--enable-prefix-caching`, is also accepted.

| flag of another engine | forge-jax flag |
|---|---|
"""

_VALUES_HEAD = """
These values of other engines are converted or rejected:

| flag | value of another engine | forge-jax value |
|---|---|---|
"""

_IMPLIED_HEAD = """
These flags are accepted and have no effect, for the reason in the table:

| flag of another engine | reason |
|---|---|
"""

_REFUSED_HEAD = """
These flags are rejected with the reason in the table:

| flag of another engine | reason |
|---|---|
"""

_CLI_HEAD = """\
# The command line

This page has the `--help-all` output of every command. `--help` shows only the essential flags.
[configuration.md](configuration.md) has the same flags as tables. It also describes the
[configuration file](configuration.md#configuration-file) for `--config` and the
[flag names of other engines](configuration.md#names-of-other-engines) that are accepted.
`python -m forge_serve.cli.reference` generates this page.

Results go to stdout, and everything else goes to stderr. An error is one line on stderr that begins
with `forge-jax: error:` and describes the fix. Every command accepts `--debug`, which adds the
traceback.

| exit status | meaning |
|---|---|
| 0 | success |
| 1 | an error, a problem found by `doctor`, or a failed request of `bench` |
| 2 | invalid command line |
| 130 | interrupted by Ctrl-C |
| 143 | ended by SIGTERM; `serve` shuts down gracefully with status 0 instead |
| 141 | the output pipe was closed, for example by `head`; prints no error |

Model output to a file or pipe is unchanged. On a terminal, control characters are replaced by
visible symbols (`␛` for escape), so a model's output cannot control the terminal. The same applies
to a server's messages.

In `chat`, Ctrl-C stops an answer and Ctrl-D ends the chat. The text of a stopped answer stays in
the conversation. Reasoning is dimmed and is not sent back to the model. The arrow keys recall
earlier input until the chat ends. The history is never written to a file. `--url` connects to any
OpenAI-compatible server. Its key comes from `--api-key-file`, never from the environment.
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
    """Return the flags as Markdown, with one table per section."""
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
    """Yield the tables of other engines' flags."""
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
            yield f"| `{ours[option].flag}` | `{theirs}` | rejected because {_cell(reason)} |\n"
    yield _IMPLIED_HEAD
    for implied in aliases.IMPLIED:
        yield f"| `{implied.flag}` | {_cell(implied.reason)} |\n"
    yield _REFUSED_HEAD
    for name, reason in aliases.REFUSED.items():
        yield f"| `{flag_of(name)}` | {_cell(reason)} |\n"


def _table(section: type) -> list[str]:
    lines = [_row(flag) for flag in flags(section)]
    return ["| flag | default | description |\n|---|---|---|\n", *lines]


def _row(flag: Flag) -> str:
    return f"| `{_usage(flag)}` | `{flag.default_text}` | {_cell(flag.doc)} |\n"


def _limits() -> str:
    """Return the table of all limits, including those without a flag."""
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
