"""Commands `forge-jax profile MODEL` and `forge-jax profile diff A B`."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm

from forge_jax.config import EngineConfig
from forge_jax.tools.profile.config import Workload
from forge_serve.cli.commands.engine import check_model
from forge_serve.cli.exit_status import guarded
from forge_serve.cli.flags import Parser, add_debug

DIFF = "diff"
DESCRIPTION = """\
Trace a model's steps. Decode traces go to DIR/decode, prefill traces to DIR/prefill. Open DIR with
TensorBoard and its profile plugin. `forge-jax profile diff A B` compares two such folders."""


def make_diff_parser() -> Parser:
    parser = Parser(
        prog="forge-jax profile diff",
        usage="forge-jax profile diff A B [options]",
        description="Compare two profiles: a verdict on the step time, the operations with the "
        "largest differences by part of the step, and suggestions.",
    )
    parser.add_argument("before", metavar="A", help="folder with traces, or a .xplane.pb file")
    parser.add_argument("after", metavar="B", help="folder or file to compare with A")
    parser.add_argument(
        "--all", action="store_true", help="also print all tables, with unchanged rows"
    )
    parser.add_argument(
        "--percent", type=float, default=5.0, metavar="X",
        help="minimum change to report, in percent of the time in A (default: 5)",
    )  # fmt: skip
    parser.add_argument(
        "--us", type=float, default=1.0, metavar="X",
        help="minimum change to report, in microseconds per step (default: 1)",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="also write the result to an HTML file")
    parser.add_argument(
        "--logdir",
        metavar="DIR",
        help="also write the result to DIR for TensorBoard (requires the extra `profile`)",
    )
    add_debug(parser)
    return parser


def diff(argv: Sequence[str]) -> int:
    """Print the difference, write the files of the flags, and return the exit status."""
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
    """Trace the workload of the flags and return the exit status.

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

    with logging_redirect_tqdm():
        written = record(config, workload, folder)
    for each in written:
        print(each)
    return 0
