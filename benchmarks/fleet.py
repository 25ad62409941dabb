"""Simulate replicas behind a load balancer on traces of real traffic, in virtual time.

    python -m benchmarks.fleet --trace azure_conv.csv mooncake.jsonl [--replicas 1 8 64]

Every replica runs the engine's own scheduler and block pool on a modeled device, as in `replay`. N
replicas get N times the rate, so that each has the same load.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import replay
from benchmarks import report as reports
from benchmarks.report import number
from benchmarks.simulation import Balancer, Outcome, Replica, arrivals
from forge_jax.engine.process.routing import Route, Router
from forge_jax.schedule.outputs import Delta
from forge_jax.schedule.request import Request
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import Slo
from forge_serve.bench.traces import read_trace


class Random(Balancer):
    """Chooses any replica, with equal probabilities."""

    def __init__(self, replicas: Sequence[Replica], seed: int):
        self._rng = random.Random(f"{seed}:balancer")
        self._count = len(replicas)

    def choose(self, request: Request) -> int:
        return self._rng.randrange(self._count)


class LeastLoaded(Balancer):
    """Chooses the replica with the fewest unfinished requests; at random among several."""

    def __init__(self, replicas: Sequence[Replica], seed: int):
        self._rng = random.Random(f"{seed}:balancer")
        self._replicas = replicas

    def choose(self, request: Request) -> int:
        fewest = min(replica.num_requests for replica in self._replicas)
        chosen = [i for i, each in enumerate(self._replicas) if each.num_requests == fewest]
        return self._rng.choice(chosen)


class PrefixAware(Balancer):
    """Chooses by cached prefix and load, with the router of `--data-parallel`."""

    def __init__(self, replicas: Sequence[Replica], seed: int):
        pool = replicas[0].pool
        self._all = range(len(replicas))
        self._router = Router(pool.block_size, pool.num_blocks)
        self._routes: dict[str, Route] = {}

    def choose(self, request: Request) -> int:
        route = self._routes[request.request_id] = self._router.route(request, self._all)
        return route.engine

    def started(self, request: Request) -> None:
        self._router.take(self._routes[request.request_id], ())

    def finished(self, request: Request, num_output: int) -> None:
        last = Delta(0, token_ids=(0,) * num_output, finish_reason="length")
        self._router.take(self._routes.pop(request.request_id), [last])


BALANCERS = {"random": Random, "least-loaded": LeastLoaded, "prefix-aware": PrefixAware}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    return reports.publish("fleet", args, lambda: simulate(args), markdown)


def simulate(args: argparse.Namespace) -> dict[str, Any]:
    settings = replay.Settings.of(args)
    if any(count < 1 for count in args.replicas):
        raise BenchmarkError("--replicas must be at least 1")
    traces, rows = [], []
    for path in args.trace:
        entries = read_trace(path, args.max_requests)
        requests = arrivals(
            entries, settings.sizes, settings.cost, urgent_share=0.0, seed=args.seed
        )
        traces.append(replay.about(path, entries, requests))
        for rate, count, balancer in itertools.product(args.rates, args.replicas, args.balancers):
            if count == 1 and balancer != args.balancers[0]:
                continue  # every one chooses the only replica
            replicas = [
                Replica(
                    policy=args.policy, sizes=settings.sizes, cost=settings.cost, seed=args.seed
                )
                for _ in range(count)
            ]
            outcome = replay.played(
                f"{path.stem} {rate:g}x, {count} replicas, {balancer}",
                requests,
                replicas,
                rate=rate * count,
                balancer=BALANCERS[balancer](replicas, args.seed),
            )
            which = {"rate": rate, "replicas": count, "balancer": balancer}
            rows.append(
                {
                    "trace": path.stem,
                    **which,
                    **replay.rounded(figures(outcome, settings.slo)),
                }
            )
    return {**settings.report(args), "policy": args.policy, "traces": traces, "rows": rows}


def figures(outcome: Outcome, slo: Slo) -> dict[str, Any]:
    """Return the figures of a replay that do not depend on groups, and the busiest replica's."""
    told = replay.summarize(outcome, slo)
    busy = [replica.device.busy_s for replica in outcome.replicas]
    return {
        **{name: told[name] for name in FIGURES},
        "busiest": max(busy) * len(busy) / sum(busy),
    }


FIGURES = (
    "virtual_s", "output_tokens_per_s", "ttft_ms", "tpot_ms", "e2e_ms", "goodput",
    "prefix_hit_rate", "preemptions", "busy_share", "queue_peak",
)  # fmt: skip
HEADER = (
    "rate", "replicas", "balancer", "TTFT p50 / p99, ms", "TPOT p50 / p99, ms", "goodput",
    "hit rate", "busy", "busiest / mean", "queue peak",
)  # fmt: skip


def markdown(report: dict[str, Any]) -> str:
    lines = [f"{replay.heading(report)}; policy {report['policy']}"]
    for about in report["traces"]:
        rows = [row for row in report["rows"] if row["trace"] == about["trace"]]
        lines += ["", replay.about_text(about), "", reports.table(HEADER, list(map(_cells, rows)))]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['rate']:g}x",
        f"{row['replicas']}",
        row["balancer"] if row["replicas"] > 1 else "-",
        reports.pair(row["ttft_ms"]),
        reports.pair(row["tpot_ms"], 1),
        f"{row['goodput']['share']:.1%}",
        f"{row['prefix_hit_rate']:.2f}",
        f"{row['busy_share']:.2f}",
        f"{row['busiest']:.2f}",
        number(row["queue_peak"]),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = reports.parser("fleet", "Simulate replicas behind a load balancer, in virtual time.")
    workload = parser.add_argument_group("workload")
    replay.add_trace_arguments(workload, rates=(0.25, 0.5))
    fleet = parser.add_argument_group("fleet")
    fleet.add_argument(
        "--replicas", type=int, nargs="+", default=[1, 8, 64], help="default: 1 8 64"
    )
    fleet.add_argument(
        "--balancers", nargs="+", choices=BALANCERS, default=list(BALANCERS), help="default: all"
    )
    fleet.add_argument(
        "--policy", choices=replay.POLICIES, default="prefix", help="default: %(default)s"
    )
    replay.add_engine_arguments(parser, fleet)
    return parser


if __name__ == "__main__":
    sys.exit(main())
