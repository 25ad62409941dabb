"""Check that models load and answer, and measure their speed: one line each.

    python -m benchmarks.sanity [MODEL ...] [--quantization int8] [--output FILE.json]

A MODEL is any argument of `forge-jax serve`, or a folder of model folders and .gguf files. The
bundled model is always included. Each model runs in a separate process, so a crash does not
affect the others. The time until ready covers weights and compilation, which may be cached. Exits
with 1 if a model does not work.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report as reports
from benchmarks.report import number

BUNDLED = "forge-tiny"
PROMPT = "Once upon a time"
TIME_LIMIT_S = 3600
DEPTH = 3  # levels of folders that are searched


def main(argv: Sequence[str] | None = None) -> int:
    parser = reports.parser("sanity", "Check that models load and answer.")
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="models, or folders that contain some"
    )
    reports.options(
        parser,
        ("--sequences", int, 8, "at once"),
        ("--output-len", int, 64, "tokens of each"),
        ("--dtype", str, "auto", "of the model"),
    )
    parser.add_argument(
        "--quantization", help="quantize the matrices to this type (default: unchanged)"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the process of one model
    args = parser.parse_args(argv)
    if args.one is not None:
        print(json.dumps(try_model(args.one, args)))
        return 0
    lines = []
    for model in dict.fromkeys([BUNDLED, *(m for given in args.models for m in found(given))]):
        line = {"model": model, **_in_a_process(model, sys.argv[1:] if argv is None else argv)}
        lines.append(line)
        print(text(line), flush=True)
    if args.output is not None:
        reports.write(reports.new("sanity", models=lines), args.output)
    return int(any("error" in line for line in lines))


def found(given: str) -> list[str]:
    """Return the models that an argument names: itself, or those in the folder."""
    path = Path(given)
    if not path.is_dir() or (path / "config.json").exists():
        return [given]
    models = sorted(map(str, _models(path, DEPTH)))
    return models or [given]  # the model's process reports the error


def _models(folder: Path, depth: int) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix == ".gguf" or (path / "config.json").exists():
            yield path
        elif path.is_dir() and depth > 1:
            yield from _models(path, depth - 1)


def _in_a_process(model: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the result of `try_model`, or how its process ended."""
    command = [sys.executable, "-m", "benchmarks.sanity", "--one", model, *argv]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {TIME_LIMIT_S} s"}
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or ["nothing"]
        return {"error": f"its process ended with {done.returncode}; last line: {said[-1]}"}
    return json.loads(done.stdout.splitlines()[-1])


def try_model(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Load a model, generate an answer and measure, or return the error."""
    from forge_jax import LLM, SamplingParams
    from forge_jax.errors import ForgeError

    options = {"dtype": args.dtype, "max_num_seqs": args.sequences}
    if args.quantization is not None:
        options["quantization"] = args.quantization
    began_s = time.perf_counter()
    try:
        with LLM(model, **options) as llm:
            ready_s = time.perf_counter() - began_s
            prompt = PROMPT if llm.tokenizer is not None else [1, 2, 3, 4]
            scored = SamplingParams(max_tokens=16, temperature=0, logprobs=0, ignore_eos=True)
            [answer] = llm.generate(prompt, scored, progress=False)
            sample = answer.outputs[0]
            values = [token.logprob for token in sample.logprobs or ()]
            if sample.finish_reason == "error" or not all(map(math.isfinite, values)):
                return {"error": "its logits are not finite"}
            room = llm.max_model_len - args.output_len - 1
            if room < 1:
                return {"error": f"its context of {llm.max_model_len} is too short for the test"}
            return {
                "ready_s": ready_s,
                "answer": sample.text if llm.tokenizer is not None else list(sample.token_ids),
                "mean_logprob": sum(values) / len(values),
                **_speed(llm, args.sequences, args.output_len, min(room, 256)),
            }
    except (ForgeError, OSError) as error:
        return {"error": str(error)}


def _speed(llm: Any, sequences: int, output_len: int, prompt_len: int) -> dict[str, float]:
    """Return tokens/s of decodes and of prompts, the better of two runs: the first warms up."""
    from forge_jax import SamplingParams

    seconds: dict[int, float] = {}
    rng = random.Random(0)
    for count in (1, output_len, 1, output_len):
        prompts = [rng.choices(range(3, 53), k=prompt_len) for _ in range(sequences)]
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        began_s = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        spent_s = time.perf_counter() - began_s
        seconds[count] = min(seconds.get(count, math.inf), spent_s)
    decoding_s = max(seconds[output_len] - seconds[1], 1e-9)
    return {
        "prefill_tokens_s": sequences * prompt_len / seconds[1],
        "decode_tokens_s": sequences * (output_len - 1) / decoding_s,
    }


def text(line: dict[str, Any]) -> str:
    if "error" in line:
        return f"FAILED  {line['model']}: {line['error']}"
    return (
        f"ok  {line['model']}: ready in {number(line['ready_s'], 1)} s, "
        f"{number(line['prefill_tokens_s'])} tokens/s of prompts, "
        f"{number(line['decode_tokens_s'])} of outputs; {PROMPT!r} -> {line['answer']!r}"
    )


if __name__ == "__main__":
    sys.exit(main())
