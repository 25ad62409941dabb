"""Command-line flags that are fields of the configuration, and a parser whose errors are one line.

A flag's name, help and default are its field's: `forge_jax.config.option` says how they are noted.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from forge_jax.config import (
    BatchConfig,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
)

USAGE_STATUS = 2  # of a command line that cannot be read
HELP_COLUMN = 26  # where the words about a flag begin
type Commands = argparse._SubParsersAction[Parser]

ENGINE_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "KV cache": CacheConfig,
    "batch": BatchConfig,
    "speculation": SpeculationConfig,
    "device": ParallelConfig,
}
MODEL = {field.name: field for field in dataclasses.fields(ModelConfig)}["model"]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """What stands before and after the flags stays as it is written."""

    def __init__(self, prog: str, **options: Any):
        super().__init__(prog, max_help_position=HELP_COLUMN, **options)


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and where to read on."""

    def __init__(self, **options: Any):
        super().__init__(**{"formatter_class": HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        help_of = " ".join(word for word in self.prog.split() if word[0] not in "[<")
        self.exit(USAGE_STATUS, f"forge-jax: error: {message} (see: {help_of} --help)\n")


@dataclass(frozen=True, slots=True)
class Flag:
    """One field of the configuration as the command line knows it."""

    name: str  # of the field
    flag: str
    doc: str
    default: Any
    type: Callable[[str], Any]
    choices: tuple[str, ...] | None
    switch: bool  # takes no value and inverts the default
    repeated: bool  # may be given several times

    @property
    def metavar(self) -> str | None:
        if self.switch or self.choices is not None:
            return None
        return {int: "N", float: "X"}.get(self.type, "TEXT")  # type: ignore[call-overload]

    @property
    def automatic(self) -> bool:
        """Whether it takes "auto": a number that is found at start unless it is given."""
        return self.default is None and self.type is not str

    @property
    def default_text(self) -> str:
        if self.switch:
            return "off"
        if self.default is None:
            return "auto" if self.automatic else "not set"
        if self.repeated:
            return "none"
        return str(self.default)

    def add_to(self, group: argparse._ActionsContainer) -> None:
        doc = self.doc.replace("%", "%%")
        if self.switch:
            action = "store_false" if self.default else "store_true"
            group.add_argument(self.flag, dest=self.name, action=action, help=doc)
            return
        if self.repeated:
            group.add_argument(
                self.flag,
                dest=self.name,
                default=[],
                action="append",
                metavar=self.metavar,
                help=doc,
            )
            return
        group.add_argument(
            self.flag,
            dest=self.name,
            default=self.default,
            type=_or_auto(self.type) if self.automatic else self.type,
            choices=self.choices,
            metavar=self.metavar,
            help=doc if self.default is None else f"{doc} (default: {self.default})",
        )


def flags(section: type) -> Iterator[Flag]:
    """The flags of one section's fields, in their order."""
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
        )


def chosen(section: type, names: tuple[str, ...]) -> Iterator[Flag]:
    """Those of a section's flags whose fields have these names."""
    return (flag for flag in flags(section) if flag.name in names)


def add_sections(parser: Parser, sections: Mapping[str, type]) -> None:
    """A group of flags for each section."""
    for title, section in sections.items():
        group = parser.add_argument_group(title)
        for flag in flags(section):
            flag.add_to(group)


def add_model(parser: Parser, **options: Any) -> None:
    """The positional MODEL, which may be left out."""
    parser.add_argument(
        "model",
        nargs="?",
        default=MODEL.default,
        metavar="MODEL",
        help=f"{MODEL.metadata['doc']} (default: {MODEL.default})",
        **options,
    )


def add_debug(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--debug", action="store_true", help="show where an error comes from")


def taken(options: dict[str, Any], section: type) -> dict[str, Any]:
    """Takes the values of a section's flags out of the options."""
    return {flag.name: options.pop(flag.name) for flag in flags(section)}


def _or_auto(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        return None if text == "auto" else kind(text)

    parse.__name__ = getattr(kind, "__name__", "value")  # argparse names it in its message
    return parse


def _value_type(hint: Any) -> tuple[Callable[[str], Any], tuple[str, ...] | None, bool]:
    """How the text of a flag becomes a value of this type, which values there are, and whether
    there may be several.
    """
    if hint == tuple[str, ...]:
        return str, None, True
    if typing.get_origin(hint) is types.UnionType:
        (hint,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
    if typing.get_origin(hint) is Literal:
        return str, typing.get_args(hint), False
    assert hint in (bool, int, float, str), f"no flag can hold a {hint}"
    return hint, None, False
