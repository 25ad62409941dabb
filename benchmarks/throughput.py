"""What does each kind of batching bring? The same requests offline, through `LLM`.

    python -m benchmarks.throughput [--model forge-tiny] [--rounds 5] [--output FILE.json]

The variants take turns within each round. A variant that this version of the engine does not have
is a row that says so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import report as reports
from benchmarks.in_process import why_not
from benchmarks.report import number
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
    whole_prompts: bool = False  # a step must hold all prompts of a batch


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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.throughput",
        description="What does each kind of batching bring, offline?",
    )
    parser.add_argument("--model", default="forge-tiny", help="what to run (default forge-tiny)")
    parser.add_argument("--requests", type=int, default=48, help="per round (default 48)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument(
        "--max-num-seqs", type=int, default=16, help="size of a batch, of every kind (default 16)"
    )
    parser.add_argument(
        "--context", type=int, default=1024, help="longest prompt plus output (default 1024)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    args = parser.parse_args(argv)
    return reports.publish("throughput", args, lambda: compare(args), markdown)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs every variant on every round."""
    sizes = Sizes(context=args.context, num_requests=args.requests)
    base = {
        "max_model_len": args.context,
        "max_num_seqs": args.max_num_seqs,
        "num_blocks": -(-args.context // SMALLEST_BLOCK) * args.max_num_seqs,
    }
    vocabulary = Vocabulary.of_model(args.model)
    work = mixed(sizes, vocabulary, args.seed, 0).requests
    asked = sum(r.max_tokens for r in work)
    rows = [_row(variant, work, args.max_num_seqs) for variant in VARIANTS]
    engines = {
        i: LLM(args.model, **base, **row["options"])
        for i, row in enumerate(rows)
        if "skipped" not in row
    }
    for i, llm in engines.items():
        warm_up = mixed(sizes, vocabulary, args.seed, WARM_UP).requests
        seconds(llm, warm_up[: args.max_num_seqs], VARIANTS[i].one_at_a_time)
    with tqdm(total=args.rounds * len(engines), unit="run", disable=None) as bar:
        for round_ in range(args.rounds):
            requests = mixed(sizes, vocabulary, args.seed, round_).requests
            for i in _rotated(list(engines), round_):
                wall_s = seconds(engines[i], requests, VARIANTS[i].one_at_a_time)
                rows[i]["samples"].append(asked / wall_s)
                bar.update()
    first = rows[0]["samples"]
    for row in rows:
        if row.get("samples"):
            row["output_tokens_per_s"] = median(row["samples"])
            row["ratio"] = median([x / y for x, y in zip(row["samples"], first, strict=True)])
    return {
        "model": args.model,
        "max_num_seqs": args.max_num_seqs,
        "context": args.context,
        "seed": args.seed,
        "requests": len(work),
        "prompt_tokens": sum(len(r.prompt) for r in work),
        "output_tokens": asked,
        "rounds": args.rounds,
        "variants": rows,
    }


def seconds(llm: LLM, requests: Sequence[Request], one_at_a_time: bool) -> float:
    """How long the requests take; all of their tokens must come."""
    batches = [[r] for r in requests] if one_at_a_time else [list(requests)]
    tokens = 0
    start = time.perf_counter()
    for batch in batches:
        outputs = llm.generate(
            [r.prompt for r in batch], [sampling_params(r) for r in batch], progress=False
        )
        tokens += sum(len(o.outputs[0].token_ids) for o in outputs)
    wall_s = time.perf_counter() - start
    asked = sum(r.max_tokens for r in requests)
    if tokens != asked:
        raise BenchmarkError(f"{tokens} output tokens came where {asked} were asked for")
    return wall_s


def markdown(report: dict[str, Any]) -> str:
    rows = []
    for row in report["variants"]:
        if "skipped" in row:
            rows.append((row["variant"], "-", "-", f"skipped: {row['skipped']}"))
            continue
        span = f"{number(min(row['samples']))} to {number(max(row['samples']))}"
        rows.append(
            (row["variant"], number(row["output_tokens_per_s"]), f"{row['ratio']:.2f}", span)
        )
    lines = [
        f"{reports.heading(report)}; {report['model']}, {report['requests']} requests, "
        f"{report['prompt_tokens']} prompt and {report['output_tokens']} output tokens, "
        f"{report['max_num_seqs']} at once; medians of {report['rounds']} rounds",
        "",
        reports.table(("variant", "output tokens/s", "to sequential", "lowest to highest"), rows),
    ]
    return "\n".join(lines)


def _row(variant: Variant, work: Sequence[Request], max_num_seqs: int) -> dict[str, Any]:
    options = dict(variant.options)
    if variant.whole_prompts:
        longest = sorted((len(r.prompt) for r in work), reverse=True)
        options["max_num_batched_tokens"] = sum(longest[:max_num_seqs])
    row: dict[str, Any] = {"variant": variant.name, "options": options}
    skipped = why_not(**options)
    return row | ({"samples": []} if skipped is None else {"skipped": skipped})


def _rotated(items: list[int], by: int) -> list[int]:
    """So that no variant is always the first."""
    by %= len(items)
    return items[by:] + items[:by]


if __name__ == "__main__":
    sys.exit(main())
