"""Measure workloads against any OpenAI-compatible server.

    python -m benchmarks.serving --workload all                   # our own, the bundled model
    python -m benchmarks.serving --url http://127.0.0.1:8000 --workload baseline --rate 8
    python -m benchmarks.serving --trace azure.csv --trace-scale 0.1 --max-requests 200

If --url is missing, it starts its own server. Exits with 1 if a request failed. README.md
explains the figures and how to compare two servers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report as reports
from benchmarks import workloads
from benchmarks.report import number
from benchmarks.serving_process import serving
from forge_serve.bench.arrivals import with_load
from forge_serve.bench.client import Server, run, run_async
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import Slo, refusal, summarize
from forge_serve.bench.traces import TraceEntry, read_trace, trace
from forge_serve.bench.workload import WARM_UP, Sizes, Vocabulary, Workload

Make = Callable[[int], Workload]  # makes a round's workload from its index
Traces = Mapping[Path, Sequence[TraceEntry]]
ALL = "all"
THROUGHPUT = ("workload", "answered", "requests/s", "output tokens/s", "all tokens/s")
LATENCIES = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "whole request"}
PERCENTILES = ("p50", "p95", "p99")


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    found: dict[str, Any] = {}

    def measure_all() -> dict[str, Any]:
        found.update(_report(args))
        return found

    status = reports.publish("serving", args, measure_all, markdown)
    return status or int(any(map(_failed, found["runs"])))


async def measure(
    server: Server, make: Make, *, warm_up: int = 4, slo: Slo | None = None, progress: bool = False
) -> dict[str, Any]:
    """Run one workload after a warm-up of its first requests and return its entry of the report."""
    workload = make(0)
    entry = {
        "workload": workload.name,
        "endpoint": workload.endpoint or server.endpoint,
        "load": workload.load,
        "facts": dict(workload.facts),
    }
    if warm_up:
        warm = await run(server.submit, _first(make(WARM_UP), warm_up))
        refused = refusal(warm.measured)
        if refused is not None:
            return entry | {"unsupported": refused}
    before, client_s = await server.counters(), time.process_time()
    done = await run(server.submit, workload, progress=progress)
    client_s = time.process_time() - client_s
    after = await server.counters()
    refused = refusal(done.measured)
    if refused is not None:
        return entry | {"unsupported": refused}
    return entry | {
        **summarize(done.measured, done.wall_s, slo),
        "client_cpu_share": client_s / done.wall_s,
        "server": counted(before, after),
    }


def counted(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return the changes of the server's counters during one run."""
    during = {name: after[name] - before.get(name, 0) for name in after}
    if "compilations_after_ready" in after:
        during["compilations_after_ready"] = after[
            "compilations_after_ready"
        ]  # since the server's start
    if during.get("prefix_cache_queries"):
        hits = during.get("prefix_cache_hits", 0)
        during["prefix_cache_hit_rate"] = hits / during["prefix_cache_queries"]
    accepted = during.get("accepted_draft_tokens", 0)
    if during.get("draft_tokens"):
        during["draft_acceptance"] = accepted / during["draft_tokens"]
    if during.get("drafts"):
        during["mean_accepted_length"] = accepted / during["drafts"]
    return during


def markdown(report: dict[str, Any]) -> str:
    server = report["server"]
    lines = [f"{reports.heading(report)}; {server['model']}, context {server['context']}", ""]
    lines += [f"Latencies in ms, {' / '.join(PERCENTILES)}.", ""]
    rows = [row for entry in report["runs"] if "unsupported" not in entry for row in _rows(entry)]
    lines += [reports.table([*THROUGHPUT, *LATENCIES.values()], rows), ""]
    for entry in report["runs"]:
        lines += [f"- {entry['workload']}: {remark}" for remark in _remarks(entry)]
    return "\n".join(lines)


