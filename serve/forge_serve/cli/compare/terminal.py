"""A comparison on a terminal: figures, A's answers shaded by KL divergence, largest differences."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from forge_serve.cli.terminal import harmless, replace_unencodable

WIDTH = 100  # columns, at most
LARGEST = 8  # rows of the table of differences
# Lower bounds of the levels of shading, in nats, and their styles. The colors are legible on light
# and dark terminals.
LEVELS = (
    (1.0, "color(16) on color(203)"),
    (0.1, "color(16) on color(215)"),
    (0.01, "color(16) on color(222)"),
    (0.001, "color(136)"),
    (0.0, ""),
)

type Report = Mapping[str, Any]


def write(report: Report) -> None:
    """Write a report to stdout. Without a terminal, it has no colors."""
    replace_unencodable(sys.stdout)
    console = Console(highlight=False, soft_wrap=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    for part in _parts(report):
        console.print(part)


def _parts(report: Report) -> Iterator[RenderableType]:
    for side in report["sides"]:
        yield Text.assemble(
            (f"{side['name']}  ", "bold"),
            harmless(side["label"]),
            (f"  {side['weight_bytes'] / 1e6:,.1f} MB of weights", "dim"),
        )
    yield ""
    yield _figures(report)
    yield ""
    yield _legend()
    answered = report["settings"]["scored"] == "answers"
    for number, entry in enumerate(report["prompts"], start=1):
        yield ""
        prompt = harmless(" ".join(entry["prompt"].split()))
        yield Text(f"{number}. {prompt}", style="bold", no_wrap=True, overflow="ellipsis")
        yield _shaded(entry["positions"], "A  " if answered else "")
        if answered:
            yield _other(entry)
    largest = _largest(report["prompts"])
    if largest.row_count:
        yield ""
        yield largest


def _figures(report: Report) -> Table:
    figures, table = report["summary"], Table.grid(padding=(0, 3))
    perplexity = " / ".join(f"{each:,.3f}" for each in figures["perplexity"])
    rows = [
        ("mean KL(A||B)", f"{nats(figures['mean_kl'])} nats", "same top token",
         f"{100 * figures['same_top']:.1f} %"),
        ("median, p90", f"{nats(figures['median_kl'])}, {nats(figures['p90_kl'])}",
         "perplexity A / B", perplexity),
        ("p99, max", f"{nats(figures['p99_kl'])}, {nats(figures['max_kl'])}",
         "RMS probability change", f"{100 * figures['rms_probability_change']:.2f} %"),
        ("scored tokens", f"{figures['positions']:,}", "same answers",
         f"{figures['same_answers']} of {figures['prompts']}"),
    ]  # fmt: skip
    if report["settings"]["scored"] == "prompts":
        rows[-1] = (*rows[-1][:2], "", "")
    for name, value, other_name, other_value in rows:
        table.add_row(Text(name, "dim"), value, Text(other_name, "dim"), other_value)
    return table


def nats(value: float) -> str:
    """Return a divergence with three significant digits: "0.0123", "4.7e-07"."""
    if value == 0:
        return "0"
    return (
        f"{value:.1e}" if value < 1e-4 else f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
    )


def _legend() -> Text:
    legend = Text.assemble(("KL in nats ", "dim"))
    for bound, style in reversed(LEVELS[:-1]):
        legend.append(" ").append(f" ≥ {bound:g} ", style=style)
    return legend.append("  ").append("top token differs", style="underline")


def _style(kl: float) -> str:
    return next(style for bound, style in LEVELS if kl >= bound)


def _shaded(positions: Sequence[Mapping[str, Any]], start: str) -> Text:
    text = Text(start, style="")
    for each in positions:
        style = _style(each["kl"])
        if not each["same_top"]:
            style = f"{style} underline".strip()
        text.append(harmless(each["piece"]), style=style)
    return text


def _other(entry: Mapping[str, Any]) -> Text:
    """Return B's answer, from the first token that differs in another color."""
    split, pieces = entry["divergence"], entry["answers"][1]["pieces"]
    if split is None:
        return Text("B  the same answer", style="dim")
    text = Text("B  ")
    text.append(harmless("".join(pieces[:split])), style="dim")
    text.append(harmless("".join(pieces[split:])), style="cyan")
    return text


def _largest(entries: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (each["kl"], number, index, each)
        for number, entry in enumerate(entries, start=1)
        for index, each in enumerate(entry["positions"])
        if each["kl"] > 0
    ]
    rows.sort(key=lambda row: row[:1], reverse=True)
    table = Table(box=None, pad_edge=False, title="largest differences", title_justify="left")
    for name in ("prompt", "token", "", "KL, nats", "p by A", "p by B", "A's top", "B's top"):
        numeric = name in ("prompt", "token", "KL, nats", "p by A", "p by B")
        table.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for kl, number, index, each in rows[:LARGEST]:
        probabilities = (f"{100 * math.exp(value):.1f} %" for value in each["logprobs"])
        tops = (_token(top[0][1]) for top in each["top"])
        table.add_row(
            str(number), str(index), _token(each["text"]), nats(kl), *probabilities, *tops
        )
    return table


def _token(text: str) -> Text:
    return Text(harmless(repr(text)[1:-1][:16]).replace(" ", "␣") or "∅")
