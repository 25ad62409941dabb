"""Comparison of two profiles, without jax or files."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from forge_jax.errors import ConfigError
from forge_jax.tools.profile.verdict import StepTime, Verdict

if TYPE_CHECKING:
    from forge_jax.tools.profile.trace import Op, Trace

Change = Literal["slower", "faster", "more", "less", "appeared", "vanished", "same"]


@dataclass(frozen=True)
class Threshold:
    """The smallest difference that counts as a change; both limits must be reached.

    The percentage does not apply to rows that appeared or vanished.
    """

    percent: float = 5.0
    us: float = 1.0  # per step

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"--{name} must be a number of at least 0, not {value}")


@dataclass(frozen=True)
class Row:
    """A value before and after; None if it is missing."""

    name: str
    before: float | None
    after: float | None
    change: Change

    @property
    def delta(self) -> float:
        return (self.after or 0.0) - (self.before or 0.0)

    @property
    def percent(self) -> float | None:
        """The difference in percent of the value before; None if either is missing."""
        return 100 * self.delta / self.before if self.before and self.after is not None else None


@dataclass(frozen=True)
class Table:
    title: str
    unit: str
    rows: tuple[Row, ...]  # the largest difference first
    least: float = 0.0  # smallest difference that is shown

    @property
    def changed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if self._told(row))

    @property
    def others(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not self._told(row))

    def _told(self, row: Row) -> bool:
        return row.change != "same" and abs(row.delta) >= self.least


# Microseconds of each step, by table and name, for operations whose steps are known.
Points = Mapping[str, Mapping[str, list[float]]]


@dataclass(frozen=True)
class Comparison:
    """The verdict on two traces, and the tables that compare them.

    Attributes:
      runs: descriptions of the runs.
      commands: models and flags; "" if unknown.
      modules: names of the executables that ran.
      command_buffers: whether XLA used them while the traces were taken; "" if unknown.
      other_cpu_shares: shares of the machine's CPU time that other processes used; None: unknown.
      verdict: on the host's steps; None if a trace has too few.
    """

    name: str  # name of their folder
    runs: tuple[str, str]
    commands: tuple[str, str]
    modules: tuple[frozenset[str], frozenset[str]]
    command_buffers: tuple[str, str]
    other_cpu_shares: tuple[float | None, float | None]
    verdict: Verdict | None
    tables: tuple[Table, ...]
    points: tuple[Points, Points]

    def table(self, title: str) -> Table:
        return next(table for table in self.tables if table.title == title)


PARTS, OPERATIONS, KERNELS, PHASES, COMPILED = (
    "parts of the step",
    "operations",
    "kernels",
    "host phases",
    "compiled",
)


def compare(
    before: Iterable[Trace], after: Iterable[Trace], threshold: Threshold | None = None
) -> list[Comparison]:
    """Compare traces of the same name, or the only trace of each side whatever its name.

    Returns:
      A comparison for each common name.

    Raises:
      ConfigError: nothing ran while a trace was taken.
    """
    befores, afters = {t.name: t for t in before}, {t.name: t for t in after}
    if len(befores) == len(afters) == 1:
        [one], [other] = befores.values(), afters.values()
        return [_compare(other.name or one.name, one, other, threshold or Threshold())]
    return [
        _compare(name, befores[name], afters[name], threshold or Threshold())
        for name in befores
        if name in afters
    ]


def _compare(name: str, before: Trace, after: Trace, threshold: Threshold) -> Comparison:
    for trace in (before, after):
        if not trace.ops and not trace.phases:
            raise ConfigError(
                f"{trace.place}: nothing ran while this trace was taken: take it again while the "
                "engine has work"
            )

    def table(title: str, times: tuple[Mapping[str, float], Mapping[str, float]]) -> Table:
        return _table(title, "us per step", *times, threshold, ("slower", "faster"))

    figures = [
        {f"{m}: {figure}": v for (m, figure), v in t.figures.items()} for t in (before, after)
    ]
    exact = Threshold(0.0, 0.0)
    return Comparison(
        name=name,
        runs=(_runs(before), _runs(after)),
        commands=(before.ran, after.ran),
        modules=(_modules(before), _modules(after)),
        command_buffers=(before.command_buffers, after.command_buffers),
        other_cpu_shares=(before.other_cpu_share, after.other_cpu_share),
        verdict=_verdict(before, after, threshold),
        points=(points(before), points(after)),
        tables=(
            table(PARTS, (part_times(before), part_times(after))),
            table(OPERATIONS, (op_times(before), op_times(after))),
            table(KERNELS, (kernel_times(before), kernel_times(after))),
            table(PHASES, (phase_times(before), phase_times(after))),
            _table(COMPILED, "", figures[0], figures[1], exact, ("more", "less")),
        ),
    )


def _verdict(before: Trace, after: Trace, threshold: Threshold) -> Verdict | None:
    times = [StepTime.of(step_times(trace)) for trace in (before, after)]
    if times[0] is None or times[1] is None:
        return None
    return Verdict(times[0], times[1], threshold.percent)


def _modules(trace: Trace) -> frozenset[str]:
    return frozenset(name for names in trace.modules.values() for name in names)


def _table(
    title: str,
    unit: str,
    before: Mapping[str, float],
    after: Mapping[str, float],
    threshold: Threshold,
    words: tuple[Change, Change],
) -> Table:
    rows = []
    for name in dict.fromkeys((*before, *after)):
        values = before.get(name), after.get(name)
        rows.append(Row(name, *values, _change(*values, threshold, words)))
    rows.sort(key=lambda row: (-abs(row.delta), row.name))
    return Table(title, unit, tuple(rows), threshold.us)


def _change(
    before: float | None, after: float | None, threshold: Threshold, words: tuple[Change, Change]
) -> Change:
    if before is None:
        return "appeared"
    if after is None:
        return "vanished"
    delta = abs(after - before)
    if not delta or delta < threshold.us or delta < before * threshold.percent / 100:
        return "same"
    return words[0] if after > before else words[1]


# ---- microseconds per step -----------------------------------------------------------------------
# Device times are per run of the executables of that kind. Host times are per step of the host.


def op_times(trace: Trace) -> dict[str, float]:
    """Return the times by operation: "decode/layers/attention: forge_attention"."""
    return {_op_name(op): time.us / trace.runs[op.kind] for op, time in trace.ops.items()}


def part_times(trace: Trace) -> dict[str, float]:
    """Return the times by part, "decode/layers/attention", and the total of each kind, "decode"."""
    times: dict[str, float] = defaultdict(float)
    for op, time in trace.ops.items():
        for part in _part_names(op):
            times[part] += time.us / trace.runs[op.kind]
    return dict(times)


def kernel_times(trace: Trace) -> dict[str, float]:
    """Return the times by kernel, "decode: forge_linear", over all its calls."""
    times: dict[str, float] = defaultdict(float)
    for op, time in trace.ops.items():
        times[f"{op.kind}: {op.kernel}"] += time.us / trace.runs[op.kind]
    return dict(times)


def phase_times(trace: Trace) -> dict[str, float]:
    return {name: time.us / max(1, trace.steps) for name, time in trace.phases.items()}


def step_times(trace: Trace) -> list[float]:
    """Return the wall time of each step of the host, in order; empty without host spans."""
    return points(trace)[PHASES].get("step", [])


def points(trace: Trace) -> Points:
    """Return the times of operations, parts and phases in each step; their means are as above."""
    found: dict[str, dict[str, list[float]]] = {OPERATIONS: {}, PARTS: {}, PHASES: {}}

    def add(title: str, name: str, runs: int, us: Mapping[int, float]) -> None:
        line = found[title].setdefault(name, [0.0] * runs)
        for run, value in us.items():
            line[run] += value

    for op, time in trace.ops.items():
        if time.by_run:
            add(OPERATIONS, _op_name(op), trace.runs[op.kind], time.by_run)
            for part in _part_names(op):
                add(PARTS, part, trace.runs[op.kind], time.by_run)
    for name, time in trace.phases.items():
        add(PHASES, name, max(1, trace.steps), time.by_run)
    return found


def _op_name(op: Op) -> str:
    return f"{op.kind}/{op.scope}: {op.kernel}"


def _part_names(op: Op) -> tuple[str, str]:
    return op.kind, f"{op.kind}/{part_of(op.scope)}"


def part_of(scope: str) -> str:
    """Return a scope's part: "layers/down" of "layers/down/product", "sample" of "sample/top_p"."""
    names = scope.split("/")
    return "/".join(names[: 1 + (names[0] == "layers")])


def _runs(trace: Trace) -> str:
    kinds = [
        f"{count} runs of {', '.join(sorted(trace.modules[kind]))}"
        for kind, count in sorted(trace.runs.items())
    ]
    of = f"{trace.ran}: " if trace.ran else ""
    return f"{of}{trace.steps} host steps, {'; '.join(kinds) or 'no runs'}"
