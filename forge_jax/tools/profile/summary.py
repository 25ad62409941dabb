"""Summary of a comparison: the verdict, the largest differences, and further steps to try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forge_jax.tools.profile.compare import (
    COMPILED,
    OPERATIONS,
    PARTS,
    PHASES,
    Comparison,
    Row,
    part_of,
)
from forge_jax.tools.profile.verdict import BATCHES, MIN_STEPS, StepTime, Verdict

MAX_OPERATIONS = 15
WIDE_PERCENT = 10.0  # margin of a step time's difference above which the runs are called noisy
BUSY_SHARE = 0.2  # other programs' share of the CPU time from which times are not reliable
MIN_SHARE = 0.1  # share of a step's difference from which a host phase is named


@dataclass(frozen=True)
class Group:
    """Operations that changed, of one part of the step."""

    part: Row
    operations: tuple[Row, ...]  # the largest difference first


def headline(comparison: Comparison) -> str:
    """Return the verdict in one or two sentences."""
    found = comparison.verdict
    if found is None:
        return f"no verdict: a trace has fewer than {MIN_STEPS} host steps"
    margin = found.margin
    low, high = (found.in_percent(found.delta + each) for each in (-margin, margin))
    figures = f"{found.in_percent(found.delta):+.1f}% (95% interval {low:+.1f}% to {high:+.1f}%)"
    if _busy(comparison):
        shares = " before and ".join(
            "unknown" if share is None else f"{share:.0%}" for share in comparison.other_cpu_shares
        )
        return f"not reliable, because other programs used the CPUs ({shares} after): {figures}"
    if found.outcome == "no difference":
        return f"no difference beyond the noise: {figures}"
    size = "" if found.outcome in ("slower", "faster") else f", less than {found.percent:g}%"
    return f"{found.outcome} beyond the noise{size}: {figures}"


def _busy(comparison: Comparison) -> bool:
    return any(share is not None and share >= BUSY_SHARE for share in comparison.other_cpu_shares)


def step_times(found: Verdict) -> list[tuple[str, ...]]:
    """Return the table of both step times and their difference, with its header."""

    def cells(name: str, run: StepTime) -> tuple[str, ...]:
        spread = f"{ms(run.p10)} to {ms(run.p90)}"
        return (name, ms(run.median), spread, str(run.steps))

    return [
        ("wall time of a step, ms", "median", "p10 to p90", "steps"),
        cells("before", found.before),
        cells("after", found.after),
        ("difference", f"{found.delta / 1e3:+,.3f}", f"± {ms(found.margin)}", ""),
    ]


METHOD = f"""\
The interval is Welch's, from the medians of {BATCHES} batches of consecutive steps. It covers the
variation within the two runs, but not the variation between runs."""


def ms(us: float) -> str:
    return f"{us / 1e3:,.3f}"


def largest(comparison: Comparison) -> list[Group]:
    """Return the operations with the largest differences, at most `MAX_OPERATIONS`, by part."""
    parts = {row.name: row for row in comparison.table(PARTS).rows}
    groups: dict[str, list[Row]] = {}
    for row in comparison.table(OPERATIONS).changed[:MAX_OPERATIONS]:
        groups.setdefault(part_name(row), []).append(row)
    return [Group(parts[name], tuple(rows)) for name, rows in groups.items()]


def part_name(operation: Row) -> str:
    """Return "decode/layers/down" of the operation "decode/layers/down/product: forge_linear"."""
    scope, _, _ = operation.name.partition(": ")
    kind, _, scope = scope.partition("/")
    return f"{kind}/{part_of(scope)}"


def within_part(operation: Row) -> str:
    """Return "product: forge_linear" of the operation above, without the name of its part."""
    return operation.name.removeprefix(part_name(operation)).lstrip("/").removeprefix(": ")


def suggestions(comparison: Comparison) -> list[str]:
    """Return what to try next, the most important first."""
    return [
        *_of_command_buffers(comparison),
        *_of_sizes(comparison),
        *_of_noise(comparison),
        *_of_kernels(comparison),
        *_of_host(comparison),
        *_of_programs(comparison),
    ]


def _of_command_buffers(comparison: Comparison) -> Iterator[str]:
    before, after = comparison.command_buffers
    if before != after:
        yield (
            f"Profile both with the same command buffers: they were {before or 'unknown'} before, "
            f"{after or 'unknown'} after."
        )
    elif before == "off during the profile":
        yield (
            "Compare kernels, not step times: command buffers were off during both profiles. To "
            "keep them on, set XLA_FLAGS=--xla_enable_command_buffers_during_profiling=true."
        )


def _of_sizes(comparison: Comparison) -> Iterator[str]:
    before, after = (", ".join(sorted(names)) for names in comparison.modules)
    if before != after:
        yield (
            f"The runs used other executables ({before or 'none'} and {after or 'none'}). To "
            "compare equal work, set the same --sequences and --prompt-tokens."
        )


def _of_noise(comparison: Comparison) -> Iterator[str]:
    found = comparison.verdict
    noisy = found is None or found.in_percent(found.margin) > WIDE_PERCENT
    if noisy or _busy(comparison):
        yield "Reduce the noise: stop other programs, and profile more steps, such as --steps 100."
    if found is None or found.outcome not in ("slower", "faster"):
        yield (
            "Profile the same configuration twice and compare the two. This shows how much runs "
            "vary."
        )


def _of_kernels(comparison: Comparison) -> Iterator[str]:
    for group in largest(comparison):
        kernels = {
            change: next((row for row in group.operations if row.change == change), None)
            for change in ("vanished", "appeared")
        }
        old, new = kernels["vanished"], kernels["appeared"]
        if old is not None and new is not None:
            yield (
                f"{group.part.name} ran other kernels: {within_part(old)} vanished, "
                f"{within_part(new)} appeared. If you did not intend this, compare the flags, and "
                "run forge-jax doctor."
            )
            return  # all parts usually have the same cause


def _of_host(comparison: Comparison) -> Iterator[str]:
    found = comparison.verdict
    if found is None or found.outcome == "no difference":
        return
    rows = [
        row
        for row in comparison.table(PHASES).changed
        if row.name not in ("step", "read") and row.delta * found.delta > 0
    ]
    if rows and abs(rows[0].delta) >= MIN_SHARE * abs(found.delta):
        yield (
            f"The host phase {rows[0].name} changed by {rows[0].delta:+,.0f} us per step. See the "
            "phases of a tick in docs/engine.md."
        )


def _of_programs(comparison: Comparison) -> Iterator[str]:
    same_command = comparison.commands[0] == comparison.commands[1] != ""
    if same_command and comparison.table(COMPILED).changed:
        yield "The commands are equal, but the programs differ: compare executables/*.hlo.txt.gz."
