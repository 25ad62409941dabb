"""Measure structured output: compilation, masks, and throughput relative to free text.

    python -m benchmarks.structured --text FILE [FILE ...] [--vocab-size 32768] [--output FILE.json]

Compilation and masks are measured in one thread, with a byte-level BPE trained on the text and with
JSON schemas drawn from a seed. A mask belongs to a state that tokens drawn from earlier masks have
reached. Throughput is the bundled model's: constrained and free streams take turns and output equal
numbers of tokens from equal prompts.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks import report as reports
from benchmarks.report import number
from forge_jax import LLM, SamplingParams
from forge_jax.errors import GrammarError
from forge_jax.grammar import GrammarCompiler, GrammarSpec
from forge_jax.grammar.build import build
from forge_jax.grammar.masks import mask_width
from forge_jax.text import Tokenizer
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import median

END = "<|end|>"
WALK = 60  # tokens of one output whose masks are timed
QUANTILES = (50, 90, 99, 100)


def main(argv: Sequence[str] | None = None) -> int:
    parser = reports.parser(
        "structured", "Measure the cost of structured output.", model="forge-tiny", rounds=5
    )
    parser.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        help="files on which the vocabulary is trained",
    )
    parser.add_argument("--vocab-size", type=int, default=32768, help="default 32768")
    parser.add_argument("--schemas", type=int, default=200, help="default 200")
    parser.add_argument("--streams", type=int, default=16, help="at once; default 16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    def measure() -> dict[str, Any]:
        if args.schemas < 1:
            raise BenchmarkError(f"--schemas must be at least 1, not {args.schemas}")
        tokenizer = train(args.text, args.vocab_size)
        return {
            "seed": args.seed,
            "vocab_size": tokenizer.vocab_size,
            "grammars": grammars(tokenizer, args.schemas, args.seed),
            "throughput": throughput(args.model, args.streams, args.rounds, args.seed),
        }

    return reports.publish("structured", args, measure, markdown)


def train(files: Sequence[Path], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE trained on the words of these files."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((file.read_text(errors="replace") for file in files), trainer)
    if backend.get_vocab_size() < vocab_size // 2:
        raise BenchmarkError(
            f"the text gives a vocabulary of {backend.get_vocab_size()} tokens only: pass more text"
        )
    return Tokenizer(backend, {"eos_token": END})


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a typical service's schema: objects of named fields, lists of objects, choices."""
    kinds = ("string", "integer", "number", "boolean", "enum", "object", "array")
    kind = "object" if depth == 0 else rng.choice(kinds[: 7 if depth < 4 else 5])
    match kind:
        case "object":
            names = [f"{rng.choice(('id', 'name', 'user', 'note'))}_{i}" for i in range(6)]
            names = names[: rng.randint(2, 6)]
            return {
                "type": "object",
                "properties": {name: schema(rng, depth + 1) for name in names},
                "required": names[: rng.randint(1, len(names))],
                "additionalProperties": rng.random() < 0.2,
            }
        case "array":
            return {"type": "array", "items": schema(rng, depth + 1), "maxItems": 8}
        case "enum":
            return {"enum": [f"choice {i}" for i in range(rng.randint(2, 30))]}
        case "string":
            form = rng.choice(("plain", "short", "pattern", "format"))
            more = {
                "plain": {},
                "short": {"minLength": 1, "maxLength": rng.randint(5, 100)},
                "pattern": {"pattern": "^[A-Z]{2}[0-9]{4,8}(-[a-z]+)?$"},
                "format": {"format": rng.choice(("date-time", "email", "uuid"))},
            }
            return {"type": "string", **more[form]}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": 10 ** rng.randint(1, 6)}
    return {"type": kind}


