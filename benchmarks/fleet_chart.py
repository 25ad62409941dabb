"""Draw docs/scaling.svg from a report of `benchmarks.fleet`.

    python -m benchmarks.fleet_chart [--report FILE] [--output FILE]

One group of bars per number of replicas, with a bar per balancer: goodput, and the median TTFT.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chart import RESULTS, ROOT
from forge_serve.bench.svg import BLUE, ORANGE, document, text

CHART = ROOT / "docs" / "scaling.svg"

WIDTH, HEIGHT = 880, 330
LEFT, TOP, BOTTOM = 64, 112, 262
PLOT_WIDTH, GAP = 370, 60
BAR_WIDTH, BAR_GAP = 34, 6
BALANCERS = ("random", "least-loaded", "prefix-aware")
# Class, property, and its value with a light and with a dark background.
COLORS = (
    ("bar0", "fill", "#b3b9c0", "#6e7681"),
    ("bar1", "fill", *ORANGE),
    ("bar2", "fill", *BLUE),
)

type Figure = Callable[[dict[str, Any]], float]


def chart(report: dict[str, Any]) -> str:
    """Return the SVG of a report with one trace and one rate.

    Raises:
      ValueError: the report has no row of several replicas, or more than one trace or rate.
    """
    rows = [row for row in report["rows"] if row["replicas"] > 1]
    if len({(row["trace"], row["rate"]) for row in rows}) != 1:
        raise ValueError("the report must have one trace, one rate and several replicas")
    [about] = report["traces"]
    parts = [
        text(LEFT - 8, 30, "Load balancing of one trace, in virtual time", "text title", "title"),
        text(
            *(LEFT - 8, 52),
            f"{about['requests']:,} requests of {about['trace']}, at {rows[0]['rate']:g}x the "
            "trace's rate per replica",
            *("muted", "trace"),
        ),
        *_legend(),
        *_plot(LEFT, "goodput: share of requests within the SLO", rows, _goodput, "{:.0%}", 1.0),
        *_plot(
            *(LEFT + PLOT_WIDTH + GAP, "median TTFT, ms", rows, _ttft, "{:,.0f}"),
            1.1 * max(map(_ttft, rows)),
        ),
        text(
            *(LEFT - 8, HEIGHT - 14),
            f"Modeled device {report['device']}; SLO: TTFT {report['slo']['ttft_ms'] / 1e3:g} s, "
            f"TPOT {report['slo']['tpot_ms']:g} ms",
            "muted value",
        ),
    ]
    return document(WIDTH, HEIGHT, parts, labelled_by="title trace", colors=COLORS)


def _goodput(row: dict[str, Any]) -> float:
    return row["goodput"]["share"]


def _ttft(row: dict[str, Any]) -> float:
    return row["ttft_ms"]["p50"]


def _legend() -> Iterator[str]:
    for index, name in enumerate(BALANCERS):
        x = LEFT - 8 + index * 120
        yield f'<rect class="bar{index}" x="{x}" y="64" width="12" height="12" rx="2"/>'
        yield text(x + 18, 75, name, "text")


def _plot(
    left: float, title: str, rows: Sequence[dict[str, Any]], figure: Figure, form: str, most: float
) -> Iterator[str]:
    yield text(left - 8, TOP - 8, title, "text")
    yield f'<line class="grid" x1="{left}" x2="{left + PLOT_WIDTH}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
    counts = sorted({row["replicas"] for row in rows})
    step = PLOT_WIDTH / len(counts)
    for column, count in enumerate(counts):
        middle = left + (column + 0.5) * step
        yield text(middle, BOTTOM + 18, f"{count} replicas", "muted", anchor="middle")
        bars = {row["balancer"]: figure(row) for row in rows if row["replicas"] == count}
        for index, name in enumerate(BALANCERS):
            x = middle + (index - 1.5) * (BAR_WIDTH + BAR_GAP) + BAR_GAP / 2
            height = (BOTTOM - TOP - 12) * bars[name] / most
            yield (
                f'<rect class="bar{index}" x="{x:.1f}" y="{BOTTOM - height:.1f}" '
                f'width="{BAR_WIDTH}" height="{height:.1f}" rx="2"/>'
            )
            place = x + BAR_WIDTH / 2, BOTTOM - height - 5
            yield text(*place, form.format(bars[name]), "text value", anchor="middle")


def newest() -> Path:
    """Return the newest report."""
    return sorted(RESULTS.glob("????-??-??-fleet.json"))[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the chart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet_chart", description=__doc__)
    parser.add_argument("--report", type=Path, default=newest(), help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=CHART, help="default: %(default)s")
    options = parser.parse_args(arguments)
    options.output.write_text(chart(json.loads(options.report.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
