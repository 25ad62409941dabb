"""`forge-jax bench`: measure the speed of a model on this machine, or of a server."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from forge_jax.config import MAX_NUM_SEQS, EngineConfig, flags_of, option
from forge_jax.errors import ConfigError
from forge_serve.cli.commands.engine import add_engine, check_model, configs, model_at, quiet_logs
from forge_serve.cli.flags import Commands, add_model, add_sections, taken

if TYPE_CHECKING:
    from forge_serve.bench.client import Submit
    from forge_serve.bench.report import Report
    from forge_serve.bench.sharegpt import Encode
    from forge_serve.bench.workload import Vocabulary, Workload

DESCRIPTION = """\
Measure throughput and latency of a model loaded in this process, or of a server if --url is set.
Requests are greedy. They have random prompts of equal size, or come from a data set or a trace.
Each concurrency or request rate is measured separately. The report has throughput, time to first
token (TTFT), inter-token latency (ITL), time per output token (TPOT) and request latency. The exit
status is 1 if a request failed."""
EPILOG = """\
examples:
  forge-jax bench Qwen/Qwen3-0.6B --input-len 512 --output-len 128 --save before.json
  forge-jax bench Qwen/Qwen3-0.6B --input-len 512 --output-len 128 --compare before.json
  forge-jax bench --url http://127.0.0.1:8000 --request-rate 1,4,16
  forge-jax bench --dataset-name sharegpt --dataset-path sharegpt.json --max-concurrency 16

