"""Draw docs/benchmarks.svg, the chart of the README, from the committed reports.

    python -m benchmarks.chart [--output FILE]

The newest `peers` report of each model shape is used. A bar is the median, over rounds, of the
throughput of forge-jax over that of another engine with the same weights, in bfloat16. Whiskers
span the lowest and the highest round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.measure import DECODE, END_TO_END, PREFILL_RATE
from benchmarks.peers.report import Run, usable
from forge_serve.bench.svg import BLUE, ORANGE, document, text

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CHART = ROOT / "docs" / "benchmarks.svg"

SHAPES = {"S": "SmolLM2-135M's shape", "M": "TinyLlama-1.1B's shape"}
OURS = "forge-jax bf16"
PEERS = {"vllm bf16": "vLLM", "llama.cpp bf16": "llama.cpp"}
# Two lines of a column's title, then workload and figure of a run.
COLUMNS = (
    ("decode", "1 request", "batch 1", DECODE),
    ("decode", "8 requests", "batch 8", DECODE),
    ("prefill", "1 request", "prefill", PREFILL_RATE),
    ("end to end", "8 requests", "batch 8", END_TO_END),
    ("end to end", "32 requests", "batch 32", END_TO_END),
)

WIDTH, HEIGHT = 880, 414
# Of the plots:
LEFT, TOP, BOTTOM = 56, 92, 336
PLOT_WIDTH, GAP = 380, 44
BAR_WIDTH, BAR_GAP = 24, 4
MAX_RATIO = 3.5

# Class, property, and its value with a light and with a dark background.
COLORS = (
    ("parity", "stroke", "#59636e", "#9198a1"),
    ("whisker", "stroke", "#1f2328", "#f0f6fc"),
    ("peer0", "fill", *BLUE),
    ("peer1", "fill", *ORANGE),
)


@dataclass(frozen=True)
class Bar:
    """The ratios of one column to one peer."""

    low: float
    median: float
    high: float


def newest(shape: str) -> dict[str, Any]:
    """Return the newest report of a shape with the workloads of all columns."""
    files = sorted(RESULTS.glob(f"????-??-??-peers-{shape}-cpu.json"))
    return json.loads(files[-1].read_text())


def runs_of(report: dict[str, Any]) -> list[Run]:
    """Return the runs of a report."""
    names = [field.name for field in dataclasses.fields(Run)]
    return [Run(**{name: run[name] for name in names}) for run in report["runs"]]


def bar(runs: Sequence[Run], peer: str, workload: str, figure: str) -> Bar:
    """Compare forge-jax with a peer within each round."""
    ours, theirs = (
        {run.round: run.figures[figure] for run in usable(selected, figure)}
        for selected in (
            [run for run in runs if run.engine == engine and run.workload == workload]
            for engine in (OURS, peer)
        )
    )
    ratios = [ours[round_] / theirs[round_] for round_ in ours if round_ in theirs]
    return Bar(min(ratios), statistics.median(ratios), max(ratios))


def chart(reports: dict[str, dict[str, Any]]) -> str:
    """Return the chart of reports by shape, as SVG."""
    machines = {(report["cpu"], report["cores"], report["date"]) for report in reports.values()}
    assert len(machines) == 1, "the reports come from different machines or days"
    ((cpu, cores, date),) = machines
    vllm = reports["M"]["packages"]["vllm"][0].replace("==", " ")
    machine = f"{cpu}, {cores} cores, {date}, {vllm}. Bars: median of the rounds. "
    machine += "Lines: lowest and highest round."
    workload = "bfloat16. Decode and end to end: prompts of 128 tokens, 64 output tokens. "
    workload += "Prefill: 512 tokens."
    parts = [
        text(LEFT, 30, "Throughput of forge-jax relative to other engines", "text title", "title"),
        *_legend(),
    ]
    for index, (shape, report) in enumerate(reports.items()):
        parts += _plot(LEFT + index * (PLOT_WIDTH + GAP), SHAPES[shape], runs_of(report))
    parts += [
        text(LEFT, HEIGHT - 26, machine, "muted value", "machine"),
        text(LEFT, HEIGHT - 11, workload, "muted value", "workload"),
    ]
    rules = (".parity { stroke-dasharray: 5 3 }",)
    labels = "title machine workload"
    return document(WIDTH, HEIGHT, parts, labelled_by=labels, colors=COLORS, rules=rules)


def _legend() -> Iterator[str]:
    for index, name in enumerate(PEERS.values()):
        x = LEFT + index * 130
        yield f'<rect class="peer{index}" x="{x}" y="44" width="12" height="12" rx="2"/>'
        yield text(x + 18, 55, f"over {name}", "text")
    yield text(LEFT + 270, 55, "1.0: as fast", "muted")


def _plot(left: float, title: str, runs: Sequence[Run]) -> Iterator[str]:
    yield text(left, TOP - 12, title, "text")
    for tick in range(int(MAX_RATIO) + 1):
        kind = "parity" if tick == 1 else "grid"
        y = _y(tick)
        yield f'<line class="{kind}" x1="{left}" x2="{left + PLOT_WIDTH}" y1="{y}" y2="{y}"/>'
        yield text(left - 8, y + 4, f"{tick}x", "muted value", anchor="end")
    step = PLOT_WIDTH / len(COLUMNS)
    for column, (name, requests, workload, figure) in enumerate(COLUMNS):
        middle = left + (column + 0.5) * step
        yield text(middle, BOTTOM + 18, name, "text", anchor="middle")
        yield text(middle, BOTTOM + 34, requests, "muted value", anchor="middle")
        for index, peer in enumerate(PEERS):
            x = middle + (index - len(PEERS) / 2) * (BAR_WIDTH + BAR_GAP) + BAR_GAP / 2
            yield from _bar(x, bar(runs, peer, workload, figure), index)


def _bar(x: float, values: Bar, index: int) -> Iterator[str]:
    top, middle = _y(values.median), x + BAR_WIDTH / 2
    yield (
        f'<rect class="peer{index}" x="{x:.1f}" y="{top}" width="{BAR_WIDTH}" '
        f'height="{BOTTOM - top:.1f}" rx="2"/>'
    )
    yield (
        f'<line class="whisker" x1="{middle:.1f}" x2="{middle:.1f}" y1="{_y(values.low)}" '
        f'y2="{_y(values.high)}"/>'
    )
    above = _y(values.high) - 5
    yield text(middle, above, f"{values.median:.2f}", "text value", anchor="middle")


def _y(ratio: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * ratio / MAX_RATIO, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the chart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chart", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=CHART, help="the SVG file (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    options.output.write_text(chart({shape: newest(shape) for shape in SHAPES}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
