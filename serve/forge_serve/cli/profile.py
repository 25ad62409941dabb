"""The commands `forge-jax profile MODEL` and `forge-jax profile diff A B`."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_jax.config import EngineConfig
from forge_jax.tools.profile.config import Workload
from forge_serve.cli.commands.engine import check_model
from forge_serve.cli.exit_status import guarded
from forge_serve.cli.flags import Parser, add_debug

DIFF = "diff"
DESCRIPTION = """\
Trace a model's steps: decodes only into DIR/decode, prompts only into DIR/prefill. TensorBoard with
its profile plugin opens DIR. `forge-jax profile diff A B` compares two such folders."""


def make_diff_parser() -> Parser:
    parser = Parser(
        prog="forge-jax profile diff",
        usage="forge-jax profile diff A B [options]",
        description="What got slower or faster from one profile to another, appeared or vanished.",
    )
    parser.add_argument("before", metavar="A", help="a folder with traces, or a .xplane.pb file")
    parser.add_argument("after", metavar="B", help="another")
    parser.add_argument("--all", action="store_true", help="print what has not changed, too")
    parser.add_argument(
        "--percent", type=float, default=5.0, metavar="X",
        help="the least change, in per cent of what was before (default: 5)",
    )  # fmt: skip
    parser.add_argument(
        "--us", type=float, default=1.0, metavar="X",
        help="and in microseconds per step (default: 1)",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="write the same as one HTML file")
    parser.add_argument(
        "--logdir", metavar="DIR", help="write it for TensorBoard (the extra `profile`)"
    )
    add_debug(parser)
    return parser


def diff(argv: Sequence[str]) -> int:
    """Prints the difference and writes what the flags ask for. Returns the exit status."""
    parser = make_diff_parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.unknown(unknown, {})
    return guarded(lambda: _diff(options), debug=options.debug)


def _diff(options: argparse.Namespace) -> int:
    from forge_jax.tools.profile.files import compare_files

    found = compare_files(
        Path(options.before),
        Path(options.after),
        percent=options.percent,
        us=options.us,
        html_file=None if options.html is None else Path(options.html),
        logdir=None if options.logdir is None else Path(options.logdir),
        everything=options.all,
    )
    print(found, end="")
    return 0


def record(options: dict[str, Any]) -> int:
    """Traces what the flags ask for. Returns the exit status.

    Raises:
      ForgeError: the model cannot be loaded, or the workload does not fit.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("jax").setLevel(logging.WARNING)
    folder = Path(options.pop("logdir"))
    names = [field.name for field in dataclasses.fields(Workload)]
    workload = Workload(**{name: options.pop(name) for name in names})
    config = EngineConfig.from_options(**options)
    check_model(config)
    from forge_jax.tools.profile.workload import record

    for written in record(config, workload, folder):
        print(written)
    return 0
