"""Compare kinds of batching on the same offline requests, through `LLM`.

    python -m benchmarks.throughput [--model forge-tiny] [--rounds 5] [--output FILE.json]

The variants take turns within each round. If this version of the engine does not have a variant,
its row names the missing option.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks import report as reports
from benchmarks.report import engine_config_error, number
from benchmarks.workloads import mixed
from forge_jax import LLM
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.in_process import sampling_params
from forge_serve.bench.metrics import median
from forge_serve.bench.workload import WARM_UP, Request, Sizes, Vocabulary

SMALLEST_BLOCK = 16  # tokens; of the automatic block sizes


@dataclass(frozen=True, kw_only=True)
class Variant:
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    one_at_a_time: bool = False
    whole_prompts: bool = False  # True if a step must hold all prompts of a batch


VARIANTS = (
    Variant(
        name="sequential: one request at a time",
        options={"prefix_cache": False},
        one_at_a_time=True,
    ),
    Variant(
        name="static batching",
        options={
            "batching": "static",
            "one_step_ahead": False,
            "chunked_prefill": False,
            "prefix_cache": False,
        },
        whole_prompts=True,
    ),
    Variant(name="continuous batching", options={"prefix_cache": False}),
    Variant(name="+ prefix cache"),
    Variant(name="+ speculation", options={"speculation": "suffix"}),
)


def main(argv: Sequence[str] | None = None) -> int:
    description = "Compare kinds of batching, offline."
    args = offline_parser("throughput", description, 48, 16, 1024).parse_args(argv)
    return reports.publish("throughput", args, lambda: compare(args), markdown)


def offline_parser(
    name: str, description: str, requests: int, max_num_seqs: int, context: int
) -> argparse.ArgumentParser:
    """Return the arguments of benchmarks that send `mixed` requests to an engine."""
    parser = reports.parser(name, description, model="forge-tiny", rounds=5)
    reports.options(
        parser,
        ("--requests", int, requests, "per round"),
        ("--max-num-seqs", int, max_num_seqs, "concurrent sequences"),
        ("--context", int, context, "longest prompt plus output, in tokens"),
        ("--seed", int, 0, "of the requests"),
    )
    return parser


def engine_options(args: argparse.Namespace) -> dict[str, int]:
    return {
        "max_model_len": args.context,
        "max_num_seqs": args.max_num_seqs,
        "num_blocks": -(-args.context // SMALLEST_BLOCK) * args.max_num_seqs,
    }


def requests_of(args: argparse.Namespace) -> Callable[[int], Sequence[Request]]:
    """Return a function from the index of a round to its requests."""
    sizes = Sizes(context=args.context, num_requests=args.requests)
    vocabulary = Vocabulary.of_model(args.model)
    return lambda round_: mixed(sizes, vocabulary, args.seed, round_).requests


def facts(args: argparse.Namespace, work: Sequence[Request]) -> dict[str, Any]:
    """Return the report's facts about the load."""
    return {
        "model": args.model,
        "max_num_seqs": args.max_num_seqs,
        "context": args.context,
        "seed": args.seed,
        "requests": len(work),
        "prompt_tokens": sum(len(r.prompt) for r in work),
        "output_tokens": sum(r.max_tokens for r in work),
        "rounds": args.rounds,
    }


def title(report: dict[str, Any]) -> str:
    return (
        f"{reports.heading(report)}; {report['model']}, {report['requests']} requests, "
        f"{report['prompt_tokens']} prompt and {report['output_tokens']} output tokens, "
        f"{report['max_num_seqs']} concurrent; medians of {report['rounds']} rounds\n\n"
    )


def span(samples: Sequence[float]) -> str:
    return f"{number(min(samples))} to {number(max(samples))}"


def compare(args: argparse.Namespace) -> dict[str, Any]:
    base, make = engine_options(args), requests_of(args)
    work = make(0)
    asked = sum(r.max_tokens for r in work)
    rows = [_row(variant, work, args.max_num_seqs) for variant in VARIANTS]
    engines = {
        i: LLM(args.model, **base, **row["options"])
        for i, row in enumerate(rows)
        if "skipped" not in row
    }
    for i, llm in engines.items():
        seconds(llm, make(WARM_UP)[: args.max_num_seqs], VARIANTS[i].one_at_a_time)
    for round_, i in reports.turns(list(engines), args.rounds):
        wall_s = seconds(engines[i], make(round_), VARIANTS[i].one_at_a_time)
        rows[i]["samples"].append(asked / wall_s)
    for row in rows:
        if row.get("samples"):
            row["output_tokens_per_s"] = median(row["samples"])
            row["ratio"] = reports.median_ratio(row["samples"], rows[0]["samples"])
    return {**facts(args, work), "variants": rows}


def seconds(llm: LLM, requests: Sequence[Request], one_at_a_time: bool) -> float:
    """Return the seconds that the requests take; raise unless all their tokens came."""
    batches = [[r] for r in requests] if one_at_a_time else [list(requests)]
    tokens = 0
    start = time.perf_counter()
    for batch in batches:
        outputs = llm.generate(
            [r.prompt for r in batch], [sampling_params(r) for r in batch], progress=False
        )
        tokens += sum(len(o.outputs[0].token_ids) for o in outputs)
    wall_s = time.perf_counter() - start
    check_tokens(tokens, requests)
    return wall_s


def check_tokens(tokens: int, requests: Sequence[Request]) -> None:
    """Raise `BenchmarkError` unless exactly all output tokens came."""
    asked = sum(r.max_tokens for r in requests)
    if tokens != asked:
        raise BenchmarkError(f"{tokens} output tokens came, expected {asked}")


def markdown(report: dict[str, Any]) -> str:
    rows = []
    for row in report["variants"]:
        if "skipped" in row:
            rows.append((row["variant"], "-", "-", f"skipped: {row['skipped']}"))
            continue
        rate = number(row["output_tokens_per_s"])
        rows.append((row["variant"], rate, f"{row['ratio']:.2f}", span(row["samples"])))
    header = ("variant", "output tokens/s", "to sequential", "lowest to highest")
    return title(report) + reports.table(header, rows)


def _row(variant: Variant, work: Sequence[Request], max_num_seqs: int) -> dict[str, Any]:
    options = dict(variant.options)
    if variant.whole_prompts:
        longest = sorted((len(r.prompt) for r in work), reverse=True)
        options["max_num_batched_tokens"] = sum(longest[:max_num_seqs])
    row: dict[str, Any] = {"variant": variant.name, "options": options}
    skipped = engine_config_error(**options)
    return row | ({"samples": []} if skipped is None else {"skipped": skipped})


if __name__ == "__main__":
    sys.exit(main())
