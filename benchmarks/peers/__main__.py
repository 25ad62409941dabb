"""Measures forge-jax and its peers on the CPU, interleaved. See `--help` and ../README.md."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import aiohttp

from benchmarks.peers import engines, measure, proc, report, setup
from benchmarks.peers.engines import Engine
from benchmarks.peers.measure import MeasureError
from benchmarks.peers.server import Server, ServerError
from benchmarks.random_model import SHAPES, write_model
from benchmarks.report import new as new_report
from benchmarks.report import write as write_report
from forge_jax.errors import ConfigError

PEERS = ("vllm", "llama.cpp", "transformers")
FORGE = ("bf16:dtype=bfloat16", "int8:quantization=int8", "int4:quantization=int4")
WAKE_UP_SEED = 2**32 - 1
HOLD_S = 240.0  # of the lock
ATTEMPTS = 3  # at a quiet run
QUIET_WAIT_S, QUIET_SAMPLE_S = 60.0, 0.5


def main() -> int:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # ends the servers too
    lock = _Lock(args.lock)
    columns = report.metrics(args.batch_sizes)
    document = new_report(
        "peers",
        threads=engines.num_threads(),
        packages={name: setup.ENVIRONMENTS[name].packages for name in args.peers},
        runs=[],
        shapes={},
    )
    tables = []
    for shape in args.shapes:
        model = _model(shape)
        chosen = _engines(args, model)
        if not chosen:
            print("there is nothing to measure", file=sys.stderr)
            return 1
        runs: list[report.Run] = []
        with _servers(chosen, lock) as servers:
            document["shapes"][shape] = {
                "start_s": {s.engine.name: s.start_s for s in servers},
                "read_bandwidth_gb_per_s": [],
            }
            servers = [s for s in servers if _warms_up(s, model, args.batch_sizes, lock)]
            for number in range(1, args.rounds + 1):
                bandwidths = document["shapes"][shape]["read_bandwidth_gb_per_s"]
                bandwidths.append(_bandwidth(lock))
                for run in _round(servers, model, args.batch_sizes, number, lock):
                    runs.append(run)
                    document["runs"].append(report.as_json(run))
                document["shapes"][shape] |= report.summary(runs, columns)
                if args.output is not None:
                    write_report(report.without_nan(document), args.output)
        text = report.table(shape, document["shapes"][shape], columns)
        print(text, flush=True)
        tables.append(text)
    if args.output is not None:
        args.output.with_suffix(".md").write_text("\n\n".join(tables) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="forge-jax beside its peers on the CPU."
    )
    parser.add_argument(
        "--peers",
        type=_names(PEERS),
        default=list(PEERS),
        help=f"of {','.join(PEERS)}, or none; default: all that are set up",
    )
    parser.add_argument(
        "--quantizations",
        type=_names(engines.LLAMA_CPP_QUANTIZATIONS),
        default=list(engines.LLAMA_CPP_QUANTIZATIONS),
        help="of llama.cpp's weights",
    )
    parser.add_argument(
        "--forge",
        action="append",
        metavar="NAME:OPTION=VALUE,...",
        help="a configuration of forge-jax, by names of EngineConfig's fields; may be given "
        f"several times, none for no forge-jax; default: {' '.join(FORGE)}",
    )
    parser.add_argument("--shapes", type=_names(tuple(SHAPES)), default=["S", "M"])
    parser.add_argument(
        "--batch-sizes", type=lambda s: [int(b) for b in s.split(",")], default=[1, 8, 16, 32]
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--output", type=Path, help="write the report here as JSON, and beside it as .md"
    )
    parser.add_argument(
        "--lock",
        type=Path,
        help="hold an exclusive lock of this file while something runs, and only then: for "
        "machines that several people share",
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


def _engines(args: argparse.Namespace, model: Path) -> list[Engine]:
    """What can be measured of what was asked for; says what is left out, and why."""
    threads = engines.num_threads()
    chosen: list[Engine] = []
    for text in args.forge or FORGE:
        if text == "none":
            continue
        name, options = _forge_options(text)
        try:
            chosen.append(engines.forge_jax(name, options, model))
        except ConfigError as error:
            print(f"left out: forge-jax {name}: {error}", flush=True)
    for peer in args.peers:
        if not setup.is_complete(peer):
            how = f"python -m benchmarks.peers.setup {peer}"
            print(f"left out: {peer}: it is not set up; run {how}", flush=True)
        elif peer == "vllm":
            chosen.append(engines.vllm(model, threads))
        elif peer == "transformers":
            chosen.append(engines.transformers(model, threads))
        else:
            chosen += [engines.llama_cpp(q, model, threads) for q in args.quantizations]
    return chosen


def _forge_options(text: str) -> tuple[str, dict[str, Any]]:
    """ "int8:quantization=int8,block_size=32" to its name and options; whole numbers as such."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, separator, value = pair.partition("=")
        if not separator:
            raise SystemExit(f"--forge {text}: {pair!r} must be OPTION=VALUE")
        options[key] = int(value) if value.isdecimal() else value
    return name, options


