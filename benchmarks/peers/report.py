"""Medians, ratios within a round, and the tables made of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.peers.measure import PREFILL

MOST_FOREIGN_CORES = 0.05  # a run during which others used more is noisy
ENOUGH_RUNS = 3  # with fewer quiet ones the least noisy are taken as well


@dataclass(frozen=True, kw_only=True)
class Run:
    """One workload, once, on one engine. `figures` as in `measure.figures`.

    Runs of the same round, attempt and workload have the same prompts.
    """

    shape: str
    round: int
    attempt: int
    engine: str
    workload: str
    figures: dict[str, float]
    foreign_cores: float  # CPU time that other processes used meanwhile
    first_tokens: list[str]

    @property
    def quiet(self) -> bool:
        return self.foreign_cores <= MOST_FOREIGN_CORES

    @property
    def prompts(self) -> tuple[int, int, str]:
        return self.round, self.attempt, self.workload


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of the table: a figure of one workload."""

    title: str
    workload: str
    figure: str


def metrics(batch_sizes: Iterable[int]) -> list[Metric]:
    batches = sorted(set(batch_sizes))
    columns = [
        Metric(title=f"decode {b}", workload=f"batch {b}", figure="decode_tokens_per_s")
        for b in batches
    ]
    columns.append(Metric(title="prefill", workload=PREFILL.name, figure="prefill_tokens_per_s"))
    columns += [
        Metric(title=f"end to end {b}", workload=f"batch {b}", figure="output_tokens_per_s")
        for b in batches
        if b > 1
    ]
    return columns


def usable(runs: Sequence[Run], figure: str) -> list[Run]:
    """The quiet runs that have the figure; the least noisy ones where too few are quiet."""
    having = [run for run in runs if not math.isnan(run.figures.get(figure, math.nan))]
    quiet = [run for run in having if run.quiet]
    if len(quiet) >= ENOUGH_RUNS:
        return quiet
    return sorted(having, key=lambda run: run.foreign_cores)[:ENOUGH_RUNS]


def median(runs: Sequence[Run], figure: str) -> float:
    values = [run.figures[figure] for run in usable(runs, figure)]
    return statistics.median(values) if values else math.nan


def ratio(ours: Sequence[Run], theirs: Sequence[Run], figure: str) -> float:
    """The median, over rounds, of ours over theirs in the same round."""
    by_round = {run.round: run.figures[figure] for run in usable(theirs, figure)}
    pairs = [
        run.figures[figure] / by_round[run.round]
        for run in usable(ours, figure)
        if run.round in by_round
    ]
    return statistics.median(pairs) if pairs else math.nan


def agreement(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """Part of the prompts to which both answer with the same first token.

    Two engines that run the same weights right agree on nearly all; a quantised one on fewer.
    """
    reference = {run.prompts: run.first_tokens for run in theirs}
    pairs = [
        pair
        for run in ours
        if run.prompts in reference
        for pair in zip(run.first_tokens, reference[run.prompts], strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else math.nan


def summary(runs: Sequence[Run], columns: Sequence[Metric]) -> dict[str, Any]:
    """Of one shape: for each engine its medians, and for each of ours its ratios to the peers."""
    engines = list(dict.fromkeys(run.engine for run in runs))
    ours = [name for name in engines if name.startswith("forge-jax")]
    peers = [name for name in engines if name not in ours]
    reference = engines[0]

    def select(engine: str, workload: str | None = None) -> list[Run]:
        return [r for r in runs if r.engine == engine and workload in (None, r.workload)]

    return {
        "median": {
            engine: {c.title: median(select(engine, c.workload), c.figure) for c in columns}
            for engine in engines
        },
        "ratio": {
            f"{our} / {peer}": {
                c.title: ratio(select(our, c.workload), select(peer, c.workload), c.figure)
                for c in columns
            }
            for our in ours
            for peer in peers
        },
        "same_first_token": {
            engine: agreement(select(engine), select(reference)) for engine in engines
        },
        "noisy_runs": sum(not run.quiet for run in runs),
        "runs": len(runs),
    }


def table(shape: str, summary: dict[str, Any], columns: Sequence[Metric]) -> str:
    titles = [column.title for column in columns]
    lines = [
        f"### {shape}: tokens/s, medians",
        "",
        *_rows(["engine", *titles, "same first token"]),
    ]
    for engine, values in summary["median"].items():
        same = summary["same_first_token"][engine]
        lines.append(_row([engine, *(_number(values[t]) for t in titles), f"{100 * same:.0f}%"]))
    if summary["ratio"]:
        lines += ["", "Ratios, medians over rounds:", "", *_rows(["", *titles])]
    for pair, values in summary["ratio"].items():
        lines.append(_row([pair, *(_ratio(values[t]) for t in titles)]))
    lines += ["", f"{summary['noisy_runs']} of {summary['runs']} runs were noisy."]
    return "\n".join(lines)


def _rows(titles: Sequence[str]) -> list[str]:
    return [_row(titles), "|" + "---|" * len(titles)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def as_json(run: Run) -> dict[str, Any]:
    return asdict(run) | {"quiet": run.quiet}


def without_nan(value: Any) -> Any:
    """The same with null for NaN, which JSON has not got."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
