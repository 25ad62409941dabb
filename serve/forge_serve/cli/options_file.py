"""`--config FILE`: the flags of a command in a TOML file."""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path
from typing import Any

from forge_jax.config.suggest import did_you_mean
from forge_jax.errors import ConfigError
from forge_serve.cli.aliases import REFUSED
from forge_serve.cli.flags import MODEL_ARGUMENT, Append, Convert, Parser, Value, texts_of

CONFIG = "config"
_NOT_KEYS = {"help", "help-all", "debug", CONFIG}


def read_options(parser: Parser, file: Path) -> dict[str, Any]:
    """Return the options that a file sets, by their names in the parsed arguments.

    A key is a flag without its dashes (`max-num-seqs` or `max_num_seqs`), a flag of another
    engine, or the name of a field (`prefix_cache = false` is `no-prefix-cache = true`).

    Raises:
      ConfigError: the file cannot be read, a key is not a flag of the command, or a value has the
        wrong type. The message names the file and the key.
    """
    try:
        keys = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # invalid TOML or UTF-8
        raise ConfigError(f"--config {file}: not a TOML file: {error}") from error
    options: dict[str, Any] = {}
    set_by: dict[str, str] = {}
    for key, value in keys.items():
        try:
            found = _options(parser, key, value)
        except ConfigError as error:
            raise ConfigError(f"--config {file}: {key}: {error}") from error
        for name in found:
            if name in set_by and name != "implied":
                raise ConfigError(
                    f"--config {file}: {key} and {set_by[name]} are the same option: set only one "
                    "of them"
                )
            set_by[name] = key
        if "implied" in found:
            found["implied"] = [*options.get("implied", []), *found["implied"]]
        options |= found
    return options


def _options(parser: Parser, key: str, value: Any) -> dict[str, Any]:
    """Return the options that one key sets."""
    name = key.replace("_", "-")
    action = None if name in _NOT_KEYS else parser.options.get("--" + name)
    if action is None:
        flag = parser.fields.get(key.replace("-", "_"))
        if flag is None:
            raise ConfigError(_unknown(parser, name, value))
        if flag.switch:  # the key is the field's name, so the value is the field's
            return {flag.name: _boolean(value)}
        action = parser.options[flag.flag]
    match action:
        case Convert():
            return action.alias.options(value)
        case argparse._AppendConstAction():
            return {action.dest: [action.const] if _boolean(value) else []}
        case argparse._StoreConstAction():
            return {action.dest: action.const if _boolean(value) else not action.const}
        case Append():
            return {action.dest: texts_of(value)}
    if isinstance(value, dict):
        raise ConfigError("must not be a table: put keys at the top level of the file")
    reader = action.type
    if not isinstance(reader, Value):
        assert reader in (None, int, float, str), f"no file can hold a {reader}"
        reader = Value(action.dest, reader or str)  # type: ignore[arg-type]
    return {action.dest: reader.of(value)}


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ConfigError(f"must be true or false, not {value!r}")
    return value


def _unknown(parser: Parser, name: str, value: Any) -> str:
    reason = REFUSED.get(name.replace("-", "_"))
    if reason is not None:
        return f"is not supported: {reason}"
    if isinstance(value, dict):
        return "unknown table: put keys at the top level of the file"
    if name in _NOT_KEYS:
        return "can only be set on the command line"
    named = [flag.removeprefix("--") for flag in parser.options if flag.startswith("--")]
    positional = any(action.dest == name for action in parser._actions)
    if positional or name == MODEL_ARGUMENT:
        return "can only be set on the command line"
    command = parser.prog.split()[-1]
    return f"not a flag of {command}{did_you_mean(name, named)} (see: {parser.prog} --help-all)"
