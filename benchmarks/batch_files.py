"""Measure the cost of a batch file beyond the engine itself.

    python -m benchmarks.batch_files [--model forge-tiny] [--rounds 5] [--output FILE.json]

The code of `forge-jax batch` and `LLM.generate` take turns on the same prompts in the same process.
A turn of the batch file starts when the input is opened and ends when the output is closed. Both
sides must output the same number of tokens. CPU seconds cover all threads of the process. If other
programs use the machine, they are more reliable than wall time.
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

from benchmarks import report as reports
from benchmarks.report import number
from benchmarks.throughput import (
    check_tokens,
    engine_options,
    facts,
    offline_parser,
    requests_of,
    seconds,
    span,
    title,
)
from forge_jax import LLM
from forge_jax.config import EngineConfig
from forge_jax.engine.thread import Engine
from forge_serve.batch.config import BatchRunConfig
from forge_serve.batch.files import Input, Output
from forge_serve.batch.progress import Counts
from forge_serve.batch.run import answer
from forge_serve.bench.in_process import ready
from forge_serve.bench.metrics import median
from forge_serve.bench.workload import WARM_UP, Request
from forge_serve.config import ServerConfig
from forge_serve.server.process import loop_factory
from forge_serve.server.service import Service

READY_S = 600.0
MAX_LINE_BYTES = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    description = "Measure the cost of a batch file beyond the engine itself."
    args = offline_parser("batch_files", description, 256, 32, 512).parse_args(argv)
    return reports.publish("batch_files", args, lambda: compare(args), markdown)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    options, make = engine_options(args), requests_of(args)
    llm, work = LLM(args.model, **options), make(0)
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
            sides = {"file": side.seconds, "llm": lambda r: seconds(llm, r, one_at_a_time=False)}
            for run in sides.values():
                run(make(WARM_UP)[: args.max_num_seqs])
            for round_, name in reports.turns(list(sides), args.rounds):
                requests, begin_s = make(round_), time.process_time()
                rates[name].append(asked / sides[name](requests))
                cpu_s[name].append(time.process_time() - begin_s)
        finally:
            side.stop()
    return {
        **facts(args, work),
        "samples": rates,
        "cpu_s": {name: median(samples) for name, samples in cpu_s.items()},
        "output_tokens_per_s": {name: median(samples) for name, samples in rates.items()},
        "ratio": reports.median_ratio(rates["file"], rates["llm"]),
    }


class _FileSide:
    """Batch files on an engine of this process."""

    def __init__(self, engine: Engine, runner: asyncio.Runner, folder: Path):
        self._runner, self._folder = runner, folder
        self._service = Service(ServerConfig())
        self._service.engine = self._engine = engine
        self._count = 0

    def start(self) -> None:
        """Start the engine and wait until nothing is compiling."""

        async def start() -> None:
            self._engine.start()
            async with asyncio.timeout(READY_S):
                await ready(self._engine)

        self._runner.run(start())

    def stop(self) -> None:
        self._runner.run(self._engine.stop())

    def seconds(self, requests: Sequence[Request]) -> float:
        """Return the seconds for a batch file of `requests`; raise unless all tokens came."""
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
        check_tokens(tokens, requests)
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
        rate = number(report["output_tokens_per_s"][name])
        rows.append((names[name], rate, ratio, span(samples), cpu_s))
    header = ("", "output tokens/s", "to `LLM.generate`", "lowest to highest", "CPU s")
    return title(report) + reports.table(header, rows)


if __name__ == "__main__":
    sys.exit(main())
