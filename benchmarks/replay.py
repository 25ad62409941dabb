"""Replay traces of real traffic through the scheduler on a modeled device, by policy.

    python -m benchmarks.replay --trace azure_conv.csv mooncake.jsonl [--rates 1 2 4 8]

The scheduler and its block pool are the engine's own. The device computes nothing (`virtual.py`).
Time is virtual, so a replay does not wait, and equal arguments give equal figures on every machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from benchmarks import report as reports
from benchmarks.report import number
from benchmarks.simulation import (
    ORDINARY,
    URGENT,
    Arrival,
    Balancer,
    EngineSizes,
    Outcome,
    Replica,
    Served,
    arrivals,
    play,
)
from benchmarks.virtual import DEVICES, StepCost
from forge_jax.config import Policy
from forge_jax.engine.gc_tuning import short_pauses
from forge_jax.host.progress import progress_bar
from forge_jax.schedule.config import SchedulerConfig
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import Slo, latencies, percentile, spread_ms
from forge_serve.bench.traces import TRACE_BLOCK, TraceEntry, read_trace

POLICIES: tuple[Policy, ...] = get_args(Policy)


# --- figures -----------------------------------------------------------------------------------


def summarize(outcome: Outcome, slo: Slo) -> dict[str, Any]:
    """Return all figures of one replay, ready for JSON; every time is virtual.

    Counts are sums over the replicas, and peaks are the largest of one replica.
    """
    served, replicas, span_s = outcome.served, outcome.replicas, outcome.virtual_s
    devices, pools = [r.device for r in replicas], [r.pool for r in replicas]
    steps = sum(device.num_steps for device in devices)
    busy_s = sum(device.busy_s for device in devices)
    output = sum(m.completion_tokens for m in served)
    kept = sum(map(slo.met_by, served))
    waits = [m.waited_s for m in served if m.waited_s is not None]
    return {
        "virtual_s": span_s,
        "output_tokens": output,
        "prompt_tokens": sum(m.prompt_tokens or 0 for m in served),
        "output_tokens_per_s": output / span_s,
        **_latencies(served),
        "longest_gap_ms": spread_ms(m.longest_gap_s for m in served),
        "goodput": {"requests_per_s": kept / span_s, "share": kept / len(served)},
        "prefix_hit_rate": sum(pool.hit_tokens for pool in pools)
        / max(sum(pool.queried_tokens for pool in pools), 1),
        "preemptions": sum(r.scheduler.num_preemptions for r in replicas),
        "steps": steps,
        "step_ms": 1e3 * busy_s / steps,
        "busy_share": busy_s / span_s / len(replicas),
        "mean_batch": sum(device.num_sequences for device in devices) / steps,
        "mean_step_tokens": sum(device.num_tokens for device in devices) / steps,
        "queue_peak": max(r.queue_peak for r in replicas),
        "blocks_peak_share": max(r.blocks_peak / r.pool.num_blocks for r in replicas),
        "waited_ms": {**(spread_ms(waits) or {}), "longest": 1e3 * max(waits)},
        "fairness": fairness(served),
        "groups": {
            group: {"requests": len(members), **_latencies(members)}
            for group in (URGENT, ORDINARY)
            if (members := [m for m in served if m.group == group])
        },
    }


def _latencies(served: Sequence[Served]) -> dict[str, Any]:
    return {name: value for name, value in latencies(served).items() if name != "itl_ms"}


def fairness(served: Sequence[Served]) -> dict[str, float]:
    """Return how evenly delay is shared, by slowdown: time taken over time alone (>= 1).

    `jain` is Jain's index of the speeds (1 / slowdown): 1 if all slow down equally, 1 / n if one
    request gets everything. Short and long are the quarters with the least and the most time alone.
    """
    speeds = [1 / m.slowdown for m in served]
    ordered = [m.slowdown for m in sorted(served, key=lambda m: m.alone_s)]
    quarter = max(len(ordered) // 4, 1)
    return {
        "jain": math.fsum(speeds) ** 2 / (len(speeds) * math.fsum(x * x for x in speeds)),
        "slowdown_p50": percentile(ordered, 50),
        "slowdown_p99": percentile(ordered, 99),
        "slowdown_short_p50": percentile(ordered[:quarter], 50),
        "slowdown_long_p50": percentile(ordered[-quarter:], 50),
    }


def rounded(value: Any) -> Any:
    """Round every float of a report to six digits."""
    if isinstance(value, Mapping):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


# --- the command -------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return reports.publish("replay", args, lambda: replay(args), markdown)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments that all simulations share, checked."""

    sizes: EngineSizes
    cost: StepCost
    slo: Slo

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        """Check the arguments.

        Raises:
          BenchmarkError: an argument is out of range.
        """
        names = [field.name for field in dataclasses.fields(EngineSizes)]
        sizes = EngineSizes(**{name: getattr(args, name) for name in names})
        changes = {field.name: getattr(args, field.name) for field in dataclasses.fields(StepCost)}
        changes = {name: value for name, value in changes.items() if value is not None}
        if any(not (value >= 0 and math.isfinite(value)) for value in changes.values()):
            raise BenchmarkError("the costs of a step must be finite and not negative")
        if any(not (rate > 0 and math.isfinite(rate)) for rate in args.rates):
            raise BenchmarkError("--rates must be greater than 0")
        return cls(
            sizes=sizes,
            cost=dataclasses.replace(DEVICES[args.device], **changes),
            slo=Slo(ttft_ms=args.slo_ttft_ms, tpot_ms=args.slo_tpot_ms),
        )

    def report(self, args: argparse.Namespace) -> dict[str, Any]:
        """Return the head of a report."""
        return {
            "device": args.device,
            "step_cost": rounded(vars(self.cost)),
            "engine": vars(self.sizes),
            "slo": self.slo.asked,
            "seed": args.seed,
        }


