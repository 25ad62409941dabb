"""Code shared by all benchmarks: arguments, turns and ratios, reports in JSON and Markdown."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from forge_jax.config import EngineConfig
from forge_jax.errors import ConfigError, ForgeError
from forge_jax.host.progress import progress_bar
from forge_serve.bench import machine
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import median


def parser(
    benchmark: str, description: str, *, model: str | None = None, rounds: int | None = None
) -> argparse.ArgumentParser:
    """Return a parser with `--output`, and with `--model` and `--rounds` if they have a default."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{benchmark}", description=description
    )
    if model is not None:
        made.add_argument("--model", default=model, help=f"model to run (default {model})")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help=f"default {rounds}")
    made.add_argument("--output", type=Path, help="write the report here as JSON")
    return made


def options(
    parser: argparse.ArgumentParser | argparse._ArgumentGroup,
    *flags: tuple[str, Callable[[str], Any], Any, str],
) -> None:
    """Add flags by name, type, default and help. The help shows a default that is not None."""
    for flag, kind, default, text in flags:
        listed = ",".join(map(str, default)) if isinstance(default, list | tuple) else default
        shown = text if default is None else f"{text} (default: {listed})"
        parser.add_argument(flag, type=kind, default=default, help=shown)


def engine_config_error(**options: Any) -> str | None:
    """Return the reason why this engine rejects the options, or None if it accepts them."""
    try:
        EngineConfig.from_options(**options)
    except ConfigError as error:
        return str(error)
    return None


def turns[T](sides: Sequence[T], rounds: int, name: str | None = None) -> Iterator[tuple[int, T]]:
    """Yield (round, side): every side in each round, each round starting with the next side."""
    with progress_bar(total=rounds * len(sides), desc=name, unit="runs") as bar:
        for round_ in range(rounds):
            first = round_ % len(sides)
            for side in (*sides[first:], *sides[:first]):
                yield round_, side
                bar.update()


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the ratios within rounds, because a slow moment affects both sides."""
    return median([x / y for x, y in zip(values, base, strict=True)])


def new(benchmark: str, **body: Any) -> dict[str, Any]:
    """Return a report: benchmark, date, machine and versions, then its own figures."""
    return {"benchmark": benchmark, **machine.describe(), **body}


def write(report: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def publish(
    benchmark: str,
    args: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
) -> int:
    """Measure, print the report, and write it to `args.output` if given.

    Returns:
      The exit status: 1 after an error, which is printed as one line.
    """
    try:
        if getattr(args, "rounds", 1) < 1:
            raise BenchmarkError(f"--rounds must be at least 1, not {args.rounds}")
        report = new(benchmark, **measure())
        if args.output is not None:
            write(report, args.output)
    except (BenchmarkError, ForgeError, OSError) as error:
        print(f"{benchmark}: {error}", file=sys.stderr)
        return 1
    print(markdown(report))
    return 0


def pair(values: dict[str, float] | None, digits: int = 0) -> str:
    """Return p50 and p99 as text."""
    return "-" if values is None else " / ".join(number(values[p], digits) for p in ("p50", "p99"))


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def heading(report: dict[str, Any]) -> str:
    """Return one line with the date and the machine."""
    versions = report["versions"]
    stack = f", jax {versions['jax']}" if "jax" in versions else ""
    return f"{report['date']}, {cpu(report)}, {report['cores']} cores{stack}"


def cpu(report: dict[str, Any]) -> str:
    sets = " ".join(report.get("instruction_sets", ()))
    return f"{report['cpu']} ({sets})" if sets else report["cpu"]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
