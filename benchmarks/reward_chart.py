"""Draw docs/grpo.svg, the reward and the KL divergence of a run of examples/grpo_tunix.py.

    python examples/grpo_tunix.py > docs/grpo.txt
    python -m benchmarks.reward_chart [--transcript FILE] [--output FILE]

A dot is the mean reward of one step. The line is the mean of the last ten steps.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.chart import ROOT
from forge_serve.bench.svg import BLUE, ORANGE, document, text

TRANSCRIPT, CHART = ROOT / "docs" / "grpo.txt", ROOT / "docs" / "grpo.svg"
STEP = re.compile(r"step +(\d+)  reward ([\d.]+)  KL (\S+)")
WINDOW = 10  # steps of the moving mean

WIDTH, HEIGHT = 880, 390
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 64, 270
KL_TOP, KL_BOTTOM = 300, 336
# Class, property, and its value with a light and with a dark background.
COLORS = (
    ("dot", "fill", "#9fc2ee", "#2f5c99"),
    ("mean", "stroke", *BLUE),
    ("kl", "stroke", *ORANGE),
)


def steps_of(transcript: str) -> list[tuple[float, float]]:
    """Return (reward, KL divergence) of each step of a transcript.

    Raises:
      ValueError: there are no steps, or one is missing.
    """
    found = [STEP.fullmatch(line) for line in transcript.splitlines()]
    steps = [match for match in found if match is not None]
    if not steps or [int(match[1]) for match in steps] != list(range(len(steps))):
        raise ValueError("the transcript lacks steps: run examples/grpo_tunix.py again")
    return [(float(match[2]), float(match[3])) for match in steps]


def chart(steps: Sequence[tuple[float, float]]) -> str:
    """Return the SVG of the rewards and divergences of a run."""
    rewards, divergences = [list(column) for column in zip(*steps, strict=True)]
    parts = [
        text(LEFT, 28, "GRPO of forge-tiny on sums, with Tunix", "text title", "title"),
        text(LEFT, 50, f"reward: each step, and the mean of {WINDOW} steps", "muted"),
    ]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(text(LEFT - 8, y + 4, f"{tick:.2f}", "muted value", anchor="end"))
    count = len(rewards)
    parts += [
        f'<circle class="dot" cx="{_x(i, count)}" cy="{_y(r)}" r="3"/>'
        for i, r in enumerate(rewards)
    ]
    means = (sum(recent) / len(recent) for recent in _windows(rewards))
    points = [(_x(i, count), _y(mean)) for i, mean in enumerate(means)]
    parts += [_line("mean", points), *_kl(divergences)]
    rules = ("polyline { fill: none; stroke-width: 2 }",)
    return document(WIDTH, HEIGHT, parts, labelled_by="title", colors=COLORS, rules=rules)


def _kl(divergences: Sequence[float]) -> Iterator[str]:
    highest = max(divergences)
    title = f"KL of trainer and rollout: at most {highest} in {len(divergences)} steps"
    yield text(LEFT, KL_TOP - 6, title, "muted")
    scale = highest or 1.0
    points = [
        (_x(i, len(divergences)), round(KL_BOTTOM - (KL_BOTTOM - KL_TOP) * each / scale, 1))
        for i, each in enumerate(divergences)
    ]
    yield _line("kl", points)
    yield text(LEFT - 8, KL_BOTTOM + 4, "0", "muted value", anchor="end")
    for step in range(0, len(divergences), 10):
        yield text(
            *(_x(step, len(divergences)), KL_BOTTOM + 20, str(step), "muted value"), anchor="middle"
        )
    yield text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "step", "muted", anchor="middle")


def _windows(rewards: Sequence[float]) -> Iterator[Sequence[float]]:
    for i in range(len(rewards)):
        yield rewards[max(0, i + 1 - WINDOW) : i + 1]


def _line(kind: str, points: Sequence[tuple[float, float]]) -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline class="{kind}" points="{path}"/>'


def _x(step: int, count: int) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * step / max(count - 1, 1), 1)


def _y(reward: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * reward, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the chart."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reward_chart", description=__doc__)
    parser.add_argument("--transcript", type=Path, default=TRANSCRIPT, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=CHART, help="default: %(default)s")
    options = parser.parse_args(arguments)
    options.output.write_text(chart(steps_of(options.transcript.read_text())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
