"""Measure forge-jax and its peers on the CPU, interleaved. See `--help` and ../README.md."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import aiohttp

from benchmarks import report as reports
from benchmarks.peers import engines, measure, proc, report, setup, suites
from benchmarks.peers.engines import Engine, Room
from benchmarks.peers.limits import BITS, Machine, Model, Weights
from benchmarks.peers.measure import MeasureError, TraceReplay, Workload
from benchmarks.peers.peak import Probe, probe
from benchmarks.peers.server import Server, ServerError
from benchmarks.peers.suites import MODEL_CONTEXT, Suite
from benchmarks.random_model import SHAPES, write_model
from forge_jax.errors import ConfigError
from forge_serve.bench.errors import BenchmarkError

PEERS = ("vllm", "llama.cpp", "transformers")
FORGE = ("bf16:dtype=bfloat16", "int8:quantization=int8", "int4:quantization=int4")
WAKE_UP_SEED = 2**32 - 1
HOLD_S = 240.0  # maximum time to hold the lock
QUIET_SAMPLE_S = 0.5


def main() -> int:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # also ends the servers
    lock = _Lock(args.lock)
    try:
        chosen_suites = _suites(args)
    except BenchmarkError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    with probe() as peaks:
        return _run_all(args, chosen_suites, peaks, lock)


def _run_all(
    args: argparse.Namespace, chosen_suites: Sequence[Suite], peaks: Probe, lock: _Lock
) -> int:
    with lock:
        operations_per_s = peaks.operations_per_s(engines.num_threads())
    document = reports.new(
        "peers",
        threads=engines.num_threads(),
        packages={name: setup.ENVIRONMENTS[name].packages for name in args.peers},
        peak_operations_per_s=operations_per_s,
        runs=[],
        shapes={},
    )
    tables = [_about(document)]
    print(tables[0], flush=True)
    for shape in args.shapes:
        document["shapes"][shape] = {}
        for suite in chosen_suites:
            text = _measured(args, shape, suite, document, peaks, lock)
            if text is None:
                return 1
            print(text, flush=True)
            tables.append(text)
            if args.output is not None:
                args.output.with_suffix(".md").write_text("\n\n".join(tables) + "\n")
    return 0


def _about(document: dict[str, Any]) -> str:
    peaks = ", ".join(
        f"{name} {rate / 1e9:,.0f}" for name, rate in document["peak_operations_per_s"].items()
    )
    return f"{reports.heading(document)}, {document['threads']} threads" + (
        f"; peak in 10^9 operations/s: {peaks}" if peaks else ""
    )


def _suites(args: argparse.Namespace) -> list[Suite]:
    """Return the requested suites; raise `BenchmarkError` for an invalid size."""
    made = []
    for name in args.suites:
        if name == "batches":
            made.append(suites.batches(args.batch_sizes or [1, 8, 16, 32]))
        elif name == "long":
            made.append(suites.long(args.contexts, args.batch_sizes or [1]))
        elif args.trace is None:
            raise BenchmarkError("--suites trace needs --trace FILE")
        else:
            made.append(
                suites.trace(
                    args.trace,
                    args.rates,
                    args.max_requests,
                    args.trace_context,
                    args.trace_seqs,
                )
            )
    return made


def _measured(
    args: argparse.Namespace,
    shape: str,
    suite: Suite,
    document: dict[str, Any],
    peaks: Probe,
    lock: _Lock,
) -> str | None:
    """Measure one suite on one shape into the document; return its table, None without engines."""
    model = _model(shape)
    chosen = _engines(args, model, suite.room)
    if not chosen:
        print("nothing to measure", file=sys.stderr)
        return None
    runs: list[report.Run] = []
    with _servers(chosen, lock) as servers:
        found: dict[str, Any] = {
            "room": vars(suite.room),
            "weights": {engine.name: engine.weights for engine in chosen},
            "start_s": {s.engine.name: s.start_s for s in servers},
            "read_bandwidth_gb_per_s": [],
        }
        document["shapes"][shape][suite.name] = found
        servers = [s for s in servers if _warms_up(s, model, suite, lock)]
        for number in range(1, args.rounds + 1):
            found["read_bandwidth_gb_per_s"].append(_bandwidth(peaks, lock))
            for run in _round(servers, shape, model, suite, number, args, lock):
                runs.append(run)
                document["runs"].append(report.as_json(run))
            if not runs:
                continue
            machine = Machine(
                bytes_per_s=1e9 * max(found["read_bandwidth_gb_per_s"]),
                peaks=document["peak_operations_per_s"],
            )
            found |= report.summary(runs, suite.metrics)
            found["limits"] = _limits(suite, model, found["weights"].values(), machine)
            if args.output is not None:
                reports.write(report.without_nan(document), args.output)
    if not runs:
        print(f"no engine completed a workload of {suite.name}", file=sys.stderr)
        return None
    return report.table(shape, suite, found)


def _limits(
    suite: Suite, model: Path, weights: Iterable[str], machine: Machine
) -> dict[str, dict[str, float]]:
    """Return the machine's limits by kind of weights."""
    costs = Model.of(engines.config(model))
    found = {}
    for name in dict.fromkeys(weights):
        if name.startswith("gguf "):
            kind = Weights.of_gguf(engines.gguf(model, name.removeprefix("gguf ")), costs)
        elif name in BITS:
            kind = Weights.of_type(name, costs)
        else:
            continue
        found[name] = report.limits_of(suite, costs, kind, machine)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = reports.parser("peers", "Compare forge-jax and other engines on the CPU.", rounds=4)
    parser.add_argument(
        "--no-gguf",
        dest="gguf",
        action="store_false",
        help="do not serve llama.cpp's quantized files with forge-jax",
    )
    parser.add_argument(
        "--forge",
        action="append",
        metavar="NAME:OPTION=VALUE,...",
        help="a configuration of forge-jax, by names of EngineConfig's fields. Repeat the "
        f"flag for several, or pass none to leave forge-jax out (default: {' '.join(FORGE)})",
    )
    quantizations = engines.LLAMA_CPP_QUANTIZATIONS
    reports.options(
        parser,
        ("--peers", _names(PEERS), list(PEERS), "peers to measure if they are set up, or none"),
        (
            *("--quantizations", _names(quantizations), list(quantizations)),
            "types of llama.cpp's weights; forge-jax also serves the files of all but bf16",
        ),
        ("--shapes", _names(tuple(SHAPES)), ["S", "M"], "of the models"),
        (
            *("--suites", _names(suites.NAMES), ["batches"]),
            "batches: 128 tokens in, 64 out. long: prompts of --contexts, 64 tokens out. trace: "
            "the requests of --trace",
        ),
        (
            *("--batch-sizes", _numbers(int), None),
            "concurrent requests (default: 1,8,16,32; of the suite long: 1)",
        ),
        ("--contexts", _numbers(int), [4096, 8192, 32768], "prompt tokens of the suite long"),
        ("--trace", Path, None, "Azure CSV or Mooncake JSON lines"),
        (
            *("--rates", _numbers(float), [0.6, 1.2]),
            "mean requests/s to which a trace's arrivals are stretched",
        ),
        ("--max-requests", int, 60, "number of requests from the start of the trace"),
        (
            *("--trace-context", int, 4096),
            "tokens of prompt and output to which a trace's requests are truncated",
        ),
        ("--trace-seqs", int, 16, "concurrent sequences of each server in a trace"),
        ("--attempts", int, 3, "maximum number of tries for a quiet run"),
        ("--quiet-wait", float, 60.0, "maximum seconds to wait for an idle machine before a run"),
        (
            *("--lock", Path, None),
            "hold an exclusive lock on this file only while something runs, for shared machines",
        ),
    )
    return parser