def _model(shape: str) -> Path:
    folder = setup.cache_folder() / "models" / shape
    if not (folder / "model.safetensors").exists():
        print(f"writing random weights of shape {shape}", flush=True)
        write_model(folder, SHAPES[shape])
    return folder


@contextlib.contextmanager
def _servers(chosen: Sequence[Engine], lock: _Lock) -> Iterator[list[Server]]:
    """All of them, started one after the other, and paused. One that fails is left out."""
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


def _warms_up(server: Server, model: Path, batch_sizes: Sequence[int], lock: _Lock) -> bool:
    """Runs every batch once with few tokens, and the long prompt; says so if the server cannot."""
    shortened = [measure.batch_workload(batch).shortened() for batch in batch_sizes]
    try:
        for workload in [*shortened, measure.PREFILL]:
            with lock:
                _run(server, model, workload, 0, 0)
    except (MeasureError, aiohttp.ClientError) as error:
        print(f"left out: {server.engine.name}: {error}", flush=True)
        return False
    return True


def _round(
    servers: Sequence[Server], model: Path, batch_sizes: Sequence[int], number: int, lock: _Lock
) -> Iterator[report.Run]:
    for workload in _workloads(batch_sizes):
        for server in servers:
            yield _quiet_run(server, model, workload, number, lock)


def _quiet_run(
    server: Server, model: Path, workload: measure.Workload, number: int, lock: _Lock
) -> report.Run:
    """The first of `ATTEMPTS` runs that is quiet, else the least noisy; speed does not choose."""
    attempts: list[report.Run] = []
    while len(attempts) < ATTEMPTS and not (attempts and attempts[-1].quiet):
        with lock:
            _wait_for_quiet()
            attempts.append(_run(server, model, workload, number, len(attempts)))
        print(_progress(attempts[-1]), flush=True)
    return min(attempts, key=lambda run: run.foreign_cores)


def _wait_for_quiet() -> None:
    """Returns when other processes are idle, or after `QUIET_WAIT_S`. All servers are paused."""
    deadline = time.monotonic() + QUIET_WAIT_S
    while time.monotonic() < deadline:
        meter = proc.BusyMeter(lambda: 0.0)
        time.sleep(QUIET_SAMPLE_S)
        if meter.foreign_cores() <= report.MOST_FOREIGN_CORES:
            return


def _run(
    server: Server, model: Path, workload: measure.Workload, number: int, attempt: int
) -> report.Run:
    vocab_size = engines.vocab_size(model)
    with server.running():
        measure.run(server.url, server.engine, measure.WAKE_UP, vocab_size, [WAKE_UP_SEED])
        meter = proc.BusyMeter(server.cpu_s)
        seed = [number, attempt, workload.batch, workload.prompt_tokens]
        streams = measure.run(server.url, server.engine, workload, vocab_size, seed)
        foreign_cores = meter.foreign_cores()
    return report.Run(
        shape=model.name,
        round=number,
        attempt=attempt,
        engine=server.engine.name,
        workload=workload.name,
        figures=measure.figures(workload, streams),
        foreign_cores=foreign_cores,
        first_tokens=measure.first_tokens(streams),
    )


def _workloads(batch_sizes: Sequence[int]) -> list[measure.Workload]:
    return [*map(measure.batch_workload, batch_sizes), measure.PREFILL]


def _bandwidth(lock: _Lock) -> float:
    with lock:
        rate = proc.read_bandwidth_bytes_per_s(engines.num_threads())
    print(f"memory: {rate / 1e9:.1f} GB/s read", flush=True)
    return rate / 1e9


def _progress(run: report.Run) -> str:
    values = ", ".join(f"{name} {value:,.1f}" for name, value in run.figures.items())
    noise = "" if run.quiet else f"  NOISY: others used {run.foreign_cores:.2f} cores"
    at = time.strftime("%H:%M:%S")
    return f"{at} {run.shape} round {run.round} {run.workload} {run.engine}: {values}{noise}"


class _Lock:
    """An exclusive lock of a file, or nothing.

    It is kept from one use to the next until it has been held for `HOLD_S`, since each wait for it
    may be long, and then given to those who wait.
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
            time.sleep(0.5)  # or nobody else would get it


if __name__ == "__main__":
    sys.exit(main())
