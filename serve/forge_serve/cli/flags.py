"""Command-line flags made from configuration fields, and a parser with one-line errors.

A flag takes its name, help and default from its field, as declared by `forge_jax.config.option`.
Flags of other engines (`forge_serve.cli.aliases`) set the same fields and are hidden from help.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from forge_jax.config import (
    BatchConfig,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
)
from forge_jax.config.aliases import Alias, our_value, refused_value
from forge_jax.config.suggest import did_you_mean, nearest
from forge_jax.errors import ConfigError
from forge_serve.cli.aliases import ALIASES, IMPLIED, OF_BENCH, REFUSED

USAGE_STATUS = 2  # exit status for an invalid command line
HELP_COLUMN = 26  # column at which the help texts start
type Commands = argparse._SubParsersAction[Parser]

ENGINE_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "KV cache": CacheConfig,
    "batch": BatchConfig,
    "speculation": SpeculationConfig,
    "device": ParallelConfig,
}
MODEL_ARGUMENT = "model_argument"  # holds the positional MODEL until `take_model` merges the two
MODEL = {field.name: field for field in dataclasses.fields(ModelConfig)}["model"]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter that keeps the line breaks of descriptions and epilogs."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, max_help_position=HELP_COLUMN, **options)


class Parser(argparse.ArgumentParser):
    """Parser whose errors are one line that refers to the help.

    `--help` shows the essential flags, `--help-all` every flag.
    """

    def __init__(self, **options: Any):
        options = {"formatter_class": HelpFormatter, "allow_abbrev": False, **options}
        super().__init__(**options, add_help=False)
        self.fields: dict[str, Flag] = {}  # by name
        self._details: set[argparse.Action] = set()  # hidden from the short help
        self.add_argument("-h", "--help", action="help", help="show the essential flags and exit")
        self.add_argument(
            "--help-all",
            action=_HelpAll,
            nargs=0,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            help="show every flag and exit (or --help=all)",
        )

    @property
    def options(self) -> Mapping[str, argparse.Action]:
        """Every option string with its action, including hidden ones."""
        return self._option_string_actions

    def add_flags(
        self, title: str | None, flags: Iterable[Flag], *, all_essential: bool = False
    ) -> None:
        """Add flags, in their own group if there is a title.

        Args:
          title: heading of the group; None: no group.
          flags: the flags to add.
          all_essential: show all of them in the short help.
        """
        group = self if title is None else self.add_argument_group(title)
        for flag in flags:
            action = flag.add_to(group)
            self.fields[flag.name] = flag
            if not (all_essential or flag.essential):
                self._details.add(action)

    def add_aliases(self) -> None:
        """Add other engines' names of the flags added so far."""
        for alias in (*ALIASES, *OF_BENCH):
            if alias.option in self.fields:
                _add_alias(self, alias, self.fields[alias.option])
        if not self.fields.keys() >= {"dtype", "max_num_seqs"}:
            return  # the command has no engine
        for implied in IMPLIED:
            if not self.fields.keys() >= set(implied.needs):
                continue
            self.add_argument(
                implied.flag,
                dest="implied",
                action="append_const",
                const=implied.name,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
            )

    def format_help(self, *, everything: bool = False) -> str:
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(
                action
                for action in group._group_actions
                if everything or action not in self._details
            )
            formatter.end_section()
        if self._details and not everything:
            formatter.add_text(f"{len(self._details)} more flags: {self.prog} --help-all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        self._fail(message.removeprefix("argument "), "--help")

    def unknown(self, words: Sequence[str], others: Mapping[str, Parser]) -> NoReturn:
        """Exit with an error about the first word that is no flag or argument.

        Args:
          words: the words that were not parsed.
          others: the parsers of all commands, one of which may have the flag.
        """
        flags = [word.partition("=")[0] for word in words if word.startswith("-") and word != "-"]
        if not flags:
            self.error(f"unexpected argument {words[0]!r}")
        flag = flags[0]
        reason = REFUSED.get(flag.removeprefix("--").replace("-", "_"))
        if reason is not None:
            self.error(f"{flag} is not supported: {reason}")
        elsewhere = [name for name, other in others.items() if flag in other.options]
        if elsewhere:
            self.error(f"{flag} is a flag of {', '.join(elsewhere)}, not of this command")
        self._fail(
            f"unknown flag {flag}{self.did_you_mean(flag)}",
            "--help-all" if self._details else "--help",
        )

    def did_you_mean(self, flag: str) -> str:
        """Return the nearest flag as the end of a sentence, or "" if none is near."""
        found = nearest(flag, [name for name in self.options if name.startswith("--")])
        if found is None:
            return ""
        ours = self.fields.get(self.options[found].dest)
        return f"; did you mean {found if ours is None else ours.flag}?"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        try:
            return super().parse_known_args(args, namespace)
        except ConfigError as error:  # raised by an alias
            self.error(str(error))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        kind = "command" if action.option_strings == [] else "value"
        raise argparse.ArgumentError(
            None if kind == "command" else action,
            f"unknown {kind} {value!r}{did_you_mean(str(value), known)} "
            f"(choose from: {', '.join(known)})",
        )

    def _fail(self, message: str, help_flag: str) -> NoReturn:
        help_of = " ".join(word for word in self.prog.split() if word[0] not in "[<")
        self.exit(USAGE_STATUS, f"forge-jax: error: {message} (see: {help_of} {help_flag})\n")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        parser._print_message(parser.format_help(everything=True), sys.stdout)
        parser.exit()


class Append(argparse.Action):
    """Action that collects values. The command line's values replace a configuration file's."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*([] if before is self.default else before), values])


class Convert(argparse.Action):
    """Action that sets several options from a value in another engine's format."""

    def __init__(self, *, alias: Alias, **options: Any):
        super().__init__(**options)
        self.alias = alias

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        for name, value in self.alias.options(values).items():
            setattr(namespace, name, value)


@dataclass(frozen=True, slots=True)
class Value:
    """Reader of an option's value from the command line or from a configuration file."""

    option: str
    kind: Callable[[Any], Any]
    choices: tuple[str, ...] | None = None
    automatic: bool = False  # accepts "auto", which is None

    def __call__(self, word: str) -> Any:
        if self.automatic and word == "auto":
            return None
        reason = refused_value(self.option, word)
        if reason is not None:
            raise argparse.ArgumentTypeError(f"{word}: {reason}")
        try:
            return our_value(self.option, self.kind(word))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be {self.expected}, not {word!r}") from error

    def of(self, value: Any) -> Any:
        """Return the option's value for a value of a TOML file.

        Raises:
          ConfigError: the type or the value is wrong.
        """
        if self.automatic and value == "auto":
            return None
        types = {int: (int,), float: (int, float)}.get(self.kind, (str,))  # type: ignore[call-overload]
        if type(value) not in types:
            raise ConfigError(f"must be {self.expected}, not {value!r}")
        reason = refused_value(self.option, value)
        if reason is not None:
            raise ConfigError(f"{value}: {reason}")
        value = our_value(self.option, self.kind(value))
        if self.choices is not None and value not in self.choices:
            raise ConfigError(
                f"must be one of {', '.join(self.choices)}, not {value!r}"
                f"{did_you_mean(value, self.choices)}"
            )
        return value

    @property
    def expected(self) -> str:
        kinds = {int: "a whole number", float: "a number"}
        return kinds.get(self.kind, "text") + (' or "auto"' if self.automatic else "")  # type: ignore[call-overload]


def texts_of(value: Any) -> list[str]:
    """Return the value of a repeated option from a file: one string, or a list of strings.

    Raises:
      ConfigError: it is neither.
    """
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"must be a string or a list of strings, not {value!r}")
    return texts


