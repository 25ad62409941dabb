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
from pathlib import Path
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
from forge_serve.batch.config import SERVER_FLAGS, BatchRunConfig
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
BATCH_SECTIONS: dict[str, type] = {
    "files": BatchRunConfig,
    **{name: section for name, section in SECTIONS.items() if section is not ServerConfig},
}
_BATCH_HELP = """\
Answer a file of requests without a server, each line as the server would have answered it.

A line of IN is a line of OpenAI's batch files, or a plain request:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is 2+2?"}]}}
  {"prompt": "Once upon a time", "max_tokens": 32}
  {"id": 7, "messages": [{"role": "user", "content": "What is 2+2?"}], "temperature": 0}
OUT has one line for each, in the order in which they are done; what cannot be answered has
its error there. A run that was ended goes on where it was: give the same command again.
"""


_MODEL = {field.name: field for field in dataclasses.fields(ModelConfig)}["model"]
# What decides the weights that `convert` writes.
CONVERT = ("revision", "dtype", "quantization", "gguf_weights", "kernels", "backend")


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
    convert = commands.add_parser(
        "convert",
        help="write a model's weights as they are served, so that they are read faster",
        description="Write a model's weights as they are served, fused, cast and packed, to a "
        "folder that can be served like any other.",
    )
    convert.add_argument("model", metavar="MODEL", help=_MODEL.metadata["doc"])
    convert.add_argument("out", metavar="OUT", help="a folder that is not there yet, or is empty")
    for section in (ModelConfig, ParallelConfig):
        for flag in flags(section):
            if flag.name in CONVERT:
                _add(convert, flag)
    _add_batch(commands)
    return parser


def _add_sections(parser: argparse.ArgumentParser, sections: dict[str, type]) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=_MODEL.default,
        metavar="MODEL",
        help=f"{_MODEL.metadata['doc']} (default: {_MODEL.default})",
    )
    for title, section in sections.items():
        group = parser.add_argument_group(title)
        for flag in flags(section):
            _add(group, flag)


def _add_batch(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    batch = commands.add_parser(
        "batch",
        help="answer a file of requests",
        usage="forge-jax batch IN OUT [MODEL | --model MODEL] [options]",
        description=_BATCH_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    batch.add_argument("input", type=Path, metavar="IN", help="requests, one in each line")
    batch.add_argument(
        "output", type=Path, metavar="OUT", help="answers; those that it has are not made again"
    )
    batch.add_argument(
        "model_at_end",
        nargs="?",
        metavar="MODEL",
        help=f"{_MODEL.metadata['doc']} (default: {_MODEL.default})",
    )
    batch.add_argument("--model", metavar="MODEL", help="the same as a flag")
    for title, section in BATCH_SECTIONS.items():
        group = batch.add_argument_group(title)
        for flag in flags(section):
            _add(group, flag)
    group = batch.add_argument_group("as of the server")
    for flag in flags(ServerConfig):
        if flag.name in SERVER_FLAGS:
            _add(group, flag)


def main(argv: Sequence[str] | None = None) -> int:
    startup = StartupTimes()
    argv = sys.argv[1:] if argv is None else argv
    if list(argv[:2]) == ["profile", profile_cli.DIFF]:
        return _or_error(lambda: profile_cli.diff(argv[2:]))
    parser = make_parser()
    options = vars(parser.parse_args(argv))
    command = options.pop("command")
    if command == "convert":
        return _convert(options.pop("out"), options)
    if command == "batch":
        at_end = options.pop("model_at_end")
        if at_end is not None and options["model"] is not None:
            parser.error("MODEL and --model: give one of them")
        options["model"] = at_end or options["model"] or ModelConfig.model
        return _batch(options)
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


def _convert(out: str, options: dict[str, Any]) -> int:
    try:
        config = EngineConfig.from_options(**options)
        from forge_jax.convert import convert, summary

        print(summary(convert(config, out)))
        return 0
    except ForgeError as error:
        print(f"forge-jax: {error}", file=sys.stderr)
        return 1


def _batch(options: dict[str, Any]) -> int:
    gc.disable()  # until the engine is ready, as `serve` has it
    try:
        config = BatchRunConfig(
            input=options.pop("input"),
            output=options.pop("output"),
            **_taken(options, BatchRunConfig),
        )
        limits = Limits(**_taken(options, Limits))
        server = ServerConfig(**{n: options.pop(n) for n in SERVER_FLAGS}, limits=limits)
        engine = EngineConfig.from_options(**options)
        from forge_serve.batch.run import batch

        return batch(engine, server, config)
    except ForgeError as error:
        print(f"forge-jax: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # while the model was loaded
        return 130
    finally:
        gc.enable()


def _taken(options: dict[str, Any], section: type) -> dict[str, Any]:
    """Takes the values of a section's flags out of the options."""
    return {flag.name: options.pop(flag.name) for flag in flags(section)}


def _add(group: argparse._ActionsContainer, flag: Flag) -> None:
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
