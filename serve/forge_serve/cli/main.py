"""Entry point of `forge-jax`: the parser of all commands and the short commands themselves.

Heavy imports wait until the flags have been parsed. Longer commands are in `commands/`.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import forge_jax
from forge_jax.config import EngineConfig, ModelConfig, ParallelConfig
from forge_jax.config.aliases import check_implied
from forge_jax.host.exits import leave
from forge_jax.step.targets import TARGETS
from forge_jax.telemetry.startup import StartupTimes
from forge_jax.tools.profile.config import Workload
from forge_serve.batch.config import SERVER_FLAGS, BatchRunConfig
from forge_serve.cli import profile as profile_cli
from forge_serve.cli.commands import bench, chat, compare, doctor, generate
from forge_serve.cli.commands.engine import check_model, quiet_logs
from forge_serve.cli.exit_status import INTERRUPTED, guarded
from forge_serve.cli.flags import (
    ENGINE_SECTIONS,
    MODEL,
    MODEL_ARGUMENT,
    Commands,
    Parser,
    add_config,
    add_debug,
    add_model,
    add_model_flag,
    add_sections,
    as_flags,
    chosen,
    take_model,
    taken,
)
from forge_serve.cli.options_file import read_options
from forge_serve.config import ServerConfig
from forge_serve.limits import Limits

SECTIONS: dict[str, type] = {
    **ENGINE_SECTIONS,
    "server": ServerConfig,
    "limits": Limits,
}
BATCH_SECTIONS: dict[str, type] = {
    name: section for name, section in SECTIONS.items() if section is not ServerConfig
}
# Options that determine the weights that `convert` writes.
CONVERT = (
    *("revision", "dtype", "quantization", "gguf_weights", "kernels", "backend"),
    *("tensor_parallel", "expert_parallel"),
)
_HELP = "LLM inference engine compiled by JAX/XLA, with an OpenAI-compatible server."
_EPILOG = """\
MODEL is a folder, a .gguf file, a Hugging Face ID, or forge-tiny, which is bundled.

  forge-jax serve                                 serve forge-tiny on 127.0.0.1:8000
  forge-jax chat Qwen/Qwen3-0.6B                  chat with a model, without a server
  forge-jax generate forge-tiny "Once upon a"     continue a text
  forge-jax doctor                                check the installation

Run forge-jax COMMAND --help for the options of a command."""
_SERVE_HELP = """\
Serve a model with an OpenAI-compatible HTTP API.
On SIGTERM or Ctrl-C, running requests finish before the server exits. The first line on stdout has
the server's URL and a curl command to try."""
_CONVERT_HELP = """\
Convert a model's weights to the format used for serving (fused, cast and packed). The output folder
can be served like any other model folder and loads faster."""
_COMPILE_HELP = """\
Compile all executables of a model, and write them to a folder. To load them, run serve with the
same options and --compile-cache FOLDER. It then neither traces nor compiles. Weights are not read.
With --target, no GPU is needed."""
_BATCH_HELP = """\
Run a batch file without a server. Responses are the same as the server's.

Each line of IN is a request in OpenAI's batch file format, or a plain request:
  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
   "body": {"messages": [{"role": "user", "content": "What is 2+2?"}]}}
  {"prompt": "Once upon a time", "max_tokens": 32}
  {"id": 7, "messages": [{"role": "user", "content": "What is 2+2?"}], "temperature": 0}
OUT has one line per request, in completion order. The line of a failed request has its error.
To resume an interrupted run, run the same command again."""


def make_parser() -> Parser:
    parser = Parser(
        prog="forge-jax", usage="forge-jax COMMAND ...", description=_HELP, epilog=_EPILOG
    )
    parser.add_argument("--version", action="version", version=f"forge-jax {forge_jax.__version__}")
    commands: Commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog="forge-jax"
    )
    _add_serve(commands)
    chat.add_to(commands)
    generate.add_to(commands)
    _add_batch(commands)
    bench.add_to(commands)
    compare.add_to(commands)
    _add_profile(commands)
    _add_convert(commands)
    _add_compile(commands)
    doctor.add_to(commands)
    for command in subparsers(parser).values():
        add_config(command)
        add_debug(command)
        command.add_aliases()
    return parser


def subparsers(parser: Parser) -> Mapping[str, Parser]:
    """Return the parsers of the commands, by name."""
    assert parser._subparsers is not None
    [commands] = parser._subparsers._group_actions
    assert isinstance(commands.choices, Mapping)
    return commands.choices


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
      argv: the words after `forge-jax`. Default: this process's arguments; an interrupted command
        then ends the process at once.

    Raises:
      SystemExit: for `--help`, `--version` and an invalid command line.
    """
    if argv is not None:
        return _run(list(argv))
    status = _run(sys.argv[1:])
    if status == INTERRUPTED:  # executables may still be compiling
        leave(status)
    return status


def _run(argv: list[str]) -> int:
    startup = StartupTimes()
    argv = as_flags(argv)
    if argv[:2] == ["profile", profile_cli.DIFF]:
        return profile_cli.diff(argv[2:])
    parser = make_parser()
    options = _parsed(parser, argv)

    def command() -> int:
        given = _with_file(parser, argv, options)
        run = given.pop("run")
        return _serve(given, startup) if run is _serve else run(given)

    return guarded(command, debug=options["debug"])


def _parsed(parser: Parser, argv: list[str]) -> dict[str, Any]:
    """Return the values of all flags. An invalid command line ends the process."""
    namespace, unknown = parser.parse_known_args(argv)
    options = vars(namespace)
    if unknown:
        commands = subparsers(parser)
        commands[options["command"]].unknown(unknown, commands)
    return options


def _with_file(parser: Parser, argv: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with those of the `--config` file as defaults of the command line.

    Raises:
      ConfigError: the file or a combination of options is wrong.
    """
    command = subparsers(parser)[options["command"]]
    if options["config"] is not None:
        command.set_defaults(**read_options(command, options["config"]))
        options = _parsed(parser, argv)
    for name in ("debug", "config", "command"):
        del options[name]
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    check_implied(options.pop("implied", ()), lambda option: options.get(option) not in (None, ()))
    if MODEL_ARGUMENT in options:
        take_model(options, command.options["--model"].default)
    return options


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        usage="forge-jax serve [MODEL] [options]",
        description=_SERVE_HELP,
    )
    add_model(serve)
    add_sections(serve, SECTIONS)
    serve.set_defaults(run=_serve)


