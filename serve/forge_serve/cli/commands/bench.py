"""`forge-jax bench`: measure the speed of a model on this machine, or of a server."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_jax.config import MAX_NUM_SEQS, option
from forge_jax.errors import ConfigError
from forge_serve.cli.commands.engine import add_engine, check_model, configs, model_at, quiet_logs
from forge_serve.cli.flags import Commands, add_model, add_sections, taken

if TYPE_CHECKING:
    from forge_serve.bench.client import Submit
    from forge_serve.bench.workload import Vocabulary

DESCRIPTION = """\
Measure throughput and latency of a model loaded in this process, or of a server if --url is set.
The workload consists of greedy requests of equal size with random prompts. The report has one line
per concurrency: tokens/s, time to first token (TTFT), inter-token latency (ITL), time per output
token (TPOT) and request latency. Latencies are p50 / p95 / p99 in milliseconds. The exit status is
1 if a request failed."""
EPILOG = """\
examples:
  forge-jax bench Qwen/Qwen3-0.6B --input-len 512 --output-len 128
  forge-jax bench --url http://127.0.0.1:8000 --concurrency 1,16,64 --json

For other loads, traces and goodput, run python -m benchmarks.serving in the repository."""
COLUMNS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "request latency"}
LEAST_REQUESTS = 8  # default minimum at each concurrency
ROUNDS = 4  # default number of requests per concurrent client


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    url: str | None = option(
        None,
        "URL of a server to measure, such as http://127.0.0.1:8000; MODEL is then one of its"
        " models",
    )
    api_key_file: str | None = option(
        None, "file with the server's API key, in the format of serve's --api-key-file"
    )
    concurrency: str = option(
        "1,4,16",
        f"comma-separated numbers of concurrent requests, each from 1 to {MAX_NUM_SEQS}; each "
        "number is measured separately",
    )
    input_len: int | None = option(
        None, "prompt tokens per request, at least 1; auto: 128, or fewer in a short context"
    )
    output_len: int | None = option(
        None, "output tokens per request, at least 1; auto: 64, or fewer in a short context"
    )
    requests: int | None = option(
        None,
        f"requests per measurement, at least 1; auto: {ROUNDS} times the concurrency, at least "
        f"{LEAST_REQUESTS}",
    )
    context: int | None = option(
        None,
        "maximum tokens of a sequence, prompt plus output, at least 64; auto: the context length "
        "of the model or server",
    )
    seed: int = option(0, "seed of the random prompts")

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "requests", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least 1, not {value}")
        self.levels()

    def levels(self) -> list[int]:
        """Return the numbers of `--concurrency`. Raises ConfigError if it is malformed."""
        try:
            levels = [int(part) for part in self.concurrency.split(",")]
        except ValueError:
            levels = []
        if not levels or not all(1 <= level <= MAX_NUM_SEQS for level in levels):
            raise ConfigError(
                f"--concurrency must be numbers from 1 to {MAX_NUM_SEQS}, separated by commas, "
                f"not {self.concurrency!r}"
            )
        return levels


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure the speed of a model or a server",
        usage="forge-jax bench [MODEL] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add_model(parser)
    parser.add_argument(
        "--json", action="store_true", help="write one JSON object instead of a table"
    )
    add_sections(parser, {"measurement": BenchFlags}, all_essential=True)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(options: dict[str, Any]) -> int:
    as_json, flags = options.pop("json"), BenchFlags(**taken(options, BenchFlags))
    if flags.url is not None:
        model = model_at(flags.url, options)
        measured = _of_server(flags, model)
    elif flags.api_key_file is not None:
        raise ConfigError("--api-key-file requires --url")
    else:
        measured = _of_engine(flags, options)
    from forge_serve.bench import machine

    report = {"benchmark": "bench", **machine.describe(), **measured}
    print(json.dumps(report, indent=2, allow_nan=False) if as_json else table(report))
    return 1 if any(run["errors"] for run in report["runs"]) else 0


def _of_server(flags: BenchFlags, model: str | None) -> dict[str, Any]:
    from forge_serve.bench.client import Server, run_async
    from forge_serve.http.client import api_key_of

    assert flags.url is not None
    url, key = flags.url, api_key_of(flags.api_key_file)

    async def measure() -> dict[str, Any]:
        async with Server.connect(url, model=model, api_key=key) as server:
            context = flags.context or server.context
            if context is None:
                raise ConfigError(f"{url} does not report its context length: set --context")
            runs = await _runs(server.submit, server.vocabulary, flags, context)
            return {"model": server.model, "url": url, "context": context, "runs": runs}

    return run_async(measure())


def _of_engine(flags: BenchFlags, options: dict[str, Any]) -> dict[str, Any]:
    from forge_jax.telemetry.startup import StartupTimes
    from forge_serve.bench.client import run_async
    from forge_serve.bench.in_process import Submitter, ready
    from forge_serve.bench.workload import Vocabulary
    from forge_serve.server.process import load_engine

    engine_config, server_config = configs(options)
    if not server_config.fake:
        check_model(engine_config)
    quiet_logs()
    startup = StartupTimes()
    engine = load_engine(engine_config, server_config, startup)

    async def measure() -> dict[str, Any]:
        engine.start()
        try:
            await ready(engine)
            vocabulary = Vocabulary.plain()
            context = min(flags.context or engine.max_model_len, engine.max_model_len)
            runs = await _runs(Submitter(engine).submit, vocabulary, flags, context)
            stats = engine.stats()
        finally:
            await engine.stop()
        return {
            "model": engine.name,
            "context": context,
            "startup_s": stats.startup_seconds,
            "runs": runs,
        }

    return run_async(measure())


async def _runs(
    submit: Submit, vocabulary: Vocabulary, flags: BenchFlags, context: int
) -> list[dict[str, Any]]:
    """Return one entry per concurrency. Each measurement has its own warm-up."""
    from forge_serve.bench.client import run as run_load
    from forge_serve.bench.metrics import summarize
    from forge_serve.bench.workload import ALL, WARM_UP, Sizes, baseline

    runs = []
    for index, level in enumerate(flags.levels()):
        sizes = Sizes(
            context=context,
            num_requests=flags.requests or max(ROUNDS * level, LEAST_REQUESTS),
            input_len=flags.input_len,
            output_len=flags.output_len,
        )
        warm = dataclasses.replace(sizes, num_requests=level)

        def load(of: Sizes, round_: int, at_once: int = level) -> Any:
            made = baseline(of, vocabulary, flags.seed, round_)
            name = f"{at_once} at once"
            return dataclasses.replace(made, name=name, concurrency={ALL: at_once})

        await run_load(submit, load(warm, WARM_UP - index))
        workload = load(sizes, index)
        done = await run_load(submit, workload, progress=True)
        first = workload.requests[0]
        runs.append(
            {
                "concurrency": level,
                "input_len": len(first.prompt),
                "output_len": first.max_tokens,
                **summarize(done.measured, done.wall_s),
            }
        )
    return runs


def table(report: dict[str, Any]) -> str:
    """Return the report as a table for the terminal."""
    first = report["runs"][0]
    head = (
        f"{report['model']}{' at ' + report['url'] if 'url' in report else ''}: "
        f"{first['input_len']} tokens in, {first['output_len']} out; {report['cpu']}, "
        f"{report['cores']} cores, jax {report['versions'].get('jax', 'not installed')}"
    )
    header = ["concurrency", "completed", "output tokens/s", "all tokens/s", *COLUMNS.values()]
    rows = [
        [
            str(run["concurrency"]),
            f"{run['completed']} of {run['requests']}",
            f"{run['output_tokens_per_s']:,.0f}",
            f"{run['total_tokens_per_s']:,.0f}",
            *(_spread(run[column]) for column in COLUMNS),
        ]
        for run in report["runs"]
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [head, ""]
    lines += ["  ".join(map(str.rjust, line, widths)) for line in [header, *rows]]
    for run in report["runs"]:
        lines += [f"error: {error} ({count} times)" for error, count in run["errors"].items()]
    return "\n".join(lines)


def _spread(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    return " / ".join(f"{spread[p]:,.1f}" for p in ("p50", "p95", "p99"))