def _names(known: Sequence[str]):
    def parse(text: str) -> list[str]:
        names = [] if text == "none" else text.split(",")
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
        return names

    return parse


def _numbers[N: (int, float)](kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    def parse(text: str) -> list[N]:
        try:
            return [kind(part) for part in text.split(",")]
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} must be numbers and commas") from None

    return parse


def _engines(args: argparse.Namespace, model: Path, room: Room) -> list[Engine]:
    """Return the requested engines that can run; print the others with the reason."""
    threads = engines.num_threads()
    chosen: list[Engine] = []
    for text in args.forge or FORGE:
        if text == "none":
            continue
        name, options = _forge_options(text)
        try:
            chosen.append(engines.forge_jax(name, options, model, room))
        except ConfigError as error:
            print(f"left out: forge-jax {name}: {error}", flush=True)
    for peer in args.peers:
        if not setup.is_complete(peer):
            how = f"python -m benchmarks.peers.setup {peer}"
            print(f"left out: {peer}: not set up; run {how}", flush=True)
        elif peer == "vllm":
            chosen.append(engines.vllm(model, threads, room))
        elif peer == "transformers":
            chosen.append(engines.transformers(model, threads, room))
        else:
            chosen += [engines.llama_cpp(q, model, threads, room) for q in args.quantizations]
            if args.gguf:
                files = [q for q in args.quantizations if q != "bf16"]
                chosen += [engines.forge_jax_gguf(q, model, room) for q in files]
    return chosen


