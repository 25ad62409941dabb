"""The command `forge-jax`. Its flags, their help and their defaults are the configuration's fields.

Nothing heavy is imported before the flags have been read.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import forge_jax
from forge_jax.config import (
    BatchConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SpeculationConfig,
)
from forge_jax.errors import ForgeError
from forge_jax.observe.startup import StartupTimes
from forge_jax.profile.config import Workload
from forge_serve import profile_cli
from forge_serve.config import ServerConfig
from forge_serve.limits import Limits

ENGINE_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "KV cache": CacheConfig,
    "batch": BatchConfig,
    "speculation": SpeculationConfig,
    "device": ParallelConfig,
}
SECTIONS: dict[str, type] = {
    **ENGINE_SECTIONS,
    "server": ServerConfig,
    "limits": Limits,
}


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


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="forge-jax", description="An LLM inference engine compiled by JAX/XLA."
    )
    parser.add_argument("--version", action="version", version=f"forge-jax {forge_jax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP, in OpenAI's protocol.",
    )
    _add_sections(serve, SECTIONS)
    profile = commands.add_parser(
        "profile",
        help="trace a model's steps, or compare two traces",
        description=profile_cli.DESCRIPTION,
    )
    profile.add_argument(
        "--logdir", default="profile", metavar="DIR", help="where to (default: profile)"
    )
    _add_sections(profile, {"workload": Workload, **ENGINE_SECTIONS})
    return parser


def _add_sections(parser: argparse.ArgumentParser, sections: dict[str, type]) -> None:
    model = {field.name: field for field in dataclasses.fields(ModelConfig)}["model"]
    parser.add_argument(
        "model",
        nargs="?",
        default=model.default,
        metavar="MODEL",
        help=f"{model.metadata['doc']} (default: {model.default})",
    )
    for title, section in sections.items():
        group = parser.add_argument_group(title)
        for flag in flags(section):
            _add(group, flag)


def main(argv: Sequence[str] | None = None) -> int:
    startup = StartupTimes()
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:2]) == ["profile", profile_cli.DIFF]:
        return _or_error(lambda: profile_cli.diff(argv[2:]))
    options = vars(make_parser().parse_args(argv))
    command = options.pop("command")
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    if command == "profile":
        return _or_error(lambda: profile_cli.record(options))
    gc.disable()  # until the engine is ready: looking for garbage takes a tenth of a start
    try:
        return _or_error(lambda: _serve(options, startup))
    finally:
        gc.enable()


def _serve(options: dict[str, Any], startup: StartupTimes) -> int:
    limits = Limits(**_taken(options, Limits))
    server = ServerConfig(**_taken(options, ServerConfig), limits=limits)
    engine = EngineConfig.from_options(**options)
    from forge_serve.server import serve

    return serve(engine, server, startup)


def _or_error(command: Callable[[], int]) -> int:
    """The exit status of a command, or what is wrong and 1."""
    try:
        return command()
    except ForgeError as error:
        print(f"forge-jax: {error}", file=sys.stderr)
        return 1


def _taken(options: dict[str, Any], section: type) -> dict[str, Any]:
    """Takes the values of a section's flags out of the options."""
    return {flag.name: options.pop(flag.name) for flag in flags(section)}


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    doc = flag.doc.replace("%", "%%")
    if flag.switch:
        action = "store_false" if flag.default else "store_true"
        group.add_argument(flag.flag, dest=flag.name, action=action, help=doc)
        return
    if flag.repeated:
        group.add_argument(
            flag.flag, dest=flag.name, default=[], action="append", metavar=flag.metavar, help=doc
        )
        return
    group.add_argument(
        flag.flag,
        dest=flag.name,
        default=flag.default,
        type=_or_auto(flag.type) if flag.automatic else flag.type,
        choices=flag.choices,
        metavar=flag.metavar,
        help=doc if flag.default is None else f"{doc} (default: {flag.default})",
    )


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


if __name__ == "__main__":
    sys.exit(main())
