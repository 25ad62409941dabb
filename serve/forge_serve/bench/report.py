"""Reports of `forge-jax bench`: tables and bars for a terminal, and comparisons of two reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_serve.bench.errors import BenchmarkError

WIDTH = 100  # columns of a terminal
BAR = 44
LATENCIES = {
    "ttft_ms": "time to first token (TTFT)",
    "itl_ms": "inter-token latency (ITL)",
    "tpot_ms": "time per output token (TPOT)",
    "e2e_ms": "request latency",
}
PERCENTILES = ("p50", "p95", "p99")
THROUGHPUTS = {
    "requests_per_s": ("request throughput, requests/s", "{:,.2f}"),
    "output_tokens_per_s": ("output throughput, tokens/s", "{:,.1f}"),
    "total_tokens_per_s": ("total throughput, tokens/s", "{:,.1f}"),
}

type Report = Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure that charts show."""

    title: str
    key: str
    percentile: str | None
    higher_is_better: bool

    def of(self, run: Mapping[str, Any]) -> float | None:
        value = run[self.key]
        if self.percentile is None or value is None:
            return value
        return value[self.percentile]


FIGURES = (
    Figure("output throughput, tokens/s", "output_tokens_per_s", None, True),
    Figure("TTFT p50, ms", "ttft_ms", "p50", False),
    Figure("ITL p50, ms", "itl_ms", "p50", False),
    Figure("ITL p99, ms", "itl_ms", "p99", False),
)


def read_report(path: Path) -> Report:
    """Return a report that `--save` wrote.

    Raises:
      BenchmarkError: the file cannot be read, or is no such report.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchmarkError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise BenchmarkError(f"{path}: not a report of forge-jax bench: {error}") from error
    if not isinstance(report, dict) or report.get("benchmark") != "bench":
        raise BenchmarkError(f"{path}: not a report of forge-jax bench: write one with --save")
    try:
        comparison(report, report)
        table(report)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BenchmarkError(
            f"{path}: incomplete, or the report of an earlier version: write one with --save"
        ) from error
    return report


def load_name(run: Mapping[str, Any]) -> str:
    """Return the load of a run: "4 at once", "2 requests/s", or "own arrivals" of a trace."""
    rate, concurrency = run["request_rate"], run["concurrency"]
    names = [] if rate is None else [f"{rate:g} requests/s"]
    if concurrency is not None:
        names.append(f"{concurrency} at once")
    return ", ".join(names) or "own arrivals"


def heading(report: Report) -> str:
    workload = report["workload"]
    if workload["dataset_name"] == "random":
        first = report["runs"][0]
        what = f"random prompts of {first['input_len']} tokens, {first['output_len']} output tokens"
    else:
        what = f"{workload['dataset_name']} data set {workload['dataset_file']}"
    jax = report["versions"].get("jax", "not installed")
    return (
        f"{measured(report)}: {what}\n{report['cpu']}, {report['cores']} cores, jax {jax}, "
        f"{report['date']}"
    )


def measured(report: Report) -> str:
    """Return the model with its flags, or with the URL of its server."""
    if "url" in report:
        return f"{report['model']} at {report['url']}"
    return " ".join([report["model"], *report["flags"]])


def table(report: Report) -> str:
    """Return the report as tables of at most `WIDTH` columns: figures by row, loads by column."""
    rows = _rows(report["runs"])
    label = max(len(row[0]) for row in rows)
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[1:]]
    lines = [heading(report)]
    for columns in _blocks(widths, WIDTH - label):
        lines.append("")
        for name, *cells in rows:
            shown = "".join(f"  {cells[i].rjust(widths[i])}" for i in columns)
            lines.append(f"{name.ljust(label)}{shown}".rstrip())
    for run in report["runs"]:
        lines += [f"error: {error} ({count} times)" for error, count in run["errors"].items()]
    return "\n".join(lines)


def _rows(runs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    rows = [
        ["load", *map(load_name, runs)],
        ["completed requests", *(f"{run['completed']} of {run['requests']}" for run in runs)],
        ["duration, s", *(f"{run['wall_s']:,.2f}" for run in runs)],
    ]
    for key, (name, form) in THROUGHPUTS.items():
        rows.append([name, *(form.format(run[key]) for run in runs)])
    for key, name in LATENCIES.items():
        for percentile in PERCENTILES:
            values = (None if run[key] is None else run[key][percentile] for run in runs)
            cells = ("-" if value is None else f"{value:,.2f}" for value in values)
            rows.append([f"{name} {percentile}, ms", *cells])
    return rows


def _blocks(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yield the indices of columns that fit next to each other."""
    block: list[int] = []
    for i in range(len(widths)):
        if block and sum(2 + widths[j] for j in (*block, i)) > room:
            yield block
            block = []
        block.append(i)
    yield block


@dataclass(frozen=True)
class Pair:
    """A figure at one load: the saved value, if there is one, and the new value."""

    load: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """The new value in multiples of the saved one."""
        return self.after / self.before if self.before and self.after is not None else None


def pairs(figure: Figure, report: Report, saved: Report | None) -> list[Pair]:
    """Return a figure at each load of the new report."""
    before = {load_name(run): figure.of(run) for run in saved["runs"]} if saved else {}
    loads = ((load_name(run), figure.of(run)) for run in report["runs"])
    return [Pair(load, before.get(load), after) for load, after in loads]


def differences(report: Report, saved: Report) -> list[str]:
    """Return the conditions in which two reports differ, as lines."""
    then, now = _conditions(saved), _conditions(report)
    return [
        f"- {name}: {then.get(name, 'none')} saved, {now.get(name, 'none')} now"
        for name in dict.fromkeys((*then, *now))
        if then.get(name) != now.get(name)
    ]


def _conditions(report: Report) -> dict[str, str]:
    """Return what must be equal for a fair comparison, without unset flags."""
    groups = {**report["workload"], **report["versions"]}
    alone = {name: report[name] for name in ("model", "context", "cpu", "cores")}
    return {name: str(value) for name, value in (alone | groups).items() if value is not None}


def comparison(report: Report, saved: Report, *, blocks: bool = True) -> str:
    """Return bars of the saved and the new figures, for a terminal.

    Args:
      blocks: draws bars of block characters. Otherwise they are ASCII.

    Raises:
      BenchmarkError: the reports have no load in common.
    """
    lines = []
    for figure in FIGURES:
        found = [each for each in pairs(figure, report, saved) if each.ratio is not None]
        if not found:
            continue
        better = "higher" if figure.higher_is_better else "lower"
        lines += ["", f"{figure.title} ({better} is better)"]
        most = max(max(each.before or 0, each.after or 0) for each in found)
        loads = max(len(each.load) for each in found)
        for each in found:
            for name, value in (("saved", each.before or 0.0), ("now", each.after or 0.0)):
                load = each.load if name == "saved" else ""
                bar = ("█" if blocks else "#") * max(1, round(BAR * value / most))
                start = f"{load.rjust(loads)}  {name.ljust(5)}  {bar.ljust(BAR)}"
                ratio = f"  {each.ratio:.2f}x" if name == "now" else ""
                lines.append(f"{start}  {value:>10,.2f}{ratio}")
    if not lines:
        raise BenchmarkError("the saved report has no load in common with this one")
    note = "Both are single measurements. To see how much they vary, repeat them."
    unequal = differences(report, saved)
    if unequal:
        note = "\n".join(["The conditions differ, so the figures may not be comparable:", *unequal])
    sides = [f"saved: {measured(saved)}, {saved['date']}", f"now:   {measured(report)}"]
    return "\n".join([*sides, *lines, "", note])