For other loads and goodput, run python -m benchmarks.serving in the repository."""
LEAST_REQUESTS = 8  # default minimum of each measurement
ROUNDS = 4  # default number of requests per concurrent client
RATE_S = 10.0  # default seconds of arrivals at a request rate
TRACE_REQUESTS = 64  # default number of requests with a trace's own arrivals
DEFAULT_CONCURRENCY = (1, 4, 16)
WARM_UP_REQUESTS = 8  # without a limit of concurrency
CHARTS = (".svg", ".html")


@dataclass(frozen=True)
class Load:
    """A load that is measured. Without limit and rate, a trace's own arrivals count."""

    concurrency: int | None = None
    rate: float | None = None  # requests/s


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    url: str | None = option(
        None,
        "URL of a server to measure, such as http://127.0.0.1:8000; MODEL is then one of its"
        " models",
        metavar="URL",
    )
    api_key_file: str | None = option(
        None,
        "file with the server's API key, in the format of serve's --api-key-file",
        metavar="FILE",
    )
    max_concurrency: str | None = option(
        None,
        f"comma-separated numbers of concurrent requests, each from 1 to {MAX_NUM_SEQS}; each "
        "number is measured separately. Default: 1,4,16, or no limit with --request-rate or a "
        "trace",
    )
    request_rate: str | None = option(
        None,
        "comma-separated numbers of requests per second, each greater than 0; each rate is "
        "measured separately, with Poisson arrivals. Default: a request is sent whenever "
        "--max-concurrency allows it",
    )
    burstiness: float = option(
        1.0,
        "with --request-rate, shape of the gamma distribution of the intervals between arrivals, "
        "greater than 0; 1: Poisson arrivals, less: bursts, more: steadier arrivals",
    )
    dataset_name: Literal["random", "sharegpt", "trace"] = option(
        "random",
        "random prompts of equal size, conversations in ShareGPT's form, or a trace (an Azure "
        "CSV or Mooncake's JSON lines) with lengths and arrival times",
    )
    dataset_path: str | None = option(None, "file of the data set or trace", metavar="FILE")
    tokenizer: str | None = option(
        None,
        "with --url and sharegpt, the model's tokenizer.json or its folder. Default: the model's "
        "own, if it is on this machine",
    )
    input_len: int | None = option(
        None,
        "prompt tokens per random request, at least 1; auto: 128, or fewer in a short context",
    )
    output_len: int | None = option(
        None,
        "output tokens per request, at least 1; auto: the data set's, or 64 for random requests, "
        "or fewer in a short context",
    )
    num_prompts: int | None = option(
        None,
        f"requests per measurement, at least 1; auto: {ROUNDS} times the concurrency, "
        f"{RATE_S:.0f} s of arrivals, or {TRACE_REQUESTS} of a trace, at least {LEAST_REQUESTS}",
    )
    context: int | None = option(
        None,
        "maximum tokens of a sequence, prompt plus output, at least 64; auto: the context length "
        "of the model or server",
    )
    seed: int = option(0, "seed of prompts and arrivals")
    save: str | None = option(
        None, "write the report to this file as JSON, for --compare", metavar="FILE"
    )
    compare: str | None = option(
        None, "compare with the report in this file, which --save wrote, as bars", metavar="FILE"
    )
    chart: str | None = option(
        None, "write a chart to this file, which ends in .svg or .html", metavar="FILE"
    )

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "num_prompts", "context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, not {value}")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise ConfigError(f"--burstiness must be greater than 0, not {self.burstiness}")
        if (self.dataset_name == "random") != (self.dataset_path is None):
            raise ConfigError(
                "--dataset-path is the file of --dataset-name sharegpt or trace: set both or none"
            )
        if self.dataset_name != "random" and self.input_len is not None:
            raise ConfigError("--input-len is for random prompts: omit it, or --dataset-name")
        if self.dataset_name == "trace" and self.output_len is not None:
            raise ConfigError("--output-len is not for traces, which have their own lengths")
        if self.chart is not None and Path(self.chart).suffix not in CHARTS:
            raise ConfigError(f"--chart must end in {' or '.join(CHARTS)}, not {self.chart!r}")
        self.loads()

    def loads(self) -> list[Load]:
        """Return the loads to measure. Raises ConfigError if a list is malformed."""
        limits = self._numbers("max_concurrency", int, f"numbers from 1 to {MAX_NUM_SEQS}")
        rates = self._numbers("request_rate", float, "numbers greater than 0")
        if not all(1 <= limit <= MAX_NUM_SEQS for limit in limits):
            raise ConfigError(
                f"--max-concurrency must be numbers from 1 to {MAX_NUM_SEQS}, separated by commas, "
                f"not {self.max_concurrency!r}"
            )
        if not all(rate > 0 and math.isfinite(rate) for rate in rates):
            raise ConfigError(
                "--request-rate must be numbers greater than 0, separated by commas, not "
                f"{self.request_rate!r}"
            )
        if rates:
            if len(limits) > 1:
                raise ConfigError("with --request-rate, --max-concurrency must be one number")
            return [Load(limits[0] if limits else None, rate) for rate in rates]
        if self.dataset_name == "trace" and not limits:
            return [Load()]
        return [Load(int(limit)) for limit in limits or DEFAULT_CONCURRENCY]

    def _numbers(self, name: str, kind: Callable[[str], Any], expected: str) -> list[Any]:
        value = getattr(self, name)
        try:
            return [] if value is None else [kind(part) for part in value.split(",")]
        except ValueError:
            raise ConfigError(
                f"{_flag(name)} must be {expected}, separated by commas, not {value!r}"
            ) from None

    def requests_of(self, load: Load) -> int:
        """Return the number of requests of a measurement."""
        if self.num_prompts is not None:
            return self.num_prompts
        if load.rate is not None:
            return max(math.ceil(RATE_S * load.rate), LEAST_REQUESTS)
        if load.concurrency is not None:
            return max(ROUNDS * load.concurrency, LEAST_REQUESTS)
        return TRACE_REQUESTS


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    if as_json and flags.compare is not None:
        raise ConfigError("--compare prints bars: omit --json, or write the report with --save")
    from forge_serve.bench import machine
    from forge_serve.bench.report import comparison, read_report, table

    saved = None if flags.compare is None else read_report(Path(flags.compare))
    for file in (flags.save, flags.chart):
        if file is not None and not Path(file).absolute().parent.is_dir():
            raise ConfigError(f"{file} cannot be written: its folder does not exist")
    data = _Data(flags)  # reads the file before anything slow
    if flags.url is not None:
        model = model_at(flags.url, options)
        measured = _of_server(flags, data, model)
    elif flags.api_key_file is not None:
        raise ConfigError("--api-key-file requires --url")
    else:
        measured = _of_engine(flags, data, options)
    report = {"benchmark": "bench", **machine.describe(), "workload": data.described, **measured}
    print(json.dumps(report, indent=2, allow_nan=False) if as_json else table(report))
    if saved is not None:
        blocks = (sys.stdout.encoding or "").lower().startswith("utf")
        print(f"\n{comparison(report, saved, blocks=blocks)}")
    _write_files(flags, report, saved)
    return 1 if any(run["errors"] for run in report["runs"]) else 0