def replay(args: argparse.Namespace) -> dict[str, Any]:
    settings = Settings.of(args)
    if not 0 <= args.urgent_share <= 1:
        raise BenchmarkError(f"--urgent-share must be from 0 to 1, not {args.urgent_share}")
    if not all(0 <= target_ms < math.inf for target_ms in args.itl_target_ms):
        raise BenchmarkError("--itl-target-ms must be finite and not negative")
    traces, rows = [], []
    for path in args.trace:
        entries = read_trace(path, args.max_requests)
        requests = arrivals(
            entries, settings.sizes, settings.cost, urgent_share=args.urgent_share, seed=args.seed
        )
        traces.append(about(path, entries, requests))
        for rate, policy, target_ms in itertools.product(
            args.rates, args.policies, args.itl_target_ms
        ):
            name = f"{path.stem} {rate:g}x {policy}" + f" {target_ms:g} ms" * bool(target_ms)
            replica = Replica(
                policy=policy,
                sizes=settings.sizes,
                cost=settings.cost,
                seed=args.seed,
                itl_target_s=target_ms / 1e3,
            )
            outcome = played(name, requests, [replica], rate=rate, balancer=Balancer())
            which = {"rate": rate, "policy": policy, "itl_target_ms": target_ms}
            figures = summarize(outcome, settings.slo)
            rows.append({"trace": path.stem, **which, **rounded(figures)})
    return {
        **settings.report(args),
        "urgent_share": args.urgent_share,
        "traces": traces,
        "rows": rows,
    }


def about(path: Path, entries: Sequence[TraceEntry], requests: Sequence[Arrival]) -> dict[str, Any]:
    clipped = sum(
        (len(request.prompt), request.output_len) != (entry.input_len, entry.output_len)
        for entry, request in zip(entries, requests, strict=True)
    )
    return {
        "trace": path.stem,
        "requests": len(requests),
        "requests_clipped": clipped,
        "span_s": rounded(entries[-1].arrival_s),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.output_len for request in requests),
        "prompt_tokens_seen_before": _seen_before(entries, requests),
    }


def _seen_before(entries: Sequence[TraceEntry], requests: Sequence[Arrival]) -> int:
    """Count prompt tokens in leading blocks of earlier prompts, which an infinite cache saves."""
    seen: set[int] = set()
    total = 0
    for entry, request in zip(entries, requests, strict=True):
        known = sum(1 for _ in itertools.takewhile(seen.__contains__, entry.hash_ids))
        total += min(known * TRACE_BLOCK, len(request.prompt))
        seen.update(entry.hash_ids)
    return total


def played(
    name: str,
    requests: Sequence[Arrival],
    replicas: Sequence[Replica],
    *,
    rate: float,
    balancer: Balancer,
) -> Outcome:
    """Play all requests with a progress bar, and print how long it took."""
    start_s = time.perf_counter()
    with short_pauses(), progress_bar(total=len(requests), desc=name, unit="requests") as bar:
        outcome = play(requests, replicas, rate=rate, balancer=balancer, on_finished=bar.update)
    wall_s = time.perf_counter() - start_s
    steps = sum(replica.device.num_steps for replica in replicas)
    reports.progress(
        f"{name}: {outcome.virtual_s:,.0f} s in {wall_s:.1f} s, {steps:,} steps of "
        f"{1e6 * wall_s / steps:.0f} us"
    )
    return outcome


def markdown(report: dict[str, Any]) -> str:
    lines = [heading(report)]
    for about in report["traces"]:
        rows = [row for row in report["rows"] if row["trace"] == about["trace"]]
        lines += ["", about_text(about), "", reports.table(HEADER, [_cells(row) for row in rows])]
    return "\n".join(lines)


def heading(report: dict[str, Any]) -> str:
    engine = report["engine"]
    slo = ", ".join(
        f"{name.removesuffix('_ms').upper()} {ms:g} ms" for name, ms in report["slo"].items()
    )
    return (
        f"{reports.heading(report)}; modeled device {report['device']}, {engine['num_blocks']} "
        f"blocks of {engine['block_size']}, {engine['max_num_seqs']} sequences and "
        f"{engine['max_num_batched_tokens']} tokens per step; virtual time; SLO: {slo}"
    )


