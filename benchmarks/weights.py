"""Compare quantized weights by memory, perplexity and decode tokens/s.

    python -m benchmarks.weights [--model FOLDER] [--kernels auto] [--gguf Q8_0 ...] [--output FILE]

Each `--quantization` is compared with bfloat16, the dtype of all computation. `--gguf` adds GGUF
files of the same model (a Llama), kept in blocks and decoded (`--gguf-weights`). Types with blocks
of 256 are written by `benchmarks.k_quants`, others by the gguf package.

forge-tiny is scored on documents like its training text, from a seed that it was not trained on.
Any other model is scored on its own texts, drawn in float32 at temperature 1. Speed is measured in
turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks import report as reports
from benchmarks.kv_dtype import (
    OUTPUT,
    SEQUENCES,
    TOKENS,
    log_likelihoods,
    more_perplexity,
    parser_of,
    perplexity,
    texts_of,
    tokens_per_s,
)
from benchmarks.load import write_gguf
from forge_jax import LLM
from forge_jax.checkpoint.hub import resolve
from forge_jax.config import GGUFWeights, Rounding
from forge_jax.testing import core_of
from forge_serve.bench.metrics import median

PLAIN = "none"


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("weights", "Compare quantized weights by memory, perplexity and speed.")
    parser.add_argument("--kernels", default="auto", help="kernels of the engine: auto or xla")
    parser.add_argument(
        "--forms", nargs="*", default=[*get_args(Rounding)[1:]], metavar="QUANTIZATION",
        help="types to compare with none (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--gguf", nargs="+", default=[], metavar="TYPE",
        help="GGUF types to add: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS",
    )  # fmt: skip
    parser.add_argument("--context", type=int, default=64, help="of decoding (default 64)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return reports.publish("weights", args, lambda: compare(args, Path(folder)), markdown)


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the report's body; `folder` is for GGUF files."""
    options = {"dtype": "bfloat16", "kernels": args.kernels, "max_num_seqs": SEQUENCES}
    options["max_num_batched_tokens"] = TOKENS
    engines = {kind: LLM(args.model, quantization=kind, **options) for kind in (PLAIN, *args.forms)}
    for kind in args.gguf:
        file = folder / f"{kind}.gguf"
        write_gguf(resolve(args.model), file, kind)
        for kept in get_args(GGUFWeights):
            engines[f"GGUF {kind}, {kept}"] = LLM(str(file), gguf_weights=kept, **options)
    texts = texts_of(args)
    context = min(args.context, engines[PLAIN].max_model_len - OUTPUT)
    speed = tokens_per_s(engines, context, args.rounds)
    exact = log_likelihoods(engines[PLAIN], texts)
    rows = []
    found = {kind: log_likelihoods(llm, texts) for kind, llm in engines.items() if kind != PLAIN}
    for kind, llm in engines.items():
        lost = exact - found.get(kind, exact)
        decoded = found.get(f"{kind.split(', ')[0]}, decoded")
        rows.append(
            {
                "quantization": kind,
                "bytes": core_of(llm).device.model.param_bytes,  # type: ignore[attr-defined]
                **perplexity(exact, lost),
                **({} if decoded is None else _beside(decoded, exact - lost)),
                "tokens_per_s": median(speed[kind]),
                "ratio": reports.median_ratio(speed[kind], speed[PLAIN]),
            }
        )
    return {
        "model": args.model,
        "kernels": args.kernels,
        "scored_tokens": len(exact),
        "context": context,
        "sequences": SEQUENCES,
        "rounds": args.rounds,
        "rows": rows,
    }


def _beside(decoded: np.ndarray, own: np.ndarray) -> dict[str, float]:
    """Return the perplexity over the decoded model of the same file, from log-likelihoods."""
    names = ("more_than_decoded", "standard_error_to_decoded")
    return dict(zip(names, more_perplexity(decoded - own).values(), strict=True))


def markdown(report: dict[str, Any]) -> str:
    header = ["quantization", "MB of weights", "perplexity", "to none", "to decoded", "tokens/s"]
    rows = [
        [
            row["quantization"],
            f"{row['bytes'] / 1e6:,.2f}",
            f"{row['perplexity']:.4f}",
            "-"
            if row["quantization"] == PLAIN
            else f"{row['more_perplexity']:+.3%} ± {row['standard_error']:.3%}",
            f"{row['more_than_decoded']:+.3%} ± {row['standard_error_to_decoded']:.3%}"
            if "more_than_decoded" in row
            else "-",
            f"{row['tokens_per_s']:,.0f} ({row['ratio']:.2f})",
        ]
        for row in report["rows"]
    ]
    return (
        f"{reports.heading(report)}; {report['model']} in bfloat16, kernels {report['kernels']}; "
        f"perplexity over {report['scored_tokens']:,} tokens; {report['sequences']} sequences with "
        f"{report['context']} concurrent sequences, medians of {report['rounds']} rounds\n\n"
        f"{reports.table(header, rows)}"
    )


if __name__ == "__main__":
    sys.exit(main())