def _write_files(flags: BenchFlags, report: Report, saved: Report | None) -> None:
    from forge_serve.bench import chart

    files = {}
    if flags.save is not None:
        files[flags.save] = json.dumps(report, indent=2, allow_nan=False) + "\n"
    if flags.chart is not None:
        draw = chart.html if Path(flags.chart).suffix == ".html" else chart.svg
        files[flags.chart] = draw(report, saved)
    for file, content in files.items():
        try:
            Path(file).write_text(content, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file} cannot be written: {error.strerror}") from error


class _Data:
    """Source of the requests that the flags select."""

    def __init__(self, flags: BenchFlags):
        from forge_serve.bench.sharegpt import read_sharegpt
        from forge_serve.bench.traces import read_trace

        self._flags = flags
        self._loads = flags.loads()
        path = None if flags.dataset_path is None else Path(flags.dataset_path)
        name = flags.dataset_name
        self._conversations = read_sharegpt(path) if path and name == "sharegpt" else []
        most = max(map(flags.requests_of, self._loads))
        self._entries = read_trace(path, most) if path and name == "trace" else []
        self.described = {
            "dataset_name": name,
            "dataset_file": None if path is None else path.name,
            "input_len": flags.input_len,
            "output_len": flags.output_len,
            "num_prompts": flags.num_prompts,
            "burstiness": flags.burstiness,
            "seed": flags.seed,
        }

    def workloads(
        self, vocabulary: Vocabulary, encode: Encode, context: int
    ) -> list[tuple[Load, Workload, Workload]]:
        """Return each load with its warm-up and its requests. No prompt occurs twice."""
        from forge_serve.bench.arrivals import with_load
        from forge_serve.bench.sharegpt import sharegpt
        from forge_serve.bench.traces import trace
        from forge_serve.bench.workload import WARM_UP, Sizes, Workload, baseline

        flags = self._flags
        counts = [flags.requests_of(load) for load in self._loads]
        conversations = iter(
            sharegpt(
                self._conversations, encode, count=sum(counts), context=context,
                output_len=flags.output_len, seed=flags.seed,
            ) if flags.dataset_name == "sharegpt" else ()
        )  # fmt: skip
        made = []
        for index, (load, count) in enumerate(zip(self._loads, counts, strict=True)):
            sizes = Sizes(
                context=context,
                num_requests=count,
                input_len=flags.input_len,
                output_len=flags.output_len,
            )
            at_once = load.concurrency or min(count, WARM_UP_REQUESTS)
            warm = dataclasses.replace(sizes, num_requests=at_once)
            warm_up = baseline(warm, vocabulary, flags.seed, WARM_UP - index)
            if flags.dataset_name == "sharegpt":
                requests = tuple(next(conversations) for _ in range(count))
                workload = Workload(name="sharegpt", requests=requests)
            elif flags.dataset_name == "trace":
                entries = self._entries[:count]
                workload = trace(entries, sizes, vocabulary, seed=flags.seed, round_=index)
            else:
                workload = baseline(sizes, vocabulary, flags.seed, index)
            workload = with_load(
                workload,
                rate=load.rate,
                burstiness=flags.burstiness,
                concurrency=load.concurrency,
                seed=flags.seed,
            )
            made.append((load, with_load(warm_up, concurrency=at_once), workload))
        return made


