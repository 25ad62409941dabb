"""Compare the engine with each option on and off, on a workload where the option should matter.

    python -m benchmarks.ablation [--switch NAME ...] [--rounds 5] [--output FILE.json]

Two engines in this process differ in one switch and take turns on the same requests. If this
version of the engine does not have a switch, its row names the missing option.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from benchmarks import report as reports
from benchmarks import workloads
from benchmarks.report import engine_config_error, number
from benchmarks.workloads import Maker
from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError
from forge_serve.bench.arrivals import with_load
from forge_serve.bench.client import Run, run, run_async
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.in_process import Submitter
from forge_serve.bench.metrics import latencies, median
from forge_serve.bench.workload import ALL, WARM_UP, Sizes, Vocabulary, Workload

Options = Mapping[str, Any]
Better = Literal["higher", "lower"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    better: Better
    of: Callable[[Run, Submitter], float]
    digits: int = 0


def _output_rate(done: Run, _: Submitter) -> float:
    return sum(m.completion_tokens for m in done.measured) / done.wall_s


def _latency(kind: str, at: str, group: str = ALL) -> Callable[[Run, Submitter], float]:
    def of(done: Run, _: Submitter) -> float:
        members = [m for m in done.measured if group in (ALL, m.group)]
        spread = latencies(members)[kind]
        assert spread is not None, f"{kind} of no requests"
        return spread[at]

    return of


OUTPUT = Figure(name="output tokens/s", better="higher", of=_output_rate)
TTFT = Figure(name="TTFT p50, ms", better="lower", of=_latency("ttft_ms", "p50"), digits=1)
DECODER_ITL = Figure(
    name="ITL p99 of decoding sequences, ms",
    better="lower",
    of=_latency("itl_ms", "p99", "decoder"),
    digits=1,
)
LONG_TTFT = Figure(
    name="TTFT p50 of long prompts, ms",
    better="lower",
    of=_latency("ttft_ms", "p50", "long"),
    digits=1,
)
AT_ONCE = Figure(
    name="concurrent sequences in the same memory",
    better="higher",
    of=lambda _, submitter: submitter.most_running,
)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """A switch: the engine with `on` against the engine with `off`, on a workload."""

    name: str
    off: Options
    workload: Maker
    figures: tuple[Figure, ...]
    on: Options = field(default_factory=dict)  # added to the defaults; empty: the default itself
    labels: tuple[str, str] = ("on", "off")


def all_at_once(workload: Maker) -> Maker:
    """Return the same requests without arrival times."""

    def make(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
        made = workload(sizes, vocabulary, seed, round_)
        return with_load(made, rate=float("inf"))

    return make


def many(workload: Maker, times: int) -> Maker:
    """Return a workload with `times` as many requests, more than fit into the cache at once."""

    def make(sizes: Sizes, vocabulary: Vocabulary, seed: int, round_: int) -> Workload:
        more = dataclasses.replace(sizes, num_requests=times * sizes.num_requests)
        return workload(more, vocabulary, seed, round_)

    return make


def switches(context: int) -> tuple[Switch, ...]:
    """Return all switches that compare engines, for sequences of up to `context` tokens."""
    block_size = 16 if jax.default_backend() == "cpu" else 64
    cache_tokens = 16 * context  # enough for 16 sequences of the whole context
    return (
        Switch(
            name="one_step_ahead",
            off={"one_step_ahead": False},
            workload=workloads.baseline,
            figures=(OUTPUT,),
        ),
        Switch(  # without chunking, a step must hold whole prompts
            name="chunked_prefill",
            on={"max_num_batched_tokens": context // 4, "itl_target_ms": 0},
            off={"max_num_batched_tokens": context, "chunked_prefill": False},
            workload=workloads.chunked_prefill,
            figures=(DECODER_ITL, OUTPUT),
        ),
        Switch(
            name="itl_target",
            off={"itl_target_ms": 0},
            workload=workloads.chunked_prefill,
            figures=(DECODER_ITL, LONG_TTFT, OUTPUT),
        ),
        Switch(
            name="prefix_cache",
            off={"prefix_cache": False},
            workload=workloads.prefix_caching,
            figures=(TTFT, OUTPUT),
        ),
        Switch(
            name="kv_cache",
            on={"num_blocks": cache_tokens // block_size, "block_size": block_size},
            off={"num_blocks": cache_tokens // context, "kv_cache": "contiguous"},
            workload=many(workloads.paged_attention, 3),
            figures=(AT_ONCE, OUTPUT),
            labels=("paged", "contiguous"),
        ),
        Switch(  # a static batch holds what one step can hold of the prompts: room for 16
            name="batching",
            on={"max_num_seqs": 16},
            off={
                "max_num_seqs": 16,
                "max_num_batched_tokens": 16 * context // 8,
                "batching": "static",
            },
            workload=all_at_once(workloads.continuous_batching),
            figures=(OUTPUT, TTFT),
            labels=("continuous", "static"),
        ),
        Switch(
            name="deterministic",
            on={"deterministic": True},
            off={},
            workload=workloads.baseline,
            figures=(OUTPUT, TTFT),
        ),
        Switch(
            name="kernels",
            off={"kernels": "xla"},
            workload=workloads.baseline,
            figures=(OUTPUT, TTFT),
            labels=("auto", "xla"),
        ),
    )


NAMES = tuple(switch.name for switch in switches(1024))


def main(argv: Sequence[str] | None = None) -> int:
    parser = reports.parser(
        "ablation", "Compare the engine with each option on and off.", model="forge-tiny", rounds=5
    )
    parser.add_argument("--switch", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--requests", type=int, default=48, help="per run (default 48)")
    parser.add_argument(
        "--context",
        type=int,
        default=1024,
        help="longest prompt plus output, in tokens (default 1024)",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    def measure() -> dict[str, Any]:
        return {
            **{
                key: getattr(args, key)
                for key in ("model", "context", "requests", "rounds", "seed")
            },
            "switches": run_async(_all(args)),
        }

    return reports.publish("ablation", args, measure, markdown)


async def _all(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    chosen = [s for s in switches(args.context) if s.name in args.switch]
    for switch in chosen:
        skipped = engine_config_error(**switch.on) or engine_config_error(**switch.off)
        if skipped is None:
            try:
                rows += await compare(switch, args)
                continue
            except ConfigError as error:  # the switch exists, but not for this model
                skipped = str(error)
        rows.append({"switch": switch.name, "skipped": skipped})
    return rows


async def compare(switch: Switch, args: argparse.Namespace) -> list[dict[str, Any]]:
    sizes = Sizes(context=args.context, num_requests=args.requests)
    vocabulary = Vocabulary.of_model(args.model)
    samples: list[list[tuple[float, ...]]] = [[], []]  # samples of on and off, by round
    options = (switch.on, switch.off)
    async with contextlib.AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(_engine(args, option)) for option in options]
        warm_up = switch.workload(sizes, vocabulary, args.seed, WARM_UP)
        for side in sides:
            await run(side.submit, warm_up)
        for round_, i in reports.turns((0, 1), args.rounds, switch.name):
            workload = switch.workload(sizes, vocabulary, args.seed, round_)
            sides[i].most_running = 0
            done = await run(sides[i].submit, workload)
            _check(done, workload)
            samples[i].append(tuple(figure.of(done, sides[i]) for figure in switch.figures))
    gc.collect()  # free the engines' device memory before the next ones are made
    about = {"workload": warm_up.name, "options": [dict(option) for option in options]}
    columns = [list(zip(*side, strict=True)) for side in samples]
    return [
        {"switch": switch.name, **about, **_row(switch, figure, list(on), list(off))}
        for figure, on, off in zip(switch.figures, *columns, strict=True)
    ]


@contextlib.asynccontextmanager
async def _engine(args: argparse.Namespace, options: Options) -> AsyncIterator[Submitter]:
    config = EngineConfig.from_options(model=args.model, max_model_len=args.context, **options)
    engine = Engine.load(config)
    engine.start()
    try:
        yield Submitter(engine)
    finally:
        await engine.stop()


def _check(done: Run, workload: Workload) -> None:
    """Raise `BenchmarkError` unless all of the work was done."""
    errors = {m.error for m in done.measured if m.error is not None}
    if errors:
        raise BenchmarkError(f"{workload.name}: {'; '.join(sorted(errors))}")
    tokens = sum(m.completion_tokens for m in done.measured)
    asked = sum(r.max_tokens for r in workload.requests)
    if tokens != asked:
        raise BenchmarkError(f"{workload.name}: {tokens} output tokens instead of {asked}")


def _row(switch: Switch, figure: Figure, on: list[float], off: list[float]) -> dict[str, Any]:
    return {
        "figure": figure.name,
        "better": figure.better,
        "digits": figure.digits,
        "labels": list(switch.labels),
        "medians": [median(on), median(off)],
        "ratio": reports.median_ratio(on, off),
        "ratios": [x / y for x, y in zip(on, off, strict=True)],
        "samples": [on, off],
    }


def markdown(report: dict[str, Any]) -> str:
    rows = []
    for row in report["switches"]:
        if "skipped" in row:
            rows.append((row["switch"], f"skipped: {row['skipped']}", *["-"] * 4))
            continue
        sides = [
            f"{number(value, row['digits'])} ({label})"
            for label, value in zip(row["labels"], row["medians"], strict=True)
        ]
        ratio = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        rows.append((row["switch"], row["figure"], *sides, ratio, row["better"]))
    lines = [
        f"{reports.heading(report)}; {report['model']}, context {report['context']}, "
        f"{report['requests']} requests per run, medians of {report['rounds']} rounds",
        "",
        reports.table(("switch", "figure", "with", "against", "ratio", "better"), rows),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