def grammars(tokenizer: Tokenizer, count: int, seed: int) -> dict[str, Any]:
    """Time compilations and masks, in one thread."""
    rng = random.Random(seed)
    end = tokenizer.eos_token_id
    assert end is not None
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [end], limits=None)
    inner = compiler._llguidance_tokenizer
    compile_s, mask_s, accept_s, failed = [], [], [], 0
    row = np.zeros(mask_width(tokenizer.vocab_size), np.int32)
    for _ in range(count):
        spec = GrammarSpec.json_schema(schema(rng))
        began_s = time.perf_counter()
        grammar = build(spec, inner, tokenizer.vocab_size)
        compile_s.append(time.perf_counter() - began_s)
        matcher = grammar.matcher()
        try:
            for _ in range(WALK):
                began_s = time.perf_counter()
                matcher.fill(row)
                mask_s.append(time.perf_counter() - began_s)
                bits = np.unpackbits(row.view(np.uint8), bitorder="little")
                token = int(rng.choice(np.flatnonzero(bits)))
                began_s = time.perf_counter()
                matcher.accept([token])
                accept_s.append(time.perf_counter() - began_s)
                if matcher.stopped:
                    break
        except GrammarError:
            failed += 1
    compiler.close()
    return {
        "schemas": count,
        "failed": failed,
        "compile_s": _quantiles(compile_s),
        "mask_s": _quantiles(mask_s),
        "accept_s": _quantiles(accept_s),
        "masks": len(mask_s),
    }


def throughput(model: str, streams: int, rounds: int, seed: int) -> dict[str, Any]:
    """Return output tokens/s of constrained streams, of free ones, and of both at once."""
    llm = LLM(model, max_num_seqs=streams, max_model_len=512, num_blocks=40 * streams)
    fields = {
        name: {"type": "string", "minLength": 24, "maxLength": 40} for name in ("a", "b", "c")
    }
    spec = GrammarSpec.json_schema(
        {
            "type": "object",
            "properties": {**fields, "d": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": [*fields, "d"],
            "additionalProperties": False,
        }
    )
    prompts = [f"Tell me about number {i}." for i in range(streams)]

    def constrained(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=300, seed=seed + i, structured_outputs=spec)

    first = llm.generate(prompts, [constrained(i) for i in range(streams)], progress=False)
    counts = [len(output.outputs[0].token_ids) for output in first]

    def free(i: int) -> SamplingParams:
        return SamplingParams(max_tokens=counts[i], seed=seed + i, ignore_eos=True)

    sides = {
        "free": [free(i) for i in range(streams)],
        "constrained": [constrained(i) for i in range(streams)],
        "half of each": [(free, constrained)[i % 2](i) for i in range(streams)],
    }
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, params in sides.items():
            began_s = time.perf_counter()
            outputs = llm.generate(prompts, params, progress=False)
            seconds = time.perf_counter() - began_s
            got = [len(output.outputs[0].token_ids) for output in outputs]
            if got != counts:
                raise BenchmarkError(f"{name}: {got} tokens came where {counts} did before")
            if turn:  # the first is a warm-up
                samples[name].append(sum(counts) / seconds)
    return {
        "model": model,
        "streams": streams,
        "output_tokens": sum(counts),
        "rounds": rounds,
        "samples": samples,
        "tokens_per_s": {name: median(values) for name, values in samples.items()},
        "to_free": {
            name: reports.median_ratio(values, samples["free"]) for name, values in samples.items()
        },
    }


def markdown(report: dict[str, Any]) -> str:
    found, rate = report["grammars"], report["throughput"]
    times = [
        (what, *(number(1e6 * found[key][f"p{q}"], 1) for q in QUANTILES))
        for what, key in (
            ("compile", "compile_s"),
            ("mask", "mask_s"),
            ("accept a token", "accept_s"),
        )
    ]
    rates = [
        (name, number(rate["tokens_per_s"][name]), f"{rate['to_free'][name]:.2f}")
        for name in rate["samples"]
    ]
    return "\n".join(
        [
            f"{reports.heading(report)}; {found['schemas']} schemas, {found['masks']} masks, "
            f"vocabulary of {report['vocab_size']:,}",
            "",
            reports.table(("us", *(f"p{q}" for q in QUANTILES)), times),
            "",
            f"{rate['model']}, {rate['streams']} streams, "
            f"{rate['output_tokens']} output tokens per round, medians of {rate['rounds']} rounds",
            "",
            reports.table(("streams", "output tokens/s", "to free"), rates),
        ]
    )


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in QUANTILES}


if __name__ == "__main__":
    sys.exit(main())