def about_text(about: dict[str, Any]) -> str:
    seen = about["prompt_tokens_seen_before"] / about["prompt_tokens"]
    return (
        f"{about['trace']}: {about['requests']:,} requests in {about['span_s']:,.0f} s, "
        f"{about['prompt_tokens']:,} prompt and {about['output_tokens']:,} output tokens; "
        f"{seen:.0%} of the prompt tokens are in blocks of an earlier prompt"
    )


HEADER = (
    "rate", "policy", "ITL target, ms", "TTFT p50 / p99, ms", "TPOT p50 / p99, ms",
    "longest gap p50 / p99, ms", "whole p50 / p99, s", "goodput",
    "hit rate", "preempted", "steps", "batch", "queue peak", "longest wait, s", "Jain",
    "slowdown short / long", "TTFT p99 urgent / others, ms",
)  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    fair, groups = row["fairness"], row["groups"]
    urgent = [_of(groups[group], "ttft_ms", "p99") for group in groups]
    return [
        f"{row['rate']:g}x",
        row["policy"],
        f"{row['itl_target_ms']:g}" if row["itl_target_ms"] else "off",
        reports.pair(row["ttft_ms"]),
        reports.pair(row["tpot_ms"], 1),
        reports.pair(row["longest_gap_ms"]),
        f"{number(row['e2e_ms']['p50'] / 1e3, 1)} / {number(row['e2e_ms']['p99'] / 1e3, 1)}",
        f"{row['goodput']['share']:.1%}",
        f"{row['prefix_hit_rate']:.2f}",
        number(row["preemptions"]),
        number(row["steps"]),
        number(row["mean_batch"], 1),
        number(row["queue_peak"]),
        number(row["waited_ms"]["longest"] / 1e3, 1),
        f"{fair['jain']:.2f}",
        f"{fair['slowdown_short_p50']:.1f} / {fair['slowdown_long_p50']:.1f}",
        " / ".join(urgent),
    ]


def _of(row: dict[str, Any], name: str, percentile: str, digits: int = 0) -> str:
    return number(row[name] and row[name][percentile], digits)


def add_trace_arguments(group: argparse._ArgumentGroup, *, rates: Sequence[float]) -> None:
    group.add_argument(
        "--trace", type=Path, nargs="+", required=True, help="Azure CSV or Mooncake JSON lines"
    )
    group.add_argument(
        "--max-requests", type=int, help="maximum number of requests per trace (default: all)"
    )
    group.add_argument(
        "--rates",
        type=float,
        nargs="+",
        default=rates,
        help=f"factors of the trace's own rate (default {' '.join(f'{rate:g}' for rate in rates)})",
    )
    group.add_argument("--seed", type=int, default=0)


def add_engine_arguments(parser: argparse.ArgumentParser, engine: argparse._ArgumentGroup) -> None:
    """Add the sizes of an engine to `engine`, and groups for the device and for goodput."""
    for name, default, text in (
        ("max-num-seqs", 256, "concurrent sequences"),
        ("max-num-batched-tokens", 2048, "of one step"),
        ("num-blocks", 13_000, "blocks of the KV cache"),
        ("block-size", 64, "tokens of a block"),
        ("context", 131_072, "tokens of prompt and output, to which requests are truncated"),
    ):
        engine.add_argument(f"--{name}", type=int, default=default, help=f"{text} ({default})")
    engine.add_argument(
        "--aging-s",
        type=float,
        default=SchedulerConfig.aging_s,
        help="seconds after which a waiting request precedes all prefix matches "
        f"({SchedulerConfig.aging_s:g})",
    )
    device = parser.add_argument_group("step costs of the device model")
    device.add_argument("--device", choices=DEVICES, default="h200-8b", help="the preset")
    for field in dataclasses.fields(StepCost):
        flag = f"--{field.name.replace('_', '-')}"
        device.add_argument(
            flag, type=float, help=f"{field.metadata['doc']}; default: the preset's"
        )
    slo = parser.add_argument_group("goodput limits")
    slo.add_argument("--slo-ttft-ms", type=float, default=1000.0, help="default 1000")
    slo.add_argument("--slo-tpot-ms", type=float, default=50.0, help="default 50")


def _parser() -> argparse.ArgumentParser:
    parser = reports.parser(
        "replay",
        "Replay request traces through the scheduler on a modeled device, in virtual time.",
    )
    workload = parser.add_argument_group("workload")
    add_trace_arguments(workload, rates=(1, 2, 4, 8))
    workload.add_argument(
        "--urgent-share",
        type=float,
        default=0.2,
        help="share of requests with the better priority (default 0.2)",
    )
    engine = parser.add_argument_group("engine")
    engine.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    engine.add_argument(
        "--itl-target-ms",
        type=float,
        nargs="+",
        default=[0.0],
        help="inter-token latency target in ms, as for the server; 0: off (default)",
    )
    add_engine_arguments(parser, engine)
    return parser


if __name__ == "__main__":
    sys.exit(main())
