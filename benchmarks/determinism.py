"""Measure the cost of the deterministic tier: flipped tokens, tokens/s and TTFT by tier.

    python -m benchmarks.determinism [--model forge-tiny] [--steps 64] [--output FILE.json]

All engines run in this process and take turns, so that they see the same machine. A sequence is
flipped if a token differs between running alone and running in a batch or in chunks. Only the first
such token counts, because the text after it has another prefix.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import report as reports
from forge_jax import Engine, EngineConfig, SamplingParams
from forge_serve.bench.in_process import ready

WORDS = "the dog saw a small red house by the river and ran to tell his old friend".split()
NUMBERS = itertools.count()
WORKLOADS = {  # name -> (concurrent requests, words of a prompt, output tokens)
    "one request": (1, 20, 64),
    "8 requests": (8, 20, 64),
    "32 requests": (32, 20, 64),
    "32 requests with long prompts": (32, 300, 16),
    "one long prompt": (1, 500, 8),
}


@dataclass(frozen=True, kw_only=True)
class Tier:
    name: str
    engine: Engine
    startup_s: float


def main() -> int:
    parser = reports.parser(
        "determinism", "Measure the cost of the deterministic tier.", model="forge-tiny", rounds=7
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        default=[64],
        help="tokens of the deterministic tier's steps (default 64)",
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--kernels", choices=("auto", "xla"), default="auto")
    parser.add_argument(
        "--sequences",
        type=int,
        default=48,
        help="sequences compared for flipped tokens (default 48)",
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="tokens of each compared sequence (default 128)"
    )
    args = parser.parse_args()

    def measure_all() -> dict[str, Any]:
        dtypes = {dtype: asyncio.run(measure(args, dtype)) for dtype in args.dtypes}
        return {"model": args.model, "kernels": args.kernels, "dtypes": dtypes}

    return reports.publish("determinism", args, measure_all, table)


async def measure(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    common = {"model": args.model, "dtype": dtype, "kernels": args.kernels}
    tiers = [await start("default", **common)]
    for step in args.steps:
        options = {"deterministic": True, "max_num_batched_tokens": step}
        tiers.append(await start(f"deterministic, T={step}", **common, **options))
    flips = {tier.name: await flipped(tier.engine, args) for tier in tiers}
    samples: dict[str, dict[str, list[Timing]]] = {
        name: {tier.name: [] for tier in tiers} for name in WORKLOADS
    }
    for round_ in range(args.rounds + 1):
        for name, (requests, words, tokens) in WORKLOADS.items():
            for tier in tiers:
                prompts = [text(words, 1000 * round_ + i) for i in range(requests)]
                timing = await timed(tier.engine, prompts, tokens)
                if round_:  # the first round warms up
                    samples[name][tier.name].append(timing)
    for tier in tiers:
        await tier.engine.stop()
    return {
        "startup_s": {tier.name: tier.startup_s for tier in tiers},
        "flipped": flips,
        "workloads": {
            name: {tier: summary(timings) for tier, timings in by_tier.items()}
            for name, by_tier in samples.items()
        },
    }


async def start(name: str, **options: Any) -> Tier:
    begin = time.perf_counter()
    engine = Engine.load(EngineConfig.from_options(prefix_cache=False, max_num_seqs=64, **options))
    engine.start()
    await ready(engine)
    return Tier(name=name, engine=engine, startup_s=time.perf_counter() - begin)


def text(words: int, seed: int) -> str:
    """Return a prompt of `words` words whose beginning is unique."""
    return " ".join([str(seed), *(WORDS[(seed + i * i) % len(WORDS)] for i in range(words))])


# ---- speed ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    tokens_per_s: float
    ttft_s: float  # median over the requests


async def timed(engine: Engine, prompts: list[str], tokens: int) -> Timing:
    begin = time.perf_counter()
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    firsts = await asyncio.gather(*(first_token_s(engine, p, params) for p in prompts))
    wall_s = time.perf_counter() - begin
    return Timing(len(prompts) * tokens / wall_s, statistics.median(firsts))


async def first_token_s(engine: Engine, prompt: str, params: SamplingParams) -> float:
    begin, first = time.perf_counter(), None
    async for _ in submit(engine, prompt, params):
        first = first or time.perf_counter()
    assert first is not None
    return first - begin


def submit(engine: Engine, prompt: str, params: SamplingParams) -> Any:
    assert engine.tokenizer is not None
    return engine.submit(engine.tokenizer.encode(prompt), params, request_id=f"r{next(NUMBERS)}")


def summary(timings: list[Timing]) -> dict[str, float]:
    return {
        "tokens_per_s": statistics.median(t.tokens_per_s for t in timings),
        "ttft_ms": 1e3 * statistics.median(t.ttft_s for t in timings),
    }


# ---- flipped tokens ------------------------------------------------------------------------------


async def flipped(engine: Engine, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Run each sequence alone, then all at once: greedy, and at temperature 1."""
    found = {}
    for temperature in (0.0, 1.0):
        prompts = [text(5 + 7 * (i % 30), i) for i in range(args.sequences)]
        params = [
            SamplingParams(max_tokens=args.tokens, temperature=temperature, seed=i, ignore_eos=True)
            for i in range(args.sequences)
        ]
        alone = [await output(engine, *one) for one in zip(prompts, params, strict=True)]
        crowd = await asyncio.gather(
            *(output(engine, *one) for one in zip(prompts, params, strict=True))
        )
        found[f"temperature {temperature:g}"] = count_flips(alone, crowd)
    return found


async def output(engine: Engine, prompt: str, params: SamplingParams) -> list[int]:
    return [
        t async for deltas in submit(engine, prompt, params) for d in deltas for t in d.token_ids
    ]


def count_flips(alone: list[list[int]], crowd: Iterable[list[int]]) -> dict[str, float]:
    sequences = flips = tokens = 0
    for a, b in zip(alone, crowd, strict=True):
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        sequences += 1
        flips += same is not None
        tokens += len(a) if same is None else same + 1
    return {
        "sequences": sequences,
        "flipped_sequences": flips,
        "compared_tokens": tokens,
        "flips_per_1000_tokens": 1e3 * flips / tokens,
    }


# ---- the report ----------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> str:
    parts = [f"{reports.heading(report)}, {report['model']}, kernels {report['kernels']}"]
    for dtype, figures in report["dtypes"].items():
        rows = [
            (
                *(name, tier, f"{t['tokens_per_s']:,.0f}", f"{t['ttft_ms']:.1f} ms"),
                f"{t['tokens_per_s'] / tiers['default']['tokens_per_s']:.2f}",
            )
            for name, tiers in figures["workloads"].items()
            for tier, t in tiers.items()
        ]
        header = (dtype, "tier", "tokens/s", "TTFT", "tokens/s to the default's")
        parts.append(reports.table(header, rows))
        rows = [
            (
                *(kind, tier, f"{f['flipped_sequences']} of {f['sequences']}"),
                f"{f['flips_per_1000_tokens']:.2f}",
            )
            for tier, kinds in figures["flipped"].items()
            for kind, f in kinds.items()
        ]
        header = (dtype, "tier", "flipped sequences", "flips per 1,000 tokens")
        parts.append(reports.table(header, rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