@dataclass(frozen=True, slots=True)
class Flag:
    """Command-line flag of one configuration field."""

    name: str  # name of the field
    flag: str
    doc: str
    default: Any
    type: Callable[[str], Any]
    choices: tuple[str, ...] | None
    switch: bool  # takes no value and inverts the default
    repeated: bool  # may be given several times
    essential: bool = False  # shown in the short help
    value_name: str | None = None  # in the help; None: by type

    @property
    def metavar(self) -> str | None:
        if self.switch or self.choices is not None:
            return None
        return self.value_name or {int: "N", float: "X"}.get(self.type, "TEXT")  # type: ignore[call-overload]

    @property
    def automatic(self) -> bool:
        """True if the flag accepts "auto": a number or choice that is computed at startup."""
        return self.default is None and self.type is not str

    @property
    def value(self) -> Value:
        return Value(self.name, self.type, self.choices, self.automatic)

    def add_to(self, group: argparse._ActionsContainer) -> argparse.Action:
        doc = self.doc.replace("%", "%%")
        if self.switch:
            action = "store_false" if self.default else "store_true"
            return group.add_argument(self.flag, dest=self.name, action=action, help=doc)
        if self.repeated:
            return group.add_argument(
                self.flag,
                dest=self.name,
                default=[],
                action=Append,
                metavar=self.metavar,
                help=doc,
            )
        return group.add_argument(
            self.flag,
            dest=self.name,
            default=self.default,
            type=self.value,
            choices=self.choices,
            metavar=self.metavar,
            help=doc if self.default is None else f"{doc} (default: {self.default})",
        )