def _add_batch(commands: Commands) -> None:
    batch = commands.add_parser(
        "batch",
        help="run a batch file",
        usage="forge-jax batch IN OUT [MODEL | --model MODEL] [options]",
        description=_BATCH_HELP,
    )
    batch.add_argument("input", type=Path, metavar="IN", help="batch file: one request per line")
    batch.add_argument(
        "output", type=Path, metavar="OUT", help="output file; requests already in it are skipped"
    )
    batch.add_argument(
        MODEL_ARGUMENT,
        nargs="?",
        metavar="MODEL",
        help=f"{MODEL.metadata['doc']} (default: {MODEL.default})",
    )
    add_model_flag(batch)
    add_sections(batch, {"files": BatchRunConfig}, all_essential=True)
    add_sections(batch, BATCH_SECTIONS)
    batch.add_flags("same as serve", chosen(ServerConfig, SERVER_FLAGS))
    batch.set_defaults(run=_batch)


def _add_profile(commands: Commands) -> None:
    profile = commands.add_parser(
        "profile",
        help="trace a model's steps, or compare two traces",
        usage="forge-jax profile [MODEL] [options]\n       forge-jax profile diff A B [options]",
        description=profile_cli.DESCRIPTION,
    )
    add_model(profile)
    profile.add_argument(
        "--logdir", default="profile", metavar="DIR", help="output folder (default: profile)"
    )
    add_sections(profile, {"workload": Workload}, all_essential=True)
    add_sections(profile, ENGINE_SECTIONS)
    profile.set_defaults(run=profile_cli.record)


def _add_convert(commands: Commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert a model's weights so that they load faster",
        usage="forge-jax convert MODEL OUT [options]",
        description=_CONVERT_HELP,
    )
    convert.add_argument("model", metavar="MODEL", help=MODEL.metadata["doc"])
    convert.add_argument("out", metavar="OUT", help="output folder: new or empty")
    for section in (ModelConfig, ParallelConfig):
        convert.add_flags(None, chosen(section, CONVERT), all_essential=True)
    convert.set_defaults(run=_convert)


def _add_compile(commands: Commands) -> None:
    compile_ = commands.add_parser(
        "compile",
        help="compile a model's executables before it is served",
        usage="forge-jax compile [MODEL] --output FOLDER [options]",
        description=_COMPILE_HELP,
    )
    add_model(compile_)
    compile_.add_argument(
        "--output", required=True, metavar="FOLDER", help="output folder: new or empty"
    )
    compile_.add_argument(
        "--target",
        choices=(*TARGETS, "cpu"),
        help="device to compile for; this machine need not have it (default: the device that "
        "--backend and --device select)",
    )
    add_sections(compile_, ENGINE_SECTIONS)
    compile_.set_defaults(run=_compile)


def _serve(options: dict[str, Any], startup: StartupTimes) -> int:
    gc.disable()  # until the engine is ready: garbage collection takes a tenth of the startup
    try:
        limits = Limits(**taken(options, Limits))
        server = ServerConfig(**taken(options, ServerConfig), limits=limits)
        engine = EngineConfig.from_options(**options, saved_executables=True)
        if not server.fake:
            check_model(engine)
        from forge_serve.server.process import serve

        return serve(engine, server, startup)
    finally:
        gc.enable()


def _convert(options: dict[str, Any]) -> int:
    out = options.pop("out")
    config = EngineConfig.from_options(**options)
    check_model(config)
    from forge_jax.tools.convert import convert, summary

    print(summary(convert(config, out)))
    return 0


def _compile(options: dict[str, Any]) -> int:
    out, target = options.pop("output"), options.pop("target")
    config = EngineConfig.from_options(**options)
    check_model(config)
    quiet_logs()
    from forge_jax.tools.compile import compile_bundle, summary

    print(summary(compile_bundle(config, out, target)))
    return 0


def _batch(options: dict[str, Any]) -> int:
    gc.disable()  # until the engine is ready, as in `_serve`
    try:
        config = BatchRunConfig(
            input=options.pop("input"),
            output=options.pop("output"),
            **taken(options, BatchRunConfig),
        )
        limits = Limits(**taken(options, Limits))
        server = ServerConfig(**{n: options.pop(n) for n in SERVER_FLAGS}, limits=limits)
        if options["itl_target_ms"] is None:
            options["itl_target_ms"] = 0  # inter-token latency is irrelevant for batch files
        engine = EngineConfig.from_options(**options, saved_executables=True)
        if not server.fake:
            check_model(engine)
        from forge_serve.batch.run import batch

        return batch(engine, server, config)
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
