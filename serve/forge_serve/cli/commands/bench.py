"""`forge-jax bench`: how fast a model answers on this machine, or a server wherever it is."""

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
Measure how fast a model answers: one that is loaded here, without HTTP, or with --url the one that
a server has. Equal greedy requests with random prompts; for each number of them at once: tokens/s,
the time to the first token (TTFT), the time between two pieces of an answer (ITL, p50 / p95 / p99
in milliseconds). Ends with 1 if a request failed."""
EPILOG = """\
examples:
  forge-jax bench Qwen/Qwen3-0.6B --input-len 512 --output-len 128
  forge-jax bench --url http://127.0.0.1:8000 --concurrency 1,16,64 --json

python -m benchmarks.serving, in the repository, has more: other loads, traces, goodput."""
COLUMNS = {"ttft_ms": "TTFT", "itl_ms": "ITL", "tpot_ms": "TPOT", "e2e_ms": "whole request"}
LEAST_REQUESTS = 8  # at each concurrency, unless it is said how many
ROUNDS = 4  # likewise: how often each place is taken


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    url: str | None = option(
        None, "a server to measure, as http://127.0.0.1:8000; MODEL is then a model it has"
    )
    api_key_file: str | None = option(
        None, "a file with the API key for that server, in the form of the server's own"
    )
    concurrency: str = option("1,4,16", "requests at once, one measurement for each of these")
    input_len: int | None = option(None, "tokens of a prompt; auto: 128, less in a short context")
    output_len: int | None = option(None, "tokens of an output; auto: 64, less in a short context")
    requests: int | None = option(
        None, f"requests of each measurement; auto: {ROUNDS} rounds, at least {LEAST_REQUESTS}"
    )
    context: int | None = option(
        None, "tokens that a sequence may have; auto: as the model or the server says"
    )
    seed: int = option(0, "which prompts")

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "requests", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} must be at least 1, not {value}")
        self.levels()

    def levels(self) -> list[int]:
        """The numbers of `--concurrency`. Raises ConfigError if they are none."""
        try:
            levels = [int(part) for part in self.concurrency.split(",")]
        except ValueError:
            levels = []
        if not levels or not all(1 <= level <= MAX_NUM_SEQS for level in levels):
            raise ConfigError(
                f"--concurrency must be numbers from 1 to {MAX_NUM_SEQS} with commas between "
                f"them, not {self.concurrency!r}"
            )
        return levels


def add_to(commands: Commands) -> None:
    parser = commands.add_parser(
        "bench",
        help="measure how fast a model, or a server, answers",
        usage="forge-jax bench [MODEL] [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    add_model(parser)
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    add_sections(parser, {"measurement": BenchFlags}, all_essential=True)
    add_engine(parser)
    parser.set_defaults(run=run)


def run(options: dict[str, Any]) -> int:
    as_json, flags = options.pop("json"), BenchFlags(**taken(options, BenchFlags))
    if flags.url is not None:
        model = model_at(flags.url, options)
        measured = _of_server(flags, model)
    elif flags.api_key_file is not None:
        raise ConfigError("--api-key-file is for a server: give its --url")
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
                raise ConfigError(f"{url} does not say how long its context is: pass --context")
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
    """One entry for each concurrency, each after a warm-up of its own."""
    from forge_serve.bench.client import run as run_load
    from forge_serve.bench.metrics import summarise
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
                **summarise(done.measured, done.wall_s),
            }
        )
    return runs


def table(report: dict[str, Any]) -> str:
    """The report for a person."""
    first = report["runs"][0]
    head = (
        f"{report['model']}{' at ' + report['url'] if 'url' in report else ''}: "
        f"{first['input_len']} tokens in, {first['output_len']} out; {report['cpu']}, "
        f"{report['cores']} cores, jax {report['versions'].get('jax', 'not installed')}"
    )
    header = ["at once", "answered", "output tokens/s", "all tokens/s", *COLUMNS.values()]
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