def _rows(entry: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a workload's row of the table, and one for each of its groups of requests."""
    yield [
        entry["workload"],
        f"{entry['completed']} of {entry['requests']}",
        number(entry["requests_per_s"], 1),
        number(entry["output_tokens_per_s"]),
        number(entry["total_tokens_per_s"]),
        *_latencies(entry),
    ]
    for name, figures in entry.get("groups", {}).items():
        blank = [""] * (len(THROUGHPUT) - 1)
        yield [f"{entry['workload']}: {name}", *blank, *_latencies(figures)]


def _latencies(figures: dict[str, Any]) -> list[str]:
    return [_spread(figures[column]) for column in LATENCIES]


def _spread(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return " / ".join(number(spread[p], 1) for p in PERCENTILES)


def _remarks(entry: dict[str, Any]) -> list[str]:
    """Return the facts that the tables do not show."""
    if "unsupported" in entry:
        return [f"unsupported by this server ({entry['unsupported']})"]
    remarks = [entry["load"]]
    if "goodput" in entry:
        goodput = entry["goodput"]
        slo = ", ".join(
            f"{name.removesuffix('_ms')} {v:g} ms" for name, v in goodput["slo"].items()
        )
        remarks.append(
            f"goodput {goodput['requests_per_s']:.1f} requests/s within {slo} "
            f"({goodput['share']:.0%} of the requests)"
        )
    if entry["events"] and entry["output_tokens"] > entry["events"] * 1.01:
        remarks.append(f"{entry['output_tokens']} tokens came in {entry['events']} events")
    if entry["output_tokens"] < entry["output_tokens_asked"]:
        remarks.append(
            f"{entry['output_tokens']} of {entry['output_tokens_asked']} requested output tokens"
        )
    if "json_valid" in entry:
        remarks.append(f"{entry['json_valid']} of {entry['completed']} answers were JSON objects")
    if entry["requests_without_usage"]:
        remarks.append("the server reports no usage: events are counted as tokens")
    late = entry["client_late_ms"]
    if late is not None and late["p99"] > 50:
        remarks.append(f"the client sent late: p99 {late['p99']:.0f} ms")
    facts = {**entry["facts"], **entry["server"]}
    if facts:
        remarks.append(", ".join(f"{name} {_short(value)}" for name, value in facts.items()))
    remarks += [f"error: {error} ({count} times)" for error, count in entry["errors"].items()]
    return remarks


def _short(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.3g}"


def _failed(entry: dict[str, Any]) -> bool:
    """Return True if a request failed; an unsupported structured output is no failure."""
    if "unsupported" in entry:
        return entry["workload"] != "structured"
    return bool(entry["errors"])


def _report(args: argparse.Namespace) -> dict[str, Any]:
    traces = {path: read_trace(path, args.max_requests) for path in args.trace}
    with contextlib.ExitStack() as stack:
        url, ready_s, model, arguments = args.url, None, args.model, shlex.split(args.serve_args)
        if url is None:
            arguments = [args.model or "forge-tiny", *arguments]
            url, ready_s = stack.enter_context(serving(arguments))
            model = None
        elif arguments:
            raise BenchmarkError("--serve-args is for a server started here: leave out --url")
        server, runs = run_async(_run_all(args, url, model, traces))
    started = {} if ready_s is None else {"arguments": arguments, "ready_s": ready_s}
    return {"seed": args.seed, "server": server | started, "runs": runs}


async def _run_all(
    args: argparse.Namespace, url: str, model: str | None, traces: Traces
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    async with Server.connect(
        url,
        model=model,
        api_key=args.api_key,
        vocabulary=None if args.tokenizer is None else Vocabulary.from_file(args.tokenizer),
        endpoint=args.endpoint,
        prompts=args.prompts,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
    ) as server:
        sizes = _sizes(args, server)
        slo = Slo(
            ttft_ms=args.slo_ttft_ms,
            itl_ms=args.slo_itl_ms,
            tpot_ms=args.slo_tpot_ms,
            e2e_ms=args.slo_e2e_ms,
        )
        makers = _makers(args, server.vocabulary, sizes, traces)
        runs = [
            await measure(server, make, warm_up=args.warm_up, slo=slo, progress=True)
            for make in makers
        ]
        about = {
            "model": server.model,
            "context": sizes.context,
            "endpoint": server.endpoint,
            "prompts": "text" if server.endpoint == "chat" else server.prompts,
            "ignore_eos": server.ignore_eos,
        }
        return about, runs


def _sizes(args: argparse.Namespace, server: Server) -> Sizes:
    context = args.context or server.context
    if context is None:
        raise BenchmarkError("the server does not report its context length: pass --context")
    if server.endpoint == "chat" or server.prompts == "text":
        server.vocabulary.text(server.vocabulary.ids[:2])  # raises if there is no tokenizer
        context -= workloads.TEMPLATE_TOKENS
    return Sizes(
        context=context,
        num_requests=args.requests,
        input_len=args.input_len,
        output_len=args.output_len,
    )


def _makers(
    args: argparse.Namespace, vocabulary: Vocabulary, sizes: Sizes, traces: Traces
) -> list[Make]:
    """Return the requested workloads, checked, as functions of the round."""
    names = args.workload or ([] if args.trace else [ALL])
    if ALL in names:
        names = list(workloads.WORKLOADS)
    if (args.input_len or args.output_len) and names != ["baseline"]:
        raise BenchmarkError("--input-len and --output-len need --workload baseline")

    def loaded(make: Make) -> Make:
        def make_loaded(round_: int) -> Workload:
            return with_load(
                make(round_),
                rate=args.rate,
                burstiness=args.burstiness,
                concurrency=args.concurrency,
                seed=args.seed,
            )

        make_loaded(0)  # report a wrong flag before anything runs
        return make_loaded

    def named(name: str) -> Make:
        return lambda r: workloads.make(name, sizes, vocabulary, seed=args.seed, round_=r)

    def replay(path: Path) -> Make:
        return lambda r: trace(
            traces[path],
            sizes,
            vocabulary,
            name=f"trace {path.stem}",
            time_scale=args.trace_scale,
            seed=args.seed,
            round_=r,
        )

    return [loaded(named(n)) for n in names] + [loaded(replay(path)) for path in traces]


def _first(workload: Workload, count: int) -> Workload:
    """Return a workload's first requests, all at once."""
    requests = tuple(
        dataclasses.replace(request, arrival_s=0.0, after=None)
        for request in workload.requests[:count]
    )
    return dataclasses.replace(workload, requests=requests, concurrency={})


def _parser() -> argparse.ArgumentParser:
    parser = reports.parser("serving", "Measure workloads against any OpenAI-compatible server.")
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="URL of a running server (default: start one)")
    server.add_argument(
        "--model", help="name of the model at --url, or the model to serve (default forge-tiny)"
    )
    server.add_argument("--api-key", help="API key, sent as a bearer token")
    server.add_argument("--serve-args", default="", help="flags for the started server")
    server.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    server.add_argument(
        "--prompts",
        choices=("ids", "text"),
        default="ids",
        help="form of completion prompts; chats are always text",
    )
    server.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json or its folder, for text prompts"
    )
    server.add_argument(
        "--context", type=int, help="context length in tokens (default: reported by the server)"
    )
    server.add_argument("--temperature", type=float, default=0.0)
    server.add_argument(
        "--no-ignore-eos",
        dest="ignore_eos",
        action="store_false",
        help="for servers that reject the field ignore_eos",
    )

    what = parser.add_argument_group("workload")
    what.add_argument(
        "--workload",
        nargs="+",
        choices=(ALL, *workloads.WORKLOADS),
        metavar="NAME",
        help=f"{', '.join(workloads.WORKLOADS)}, or {ALL} of them (default: {ALL})",
    )
    what.add_argument("--requests", type=int, default=64, help="requests per workload (default 64)")
    what.add_argument("--input-len", type=int, help="tokens, of baseline")
    what.add_argument("--output-len", type=int, help="tokens, of baseline")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument(
        "--trace", type=Path, nargs="+", default=[], help="Azure CSV or Mooncake JSON lines"
    )
    what.add_argument(
        "--trace-scale", type=float, default=1.0, help="factor of the trace's times (default 1)"
    )
    what.add_argument(
        "--max-requests", type=int, help="maximum number of requests per trace (default: all)"
    )

    load = parser.add_argument_group("load", "default: each workload's own")
    load.add_argument("--rate", type=float, help="requests/s, Poisson; inf: all at once")
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="gamma shape of the arrival intervals; 1: Poisson (default)",
    )
    load.add_argument("--concurrency", type=int, help="concurrent requests (closed loop)")
    load.add_argument(
        "--warm-up", type=int, default=4, help="warm-up requests before each workload (default 4)"
    )

    for name, of in (
        ("ttft", "TTFT"),
        ("itl", "the longest inter-token latency"),
        ("tpot", "the mean time per output token"),
        ("e2e", "the whole request"),
    ):
        load.add_argument(f"--slo-{name}-ms", type=float, help=f"goodput's limit on {of}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
