"""`forge-jax compare`: two models, or two settings of one, token by token."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_jax.config import EngineConfig, option
from forge_jax.config.options import flags_of
from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ConfigError, RequestError
from forge_serve.cli.commands.engine import LEFT_OUT, check_model, quiet_logs
from forge_serve.cli.commands.generate import read_stdin
from forge_serve.cli.flags import (
    ENGINE_SECTIONS,
    MODEL,
    Commands,
    Flag,
    add_sections,
    flags,
    taken,
)

DESCRIPTION = """\
Compare two models, or two settings of one model, token by token. Both answer the same prompts. Then
both score A's answers. The report has the KL divergence of the two next-token distributions at each
token. A and B must share a tokenizer. They are loaded one after the other and run with
--deterministic."""
EPILOG = """\
examples:
  forge-jax compare forge-tiny --b quantization=int4 --html report.html
  forge-jax compare Qwen/Qwen3-0.6B Qwen3-0.6B-Q4_K_M.gguf --prompts prompts.txt
  forge-jax compare Qwen/Qwen3-0.6B --b kv-dtype=int8 --prompt - --max-tokens 0 < text.txt"""
PROMPT = "Once upon a time"
ALWAYS = "deterministic"  # on both sides, so this command has no such flag
OF_SIDE = ("lora", "max_lora_rank")  # options of a side, but not flags of this command


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    a: tuple[str, ...] = option(
        (),
        "option of LLM for A only, as NAME=VALUE: dtype=float32, prefix-cache=false, "
        "lora=NAME=FOLDER. May be repeated",
    )
    b: tuple[str, ...] = option(
        (), "option of LLM for B only, such as quantization=int4. May be repeated"
    )
    prompt: tuple[str, ...] = option(
        (), f"prompt, or - to read one from stdin; default: {PROMPT!r}. May be repeated"
    )
    prompts: str | None = option(
        None, "file with one prompt per line, in addition to --prompt", metavar="FILE"
    )
    chat: bool = option(False, "send each prompt as a user message, with the chat template")
    max_tokens: int = option(
        64,
        "maximum number of tokens of an answer, from 0. With 0, no answer is generated, and the "
        "tokens of the prompts are scored",
    )
    temperature: float = option(0.0, "sampling temperature from 0 (greedy) to 100")
    seed: int = option(0, "random seed of both sides")
    json: str | None = option(None, "write the report to this file as JSON", metavar="FILE")
    html: str | None = option(None, "write the report to this file as an HTML page", metavar="FILE")


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare two models or settings, token by token",
        usage="forge-jax compare A [B] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    doc = MODEL.metadata["doc"]
    parser.add_argument("model_a", metavar="A", help=f"the reference: {doc}")
    parser.add_argument("model_b", nargs="?", metavar="B", help="the other model (default: A)")
    add_sections(parser, {"comparison": CompareFlags}, all_essential=True)
    for title, section in ENGINE_SECTIONS.items():
        shared = (flag for flag in flags(section) if flag.name in _of_engine())
        parser.add_flags(title, (flag for flag in shared if flag.name not in OF_SIDE))
    parser.set_defaults(run=run)


def run(options: dict[str, Any]) -> int:
    given = CompareFlags(**taken(options, CompareFlags))
    model_a, model_b = options.pop("model_a"), options.pop("model_b")
    prompts = _prompts(given)
    for file in (given.json, given.html):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{file} cannot be written: its folder does not exist")
    sides = (
        (model_a, {**options, **_only("--a", given.a)}),
        (model_a if model_b is None else model_b, {**options, **_only("--b", given.b)}),
    )
    for model, of_side in sides:  # before anything is loaded
        check_model(_config(model, of_side))
    quiet_logs()
    from forge_jax.tools.compare import Prompts, Side, compare
    from forge_serve.cli.compare.terminal import write

    a, b = (Side(model, _set(of_side), _label(model, of_side)) for model, of_side in sides)
    settings = Prompts(prompts, given.chat, given.max_tokens, given.temperature, given.seed)
    report = compare(a, b, settings)
    write(report)
    _write_files(given, report)
    return 0


def _of_engine() -> Mapping[str, Flag]:
    """Return the flags of both sides' engines, by the name of their option."""
    left_out = {*LEFT_OUT, ALWAYS} - {*OF_SIDE}
    found = (flag for section in ENGINE_SECTIONS.values() for flag in flags(section))
    return {flag.name: flag for flag in found if flag.name not in left_out}


def _only(side: str, words: Sequence[str]) -> dict[str, Any]:
    """Return the options of `--a` or `--b`.

    Raises:
      ConfigError: a name is unknown, or a value is invalid.
    """
    known, found = _of_engine(), dict[str, Any]()
    for word in words:
        name, equals, value = word.partition("=")
        name = name.removeprefix("--").replace("-", "_")
        flag = known.get(name)
        if flag is None:
            raise ConfigError(
                f"{side} {word}: {name!r} is not an engine option{did_you_mean(name, known)} (see: "
                "forge-jax compare --help-all)"
            )
        if not equals:
            raise ConfigError(f"{side} {word}: expected NAME=VALUE")
        found[flag.name] = _value(f"{side} {word}", flag, value)
    return found


def _value(where: str, flag: Flag, word: str) -> Any:
    if flag.switch:
        if word not in ("true", "false"):
            raise ConfigError(f"{where}: must be true or false, not {word!r}")
        return word == "true"
    if flag.repeated:
        return (word,)
    try:
        value = flag.value(word)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if flag.choices is not None and value is not None and value not in flag.choices:
        raise ConfigError(
            f"{where}: must be one of {', '.join(flag.choices)}{did_you_mean(word, flag.choices)}"
        )
    return value


def _prompts(given: CompareFlags) -> tuple[str, ...]:
    """Return the prompts of the flags.

    Raises:
      RequestError: a file cannot be read, or a prompt is empty.
    """
    found = [read_stdin() if text == "-" else text for text in given.prompt]
    if given.prompts is not None:
        try:
            text = Path(given.prompts).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            raise RequestError(f"--prompts {given.prompts} cannot be read: {reason}") from error
        found += [line for line in text.splitlines() if line.strip()]
    if given.prompts is None and not found:
        return (PROMPT,)
    if not found or not all(text.strip() for text in found):
        raise RequestError("a prompt is empty: pass text to --prompt or --prompts")
    return tuple(found)


def _config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    return EngineConfig.from_options(model=model, **{**_set(options), ALWAYS: True})


def _set(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    known = _of_engine()
    empty = {name: () if flag.repeated else flag.default for name, flag in known.items()}
    return {name: value for name, value in options.items() if value != empty[name]}


def _label(model: str, options: Mapping[str, Any]) -> str:
    """Return the model's name and its flags."""
    config = _config(model, options)
    sections = [getattr(config, section.name) for section in dataclasses.fields(config)]
    words = [word for word in flags_of(*sections) if word != f"--{ALWAYS}"]
    from forge_jax.tools.compare.run import short_name

    return " ".join([short_name(model), *words])


def _write_files(given: CompareFlags, report: dict[str, Any]) -> None:
    from forge_serve.cli.compare.page import html

    files = {}
    if given.json is not None:
        files[given.json] = json.dumps(report, ensure_ascii=False, allow_nan=False) + "\n"
    if given.html is not None:
        files[given.html] = html(report)
    for file, content in files.items():
        try:
            Path(file).write_text(content, encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
        print(f"wrote {file}", file=sys.stderr)
