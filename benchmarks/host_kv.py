"""Replay traces with and without host memory for evicted blocks, in virtual time.

    python -m benchmarks.host_kv --trace mooncake.jsonl [--host-gib 0 100 200 400]

The scheduler, block pool and host tier are the engine's own, on the modeled device of `replay`. A
copy takes its bytes divided by `--host-gbps`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import replay
from benchmarks import report as reports
from benchmarks.report import number
from benchmarks.simulation import Balancer, HostMemorySize, Outcome, Replica, arrivals
from forge_jax.step.kv_cache import GIB
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import Slo
from forge_serve.bench.traces import read_trace

# Llama 3.1 8B in bfloat16, as the device `h200-8b`: 32 layers of 8 KV heads of 128.
TOKEN_BYTES = 131_072


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return reports.publish("host_kv", args, lambda: simulate(args), markdown)


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    settings = replay.Settings.of(args)
    if not (args.host_gbps > 0 and math.isfinite(args.host_gbps)):
        raise BenchmarkError("--host-gbps must be greater than 0")
    if min(args.host_gib) < 0:
        raise BenchmarkError("--host-gib must not be negative")
    block_bytes = args.token_bytes * settings.sizes.block_size
    traces, rows = [], []
    for path in args.trace:
        entries = read_trace(path, args.max_requests)
        requests = arrivals(
            entries, settings.sizes, settings.cost, urgent_share=0.0, seed=args.seed
        )
        traces.append(replay.about(path, entries, requests))
        for rate, gib in itertools.product(args.rates, args.host_gib):
            host = None
            num_blocks = int(gib * GIB) // block_bytes
            if num_blocks:
                host = HostMemorySize(
                    num_blocks=num_blocks,
                    block_bytes=block_bytes,
                    bytes_per_s=args.host_gbps * 1e9,
                )
            replica = Replica(
                policy=args.policy,
                sizes=settings.sizes,
                cost=settings.cost,
                seed=args.seed,
                host=host,
            )
            outcome = replay.played(
                f"{path.stem} {rate:g}x, {gib:g} GiB",
                requests,
                [replica],
                rate=rate,
                balancer=Balancer(),
            )
            found = figures(outcome, settings.slo, block_bytes)
            which = {"trace": path.stem, "rate": rate, "host_gib": gib}
            rows.append({**which, **replay.rounded(found)})
    return {
        **settings.report(args),
        "policy": args.policy,
        "device_gib": settings.sizes.num_blocks * block_bytes / GIB,
        "host_gbps": args.host_gbps,
        "token_bytes": args.token_bytes,
        "traces": traces,
        "rows": rows,
    }


def figures(outcome: Outcome, slo: Slo, block_bytes: int) -> dict[str, Any]:
    """Return the figures of a replay, and the hit rates of both tiers."""
    told = replay.summarize(outcome, slo)
    [replica] = outcome.replicas
    pool, host = replica.pool, replica.pool.host
    stats = None if host is None else host.stats(block_bytes)
    return {
        **{name: told[name] for name in FIGURES},
        "device_hit_rate": pool.hit_tokens / pool.queried_tokens,
        "host_hit_rate": 0.0 if stats is None else stats.hit_tokens / pool.queried_tokens,
        "out_bytes": 0 if stats is None else stats.saved_bytes,
        "in_bytes": 0 if stats is None else stats.loaded_bytes,
        "lost_blocks": 0 if stats is None else stats.lost_blocks,
        "waited_s_per_request": 0.0 if stats is None else stats.waited_s / len(outcome.served),
    }


FIGURES = (
    "virtual_s", "output_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms", "goodput", "preemptions",
    "busy_share", "queue_peak",
)  # fmt: skip
HEADER = (
    "rate", "host, GiB", "hit rate: device", "host", "TTFT p50 / p99, ms", "TPOT p50 / p99, ms",
    "goodput", "busy", "out, GB", "in, GB", "blocks lost",
)  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    lines = [
        replay.heading(report),
        "",
        f"Policy {report['policy']}, KV cache of {report['device_gib']:.0f} GiB on the device, "
        f"copies at {report['host_gbps']:g} GB/s",
    ]
    for about in report["traces"]:
        rows = [row for row in report["rows"] if row["trace"] == about["trace"]]
        lines += ["", replay.about_text(about), "", reports.table(HEADER, list(map(_cells, rows)))]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['rate']:g}x",
        f"{row['host_gib']:g}",
        f"{row['device_hit_rate']:.2f}",
        f"{row['host_hit_rate']:.2f}",
        reports.pair(row["ttft_ms"]),
        reports.pair(row["tpot_ms"], 1),
        f"{row['goodput']['share']:.1%}",
        f"{row['busy_share']:.2f}",
        number(row["out_bytes"] / 1e9),
        number(row["in_bytes"] / 1e9),
        number(row["lost_blocks"]),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = reports.parser(
        "host_kv", "Replay traces with host memory for evicted KV cache blocks, in virtual time."
    )
    workload = parser.add_argument_group("workload")
    replay.add_trace_arguments(workload, rates=(0.25, 0.5))
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--host-gib",
        type=float,
        nargs="+",
        default=[0.0, 100.0, 200.0, 400.0, 800.0],
        help="budgets of --host-kv-gib; 0: off (default 0 100 200 400 800)",
    )
    engine.add_argument(
        "--host-gbps",
        type=float,
        default=25.0,
        help="assumed bandwidth of copies in each direction, in GB/s (default 25)",
    )
    engine.add_argument(
        "--token-bytes",
        type=int,
        default=TOKEN_BYTES,
        help="KV cache of one token in bytes (default %(default)s)",
    )
    engine.add_argument(
        "--policy", choices=replay.POLICIES, default="fcfs", help="default: %(default)s"
    )
    replay.add_engine_arguments(parser, engine)
    return parser


if __name__ == "__main__":
    sys.exit(main())
