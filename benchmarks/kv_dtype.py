"""Compare KV cache types by memory, perplexity and decode tokens/s.

    python -m benchmarks.kv_dtype [--model FOLDER] [--dtype auto] [--output FILE.json]

forge-tiny is scored on documents like its training text, from a seed that it was not trained on.
Any other model is scored on its own texts, drawn in float32 at temperature 1. Speed is measured in
turns.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from tokenizers import Tokenizer

from benchmarks import report as reports
from forge_jax import LLM, SamplingParams
from forge_jax.checkpoint.hub import resolve
from forge_jax.config import KVDType
from forge_jax.testing import core_of
from forge_serve.bench.metrics import median
from training.forge_tiny.corpus import documents
from training.forge_tiny.tokenizer import encode

BUNDLED = "forge-tiny"
SEED = 20261120  # forge-tiny's corpus has seed 0
SEQUENCES, OUTPUT = 8, 96  # concurrent sequences, and tokens of each
TOKENS = 256  # a step has no more
SCORED = SamplingParams(max_tokens=0, prompt_logprobs=0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("kv_dtype", "Compare KV cache types by memory, perplexity and speed.")
    parser.add_argument("--dtype", default="auto", help="dtype of the model (default auto)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[64, 768], help="of decoding")
    args = parser.parse_args(argv)
    return reports.publish("kv_dtype", args, lambda: compare(load(args), args), markdown)


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    parser = reports.parser(name, description, model=BUNDLED, rounds=7)
    parser.add_argument(
        "--texts", type=int, default=2000, help="number of scored texts (default 2000)"
    )
    return parser


def load(args: argparse.Namespace) -> dict[str, LLM]:
    """Return the model with each cache type."""
    sizes = {"dtype": args.dtype, "max_num_seqs": SEQUENCES, "max_num_batched_tokens": TOKENS}
    return {kind: LLM(args.model, kv_dtype=kind, **sizes) for kind in get_args(KVDType)}


def compare(engines: dict[str, LLM], args: argparse.Namespace) -> dict[str, Any]:
    texts = texts_of(args)
    speeds = {
        context: tokens_per_s(engines, context, args.rounds)
        for context in args.contexts
        if context + OUTPUT <= engines["auto"].max_model_len
    }
    exact = log_likelihoods(engines["auto"], texts)
    rows = []
    for kv_dtype, llm in engines.items():
        lost = exact - (exact if kv_dtype == "auto" else log_likelihoods(llm, texts))
        shape = core_of(llm).device.options.kv_shape  # type: ignore[attr-defined]
        rows.append(
            {
                "kv_dtype": kv_dtype,
                "bytes_per_token": shape.block_bytes / shape.block_size,
                **perplexity(exact, lost),
                "tokens_per_s": {c: median(speed[kv_dtype]) for c, speed in speeds.items()},
                "ratio": {
                    c: reports.median_ratio(s[kv_dtype], s["auto"]) for c, s in speeds.items()
                },
            }
        )
    return {
        "model": args.model,
        "dtype": str(core_of(engines["auto"]).device.model.dtype),  # type: ignore[attr-defined]
        "scored_tokens": len(exact),
        "sequences": SEQUENCES,
        "rounds": args.rounds,
        "rows": rows,
    }


def perplexity(exact: np.ndarray, lost: np.ndarray) -> dict[str, float]:
    """Return figures from f64[tokens]: exact log-probabilities, and their losses by rounding."""
    return {"perplexity": math.exp(-np.mean(exact - lost)), **more_perplexity(lost)}


def more_perplexity(lost: np.ndarray) -> dict[str, float]:
    return {
        "more_perplexity": math.expm1(np.mean(lost)),
        "standard_error": float(np.std(lost) / math.sqrt(len(lost))),
    }


def texts_of(args: argparse.Namespace) -> list[list[int]]:
    return held_out(args.texts) if args.model == BUNDLED else own_texts(args.model, args.texts)


def held_out(count: int) -> list[list[int]]:
    """Return token ids of documents like forge-tiny's training text, but with another seed."""
    tokenizer = Tokenizer.from_file(str(resolve(BUNDLED) / "tokenizer.json"))
    return [ids for ids, _ in encode(tokenizer, documents(SEED, count))]


def own_texts(model: str, count: int) -> list[list[int]]:
    """Return texts that the model generates, each after a prompt of one token."""
    llm = LLM(model, dtype="float32", max_num_seqs=32, max_num_batched_tokens=256)
    first = llm.tokenizer.encode("") if llm.tokenizer is not None else []
    params = [
        SamplingParams(max_tokens=min(256, llm.max_model_len - 2), temperature=1.0, seed=SEED + i)
        for i in range(count)
    ]
    outputs = llm.generate([first or [1]] * count, params, progress=False)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def log_likelihoods(llm: LLM, texts: list[list[int]]) -> np.ndarray:
    """Return f64[tokens]: the log-probability of each token of each text except its first."""
    outputs = llm.generate(texts, SCORED, progress=False)
    return np.array([entry.logprob for o in outputs for entry in o.prompt_logprobs or ()])


def tokens_per_s(engines: Mapping[str, LLM], context: int, rounds: int) -> dict[str, list[float]]:
    """Return decode rates, each engine in turn; the prompts are in the prefix cache by then."""
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    prompts = [[5 + (7 * i + 3 * j) % 200 for j in range(context)] for i in range(SEQUENCES)]
    samples: dict[str, list[float]] = {kv_dtype: [] for kv_dtype in engines}
    for round_ in range(rounds + 1):
        for kv_dtype, llm in engines.items():
            begin_s = time.perf_counter()
            llm.generate(prompts, params, progress=False)
            if round_:  # the first round fills the caches
                samples[kv_dtype].append(SEQUENCES * OUTPUT / (time.perf_counter() - begin_s))
    return samples


def markdown(report: dict[str, Any]) -> str:
    contexts = list(report["rows"][0]["tokens_per_s"])
    header = ["kv dtype", "bytes of a token", "perplexity", "to auto"]
    header += [f"tokens/s, context {context}" for context in contexts]
    rows = [
        [
            row["kv_dtype"],
            f"{row['bytes_per_token']:,.0f}",
            f"{row['perplexity']:.4f}",
            "-"
            if row["kv_dtype"] == "auto"
            else f"{row['more_perplexity']:+.3%} ± {row['standard_error']:.3%}",
            *(f"{row['tokens_per_s'][c]:,.0f} ({row['ratio'][c]:.2f})" for c in contexts),
        ]
        for row in report["rows"]
    ]
    return (
        f"{reports.heading(report)}; {report['model']} in {report['dtype']}; perplexity over "
        f"{report['scored_tokens']:,} tokens; {report['sequences']} concurrent sequences, "
        f"medians of {report['rounds']} rounds\n\n{reports.table(header, rows)}"
    )


if __name__ == "__main__":
    sys.exit(main())