def _forge_options(text: str) -> tuple[str, dict[str, Any]]:
    """Parse "int8:quantization=int8,block_size=32" into name and options, with integers as such."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, separator, value = pair.partition("=")
        if not separator:
            raise SystemExit(f"--forge {text}: {pair!r} must be OPTION=VALUE")
        options[key] = int(value) if value.isdecimal() else value
    return name, options


def _model(shape: str) -> Path:
    folder = setup.cache_folder() / "models" / f"{shape}-{MODEL_CONTEXT}"
    if not (folder / "model.safetensors").exists():
        print(f"writing random weights of shape {shape}", flush=True)
        claimed = dataclasses.replace(SHAPES[shape], max_position_embeddings=MODEL_CONTEXT)
        write_model(folder, claimed)
    return folder


@contextlib.contextmanager
def _servers(chosen: Sequence[Engine], lock: _Lock) -> Iterator[list[Server]]:
    """Start all engines one after the other, then pause them; one that fails is left out."""
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for i, engine in enumerate(chosen):
            with lock:
                try:
                    server = Server(engine, logs / f"{i}.log")
                except ServerError as error:
                    print(f"left out: {error}", flush=True)
                    continue
                stack.callback(server.stop)
                server.pause()
            memory = f"{server.memory_bytes() / 1e9:.1f} GB"
            print(f"{engine.name}: ready in {server.start_s:.1f} s, {memory}", flush=True)
            servers.append(server)
        yield servers


def _warms_up(server: Server, model: Path, suite: Suite, lock: _Lock) -> bool:
    """Send the warm-up requests and return True if they succeed; print the error otherwise."""
    try:
        for workload in suite.warm_ups:
            with lock:
                _run(server, "", model, workload, 0, 0)
    except (MeasureError, aiohttp.ClientError) as error:
        print(f"left out: {server.engine.name}: {error}", flush=True)
        return False
    return True


def _round(
    servers: Sequence[Server],
    shape: str,
    model: Path,
    suite: Suite,
    number: int,
    args: argparse.Namespace,
    lock: _Lock,
) -> Iterator[report.Run]:
    """Yield every workload on every server; a server that fails is left out."""
    for workload in suite.workloads:
        for server in servers:
            try:
                yield _quiet_run(server, shape, model, workload, number, args, lock)
            except (MeasureError, aiohttp.ClientError) as error:
                name = f"{workload.name} of {server.engine.name}"
                print(f"left out: round {number}, {name}: {error}", flush=True)


def _quiet_run(
    server: Server,
    shape: str,
    model: Path,
    workload: Workload | TraceReplay,
    number: int,
    args: argparse.Namespace,
    lock: _Lock,
) -> report.Run:
    """Return the first quiet run of `--attempts`, or the least noisy one; speed does not matter."""
    attempts: list[report.Run] = []
    while len(attempts) < args.attempts and not (attempts and attempts[-1].quiet):
        with lock:
            _wait_for_quiet(args.quiet_wait)
            attempts.append(_run(server, shape, model, workload, number, len(attempts)))
        print(_progress(attempts[-1]), flush=True)
    return min(attempts, key=lambda run: run.foreign_cores)


def _wait_for_quiet(seconds: float) -> None:
    """Wait until other processes are idle, up to `seconds`. All servers are paused."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        meter = proc.BusyMeter(lambda: 0.0)
        time.sleep(QUIET_SAMPLE_S)
        if meter.foreign_cores() <= report.MOST_FOREIGN_CORES:
            return


def _run(
    server: Server,
    shape: str,
    model: Path,
    workload: Workload | TraceReplay,
    number: int,
    attempt: int,
) -> report.Run:
    vocab_size = engines.vocab_size(model)
    with server.running():
        measure.run(server.url, server.engine, measure.WAKE_UP, vocab_size, [WAKE_UP_SEED])
        meter = proc.BusyMeter(server.cpu_s)
        figures, first_tokens = workload.measure(
            server.url, server.engine, vocab_size, number, attempt
        )
        foreign_cores = meter.foreign_cores()
    return report.Run(
        shape=shape,
        round=number,
        attempt=attempt,
        engine=server.engine.name,
        workload=workload.name,
        figures=figures,
        foreign_cores=foreign_cores,
        first_tokens=first_tokens,
    )


def _bandwidth(peaks: Probe, lock: _Lock) -> float:
    with lock:
        rate = peaks.read_bytes_per_s(engines.num_threads())
    print(f"memory: {rate / 1e9:.1f} GB/s read", flush=True)
    return rate / 1e9


def _progress(run: report.Run) -> str:
    values = ", ".join(f"{name} {value:,.1f}" for name, value in run.figures.items())
    noise = "" if run.quiet else f"  NOISY: others used {run.foreign_cores:.2f} cores"
    at = time.strftime("%H:%M:%S")
    return f"{at} {run.shape} round {run.round} {run.workload} {run.engine}: {values}{noise}"


class _Lock:
    """An exclusive lock on a file, or nothing.

    The lock is kept between uses until it has been held for `HOLD_S`, because each wait for it may
    be long. Then it is released to the processes that wait.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._file: IO[str] | None = None
        self._since = 0.0

    def __enter__(self) -> None:
        if self._path is not None and self._file is None:
            self._file = self._path.open("a")
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._file is not None and time.monotonic() - self._since > HOLD_S:
            self._file.close()
            self._file = None
            time.sleep(0.5)  # lets another process take the lock


if __name__ == "__main__":
    sys.exit(main())