def _of_server(flags: BenchFlags, data: _Data, model: str | None) -> dict[str, Any]:
    from forge_serve.bench.client import Server, run_async
    from forge_serve.bench.workload import Vocabulary
    from forge_serve.http.client import api_key_of

    assert flags.url is not None
    url, key = flags.url, api_key_of(flags.api_key_file)
    vocabulary = None if flags.tokenizer is None else Vocabulary.from_file(Path(flags.tokenizer))

    async def measure() -> dict[str, Any]:
        async with Server.connect(url, model=model, api_key=key, vocabulary=vocabulary) as server:
            context = flags.context or server.context
            if context is None:
                raise ConfigError(f"{url} does not report its context length: set --context")
            words = server.vocabulary
            loads = data.workloads(words, words.encode, context)
            runs = await _runs(server.submit, loads)
            return {"model": server.model, "url": url, "context": context, "runs": runs}

    return run_async(measure())


def _of_engine(flags: BenchFlags, data: _Data, options: dict[str, Any]) -> dict[str, Any]:
    from forge_jax.telemetry.startup import StartupTimes
    from forge_serve.bench.client import run_async
    from forge_serve.bench.in_process import Submitter, ready
    from forge_serve.bench.workload import Vocabulary
    from forge_serve.server.process import load_engine

    if flags.tokenizer is not None:
        raise ConfigError("--tokenizer requires --url: an engine uses its own tokenizer")
    engine_config, server_config = configs(options)
    if not server_config.fake:
        check_model(engine_config)
    quiet_logs()
    startup = StartupTimes()
    engine = load_engine(engine_config, server_config, startup)

    def encode(text: str) -> list[int]:
        if engine.tokenizer is None:
            raise ConfigError("this model has no tokenizer: use --dataset-name random or trace")
        return engine.tokenizer.encode(text)

    async def measure() -> dict[str, Any]:
        engine.start()
        try:
            context = min(flags.context or engine.max_model_len, engine.max_model_len)
            loads = data.workloads(Vocabulary.plain(), encode, context)
            await ready(engine)
            runs = await _runs(Submitter(engine).submit, loads)
            stats = engine.stats()
        finally:
            await engine.stop()
        return {
            "model": engine.name,
            "flags": _flags_of(engine_config),
            "context": context,
            "startup_s": stats.startup_seconds,
            "runs": runs,
        }

    return run_async(measure())


def _flags_of(config: EngineConfig) -> list[str]:
    """Return the engine's flags that differ from their defaults, without the random seed."""
    sections = [getattr(config, section.name) for section in dataclasses.fields(config)]
    words = flags_of(*sections)
    at = words.index("--seed")
    return words[:at] + words[at + 2 :]


async def _runs(
    submit: Submit, loads: list[tuple[Load, Workload, Workload]]
) -> list[dict[str, Any]]:
    """Return one entry per load. Each measurement has its own warm-up."""
    from forge_serve.bench.client import run as run_load
    from forge_serve.bench.metrics import summarize
    from forge_serve.bench.report import load_name

    runs = []
    for load, warm_up, workload in loads:
        kind = {"concurrency": load.concurrency, "request_rate": load.rate}
        await run_load(submit, warm_up)
        named = dataclasses.replace(workload, name=load_name(kind))
        done = await run_load(submit, named, progress=True)
        first = workload.requests[0]
        runs.append(
            {
                **kind,
                "input_len": len(first.prompt),
                "output_len": first.max_tokens,
                **summarize(done.measured, done.wall_s),
            }
        )
    return runs
