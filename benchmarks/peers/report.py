"""Medians, ratios within a round, limits of the machine, and their tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import report as reports
from benchmarks.peers import limits
from benchmarks.peers.measure import Workload
from benchmarks.peers.suites import Metric, Suite

MOST_FOREIGN_CORES = 0.05  # CPU time of other processes; a run with more is noisy
ENOUGH_RUNS = 3  # with fewer quiet runs, the least noisy ones count too


@dataclass(frozen=True, kw_only=True)
class Run:
    """One workload, once, on one engine; `figures` as in `measure.figures`.

    Runs of the same round, attempt and workload have the same prompts.
    """

    shape: str
    round: int
    attempt: int
    engine: str
    workload: str
    figures: dict[str, float]
    foreign_cores: float  # CPU time of other processes during the run
    first_tokens: list[str]

    @property
    def quiet(self) -> bool:
        return self.foreign_cores <= MOST_FOREIGN_CORES

    @property
    def prompts(self) -> tuple[int, int, str]:
        return self.round, self.attempt, self.workload


def usable(runs: Sequence[Run], figure: str) -> list[Run]:
    """Return the quiet runs that have the figure, or the least noisy ones if too few are quiet."""
    having = [run for run in runs if not math.isnan(run.figures.get(figure, math.nan))]
    quiet = [run for run in having if run.quiet]
    if len(quiet) >= ENOUGH_RUNS:
        return quiet
    return sorted(having, key=lambda run: run.foreign_cores)[:ENOUGH_RUNS]


def median(runs: Sequence[Run], figure: str) -> float:
    values = [run.figures[figure] for run in usable(runs, figure)]
    return statistics.median(values) if values else math.nan


def ratio(ours: Sequence[Run], theirs: Sequence[Run], figure: str) -> float:
    """Return the median ratio of ours to theirs within rounds, or NaN if theirs are all 0."""
    by_round = {run.round: run.figures[figure] for run in usable(theirs, figure)}
    pairs = [
        run.figures[figure] / by_round[run.round]
        for run in usable(ours, figure)
        if by_round.get(run.round)  # a number of failed requests may be 0
    ]
    return statistics.median(pairs) if pairs else math.nan


def agreement(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """Return the share of prompts for which both answers have the same first token.

    Two correct engines with the same weights agree on nearly all; quantization lowers the share.
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
    """Return for each engine its medians, and for each of ours its ratios to the peers."""
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


def limits_of(
    suite: Suite, model: limits.Model, weights: limits.Weights, machine: limits.Machine
) -> dict[str, float]:
    """Return the machine's limit of each column that has one, by title."""
    found = {}
    for metric in suite.metrics:
        workload = next(w for w in suite.workloads if w.name == metric.workload)
        if isinstance(workload, Workload):
            most = limits.figures(workload, model, weights, machine)
        else:
            most = limits.trace_figures(workload.prompt_lens, model, weights, machine)
        if metric.figure in most:
            found[metric.title] = most[metric.figure]
    return found


def is_comparable(ours: str, theirs: str) -> bool:
    """Return True if two kinds of weights are compared: the same file, or as many bits."""
    return ours == theirs or (not ours.startswith("gguf") and _bits(ours) == _bits(theirs))


def _bits(weights: str) -> int:
    """Return the bits of a value without scales: 8 of "int8" and of "gguf q8_0"."""
    return int(weights.removeprefix("bf").removeprefix("gguf q").lstrip("fintp").split("_")[0])


def table(shape: str, suite: Suite, summary: dict[str, Any]) -> str:
    """Return the medians with their share of the limit, then the ratios of comparable engines."""
    columns = suite.metrics
    titles = [column.title for column in columns]
    weights: Mapping[str, str] = summary["weights"]
    rows = []
    for engine, values in summary["median"].items():
        most = summary["limits"].get(weights[engine], {})
        cells = [_with_limit(c, values[c.title], most.get(c.title)) for c in columns]
        same = summary["same_first_token"][engine]
        rows.append([engine, *cells, "-" if math.isnan(same) else f"{100 * same:.0f}%"])
    for name, most in summary["limits"].items():
        cells = [_number(most.get(title, math.nan)) for title in titles]
        rows.append([f"limit, {name}", *cells, "-"])
    ratios = [
        [pair, *(_ratio(values[title]) for title in titles)]
        for pair, values in summary["ratio"].items()
        if is_comparable(*(weights[engine] for engine in pair.split(" / ")))
    ]
    parts = [
        f"### {shape}, {suite.name}",
        "Medians: tokens/s with their share of the machine's limit, milliseconds as multiples of "
        "it.",
        reports.table(["engine", *titles, "same first token"], rows),
    ]
    if ratios:
        parts += ["Ratios, medians over rounds:", reports.table(["", *titles], ratios)]
    return "\n\n".join([*parts, f"{summary['noisy_runs']} of {summary['runs']} runs were noisy."])


def _with_limit(column: Metric, value: float, limit: float | None) -> str:
    if limit is None or math.isnan(value):
        return _number(value)
    if column.is_latency:
        return f"{_number(value)} ({value / limit:.1f}x)"
    return f"{_number(value)} ({value / limit:.0%})"


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def as_json(run: Run) -> dict[str, Any]:
    return asdict(run) | {"quiet": run.quiet}


def without_nan(value: Any) -> Any:
    """Return the same value with null for NaN, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
