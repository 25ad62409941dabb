"""What does a file of requests cost beside the engine itself? The same prompts in the same process,
through `forge-jax batch`'s code and through `LLM.generate`, taking turns.

    python -m benchmarks.batch_files [--model forge-tiny] [--rounds 5] [--output FILE.json]

A turn of the file's begins with its first look at the input, and ends with the output closed. Both
sides must put out the same number of tokens. CPU seconds are the process's, in all of its threads:
where others use the machine they say more than the wall does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks import report as reports
from benchmarks.report import number
from benchmarks.throughput import SMALLEST_BLOCK, seconds
from benchmarks.workloads import mixed
from forge_jax import LLM
from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_serve.batch.config import BatchRunConfig
from forge_serve.batch.files import Input, Output
from forge_serve.batch.progress import Counts
from forge_serve.batch.run import answer
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import median
from forge_serve.bench.workload import WARM_UP, Request, Sizes, Vocabulary
from forge_serve.config import ServerConfig
from forge_serve.server.process import loop_factory
from forge_serve.server.service import Service

READY_S = 600.0
MAX_LINE_BYTES = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_files",
        description="What does a file of requests cost beside the engine itself?",
    )
    parser.add_argument("--model", default="forge-tiny", help="what to run (default forge-tiny)")
    parser.add_argument("--requests", type=int, default=256, help="per round (default 256)")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument(
        "--max-num-seqs", type=int, default=32, help="what runs at once (default 32)"
    )
    parser.add_argument(
        "--context", type=int, default=512, help="longest prompt plus output (default 512)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="write the report here as JSON")
    args = parser.parse_args(argv)
    return reports.publish("batch_files", args, lambda: compare(args), markdown)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Runs both sides on every round."""
    sizes = Sizes(context=args.context, num_requests=args.requests)
    options = {
        "max_model_len": args.context,
        "max_num_seqs": args.max_num_seqs,
        "num_blocks": -(-args.context // SMALLEST_BLOCK) * args.max_num_seqs,
    }
    vocabulary = Vocabulary.of_model(args.model)
    llm = LLM(args.model, **options)
    work = mixed(sizes, vocabulary, args.seed, 0).requests
    asked = sum(request.max_tokens for request in work)
    rates: dict[str, list[float]] = {"llm": [], "file": []}
    cpu_s: dict[str, list[float]] = {"llm": [], "file": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        engine = Engine.load(EngineConfig.from_options(model=args.model, **options))
        side = _FileSide(engine, runner, Path(folder))
        try:
            side.start()
            warm_up = mixed(sizes, vocabulary, args.seed, WARM_UP).requests[: args.max_num_seqs]
            seconds(llm, warm_up, one_at_a_time=False)
            side.seconds(warm_up)
            for round_ in tqdm(range(args.rounds), unit="round", disable=None):
                requests = mixed(sizes, vocabulary, args.seed, round_).requests
                turns = [("llm", lambda r: seconds(llm, r, False)), ("file", side.seconds)]
                for name, turn in turns if round_ % 2 else reversed(turns):
                    begin_s = time.process_time()
                    rates[name].append(asked / turn(requests))
                    cpu_s[name].append(time.process_time() - begin_s)
        finally:
            side.stop()
    return {
        "model": args.model,
        "max_num_seqs": args.max_num_seqs,
        "context": args.context,
        "seed": args.seed,
        "requests": len(work),
        "prompt_tokens": sum(len(request.prompt) for request in work),
        "output_tokens": asked,
        "rounds": args.rounds,
        "samples": rates,
        "cpu_s": {name: median(samples) for name, samples in cpu_s.items()},
        "output_tokens_per_s": {name: median(samples) for name, samples in rates.items()},
        "ratio": median([f / g for f, g in zip(rates["file"], rates["llm"], strict=True)]),
    }


class _FileSide:
    """Files of requests on an engine of this process."""

    def __init__(self, engine: Engine, runner: asyncio.Runner, folder: Path):
        self._runner, self._folder = runner, folder
        self._service = Service(ServerConfig())
        self._service.engine = self._engine = engine
        self._count = 0

    def start(self) -> None:
        """Starts the engine, and waits until nothing is compiled any more."""

        async def start() -> None:
            self._engine.start()
            async with asyncio.timeout(READY_S):
                while self._engine.stats().state == "serving":
                    await asyncio.sleep(0.05)

        self._runner.run(start())

    def stop(self) -> None:
        self._runner.run(self._engine.stop())

    def seconds(self, requests: Sequence[Request]) -> float:
        """How long a file of them takes; all of their tokens must come."""
        self._count += 1
        source = self._folder / f"in-{self._count}.jsonl"
        target = self._folder / f"out-{self._count}.jsonl"
        source.write_text("".join(_line(i, r) for i, r in enumerate(requests)))
        begin = time.perf_counter()
        lines = Input(source, MAX_LINE_BYTES)
        with Output(target, lines) as output:
            counts = Counts(lines.num_requests, output.num_found)
            config = BatchRunConfig(input=source, output=target, quiet=True)
            self._runner.run(answer(self._service, lines, output, config, counts))
        wall_s = time.perf_counter() - begin
        answers = [json.loads(line) for line in target.read_text().splitlines()]
        bodies = [answer["response"]["body"] for answer in answers]
        tokens = sum(body["usage"]["completion_tokens"] for body in bodies if "usage" in body)
        asked = sum(request.max_tokens for request in requests)
        if tokens != asked:
            raise BenchmarkError(f"{tokens} output tokens came where {asked} were asked for")
        return wall_s


def _line(number: int, request: Request) -> str:
    body = {
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line) + "\n"


def markdown(report: dict[str, Any]) -> str:
    names = {"llm": "`LLM.generate`", "file": "`forge-jax batch`"}
    rows = []
    for name, samples in report["samples"].items():
        ratio = f"{report['ratio']:.3f}" if name == "file" else ""
        cpu_s = number(report["cpu_s"][name], 2)
        span = f"{number(min(samples))} to {number(max(samples))}"
        rate = number(report["output_tokens_per_s"][name])
        rows.append((names[name], rate, ratio, span, cpu_s))
    lines = [
        f"{reports.heading(report)}; {report['model']}, {report['requests']} requests, "
        f"{report['prompt_tokens']} prompt and {report['output_tokens']} output tokens, "
        f"{report['max_num_seqs']} at once; medians of {report['rounds']} rounds",
        "",
        reports.table(
            ("", "output tokens/s", "to `LLM.generate`", "lowest to highest", "CPU s"), rows
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