def flags(section: type) -> Iterator[Flag]:
    """Yield the flags of one section's fields, in their order."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        flag = field.metadata.get("flag", "--" + field.name.replace("_", "-"))
        if flag is None:
            continue
        kind, choices, repeated = _value_type(hints[field.name])
        yield Flag(
            name=field.name,
            flag=flag,
            doc=field.metadata["doc"],
            default=field.default,
            type=kind,
            choices=choices,
            switch=kind is bool,
            repeated=repeated,
            essential=field.metadata.get("essential", False),
            value_name=field.metadata.get("metavar"),
        )


def chosen(section: type, names: tuple[str, ...]) -> Iterator[Flag]:
    """Return the section's flags whose fields have these names."""
    return (flag for flag in flags(section) if flag.name in names)


def add_sections(
    parser: Parser, sections: Mapping[str, type], *, all_essential: bool = False
) -> None:
    """Add a group of flags for each section."""
    for title, section in sections.items():
        parser.add_flags(title, flags(section), all_essential=all_essential)


def add_model(parser: Parser) -> None:
    """Add the model as the first argument and as a flag. `take_model` merges them."""
    parser.add_argument(
        MODEL_ARGUMENT,
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL.metadata['doc']} (default: {MODEL.default})",
    )
    add_model_flag(parser)


def add_model_flag(parser: Parser) -> None:
    flag = Flag(
        name="model",
        flag="--model",
        doc="the model, as a flag instead of the first argument",
        default=None,
        type=str,
        choices=None,
        switch=False,
        repeated=False,
        essential=True,
    )
    parser.fields[flag.name] = flag
    parser.add_argument(flag.flag, type=flag.value, metavar="MODEL", help=flag.doc)


def take_model(options: dict[str, Any], default: str | None) -> None:
    """Replace the model's argument and flag in the options by one value.

    Args:
      options: the parsed options, which are changed.
      default: the default of the flag, or the configuration file's value.

    Raises:
      ConfigError: both are given.
    """
    argument = options.pop(MODEL_ARGUMENT)
    if argument is not None and options["model"] != default:
        raise ConfigError("MODEL and --model cannot both be set: omit one of them")
    if argument is not None:
        options["model"] = argument
    elif options["model"] is None:
        options["model"] = MODEL.default


def _add_alias(parser: Parser, alias: Alias, flag: Flag) -> None:
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    names = [alias.flag] if alias.short is None else [alias.flag, alias.short]
    if alias.convert is not None:
        nargs = "+" if alias.several else None
        parser.add_argument(
            *names, dest=flag.name, action=Convert, alias=alias, nargs=nargs, **hidden
        )
        return
    if flag.switch:
        on = not alias.inverted
        parser.add_argument(*names, dest=flag.name, action="store_const", const=on, **hidden)
        parser.add_argument(
            alias.negative, dest=flag.name, action="store_const", const=not on, **hidden
        )
        return
    parser.add_argument(*names, dest=flag.name, type=flag.value, choices=flag.choices, **hidden)


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with flags as keys (max-num-seqs = 8); the command line overrides it",
    )


def as_flags(words: Sequence[str]) -> list[str]:
    """Return the words with dashes in flags: `--max_num_seqs` becomes `--max-num-seqs`.

    `--help=all` becomes `--help-all`.
    """
    words = list(words)
    end = words.index("--") if "--" in words else len(words)
    for index, word in enumerate(words[:end]):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            words[index] = name.replace("_", "-") + equals + value
        if word == "--help=all":
            words[index] = "--help-all"
    return words


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")


def taken(options: dict[str, Any], section: type) -> dict[str, Any]:
    """Remove the values of a section's flags from the options and return them."""
    return {flag.name: options.pop(flag.name) for flag in flags(section)}


def _value_type(hint: Any) -> tuple[Callable[[str], Any], tuple[str, ...] | None, bool]:
    """Return a type's conversion from text, its choices, and True if the flag may be repeated."""
    if hint == tuple[str, ...]:
        return str, None, True
    if typing.get_origin(hint) is types.UnionType:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint), False
    assert hint in (bool, int, float, str), f"no flag can hold a {hint}"
    return hint, None, False
