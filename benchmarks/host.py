"""Measure the host's cost per step: phases of a tick, the queue, the dispatch, a process's CPU.

    python -m benchmarks.host [--only phases queue step process] [--steps 1000] [--output FILE.json]

Takes about three minutes. Run nothing else on the machine meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import psutil

from benchmarks import report as reports
from benchmarks.serving_process import serving
from forge_jax.config import EngineConfig, Policy
from forge_jax.engine.core import max_rows
from forge_jax.engine.fake import assemble_fake
from forge_jax.engine.gc_tuning import short_pauses
from forge_jax.engine.parts import EngineParts
from forge_jax.engine.thread import Engine
from forge_jax.sampling_params import SamplingParams
from forge_jax.schedule.block_pool import BlockPool
from forge_jax.schedule.plan import StepPlan, StepResult
from forge_jax.schedule.request import Request
from forge_jax.schedule.scheduler import Scheduler, SchedulerConfig
from forge_jax.step.inputs import SlotFlags
from forge_jax.step.step_shapes import step_shapes
from forge_jax.telemetry.phases import Phase, PhaseTimes
from forge_jax.testing import FakeDevice
from forge_serve.bench.metrics import percentile

SEQUENCES = (1, 64, 256)
STEP_TIME_S = 0.01  # step time of the fake device; the event loop runs meanwhile
HOST_PHASES = ("schedule", "pack", "commit", "text", "deliver")
WAITING = (0, 100, 10_000)
STREAMS = 64
WARM_UP_STEPS = 100
IDLE_S, BUSY_S = 10.0, 10.0

Report = dict[str, Any]


def main() -> int:
    parser = reports.parser("host", "Measure the host's cost per step.")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all"
    )
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps that each figure covers (default 1000)"
    )
    args = parser.parse_args()
    return reports.publish(
        "host", args, lambda: {name: SECTIONS[name](args.steps) for name in args.only}, tables
    )


# ---- the phases of a tick ------------------------------------------------------------------------


class _PackingDevice:
    """The fake device, behind the packing of the real one."""

    def __init__(self, fake: FakeDevice, config: EngineConfig, max_blocks: int):
        self._fake = fake
        self._max_blocks = max_blocks
        self._flags = SlotFlags(config.batch.max_num_seqs)
        self._shapes = step_shapes(
            max_num_seqs=config.batch.max_num_seqs,
            max_num_batched_tokens=config.batch.max_num_batched_tokens or 2048,
            max_rows=max_rows(config.batch.max_num_seqs),
            block_size=fake.block_size,
        )
        self.pack_s: list[float] = []

    def dispatch(self, plan: StepPlan) -> Any:
        start = time.perf_counter()
        for admission in plan.admissions:
            self._flags.admit(admission.slot, admission.params)
        shape = next(shape for shape in self._shapes if shape.fits(plan))
        shape.pack(plan, self._flags.of_step(plan), self._max_blocks)
        self.pack_s.append(time.perf_counter() - start)
        return self._fake.dispatch(plan)

    def reset(self) -> None:
        self._fake.reset()

    def read(self, pending: Any) -> StepResult:
        return self._fake.read(pending)


class _Recorder(PhaseTimes):
    """A recorder that keeps each individual time, by tick."""

    def __init__(self, device: _PackingDevice):
        super().__init__()
        self._device = device
        self.ticks: list[dict[str, float]] = []

    def begin(self) -> None:
        self.ticks.append({})
        super().begin()

    def end(self, phase: Phase) -> None:
        before = self._total_s[phase]
        super().end(phase)
        self.ticks[-1][phase] = self._total_s[phase] - before
        if phase == "dispatch":
            self.ticks[-1]["pack"] = self._device.pack_s[-1]


def phases(steps: int) -> list[Report]:
    """Measure the host's part of a tick, alone and in an engine whose streams are read."""
    found = []
    for num_sequences in SEQUENCES:
        for churn in (False, True):
            reports.progress(f"phases of {num_sequences} sequences{', churn' * churn}")
            found.append(_measure_alone(num_sequences, steps, churn=churn))
        reports.progress(f"phases of {num_sequences} sequences, served")
        found.append(asyncio.run(_measure_served(num_sequences, steps)))
    return found


def _measure_alone(num_sequences: int, steps: int, *, churn: bool) -> Report:
    """Measure tick after tick, with an event loop that discards its updates.

    If `churn` is false, all sequences decode from the first step to the last. Otherwise a new
    sequence replaces each finished one.
    """
    parts, device = _fake_parts(step_time_s=0.0)
    core = parts.core
    recorder = core.phases = _Recorder(device)
    rng = random.Random(0)
    names = itertools.count()

    def add() -> None:
        core.add(_request(rng, str(next(names)), None if churn else WARM_UP_STEPS + steps + 50))

    for _ in range(num_sequences):
        add()
    with short_pauses(), _event_loop() as loop:
        while len(recorder.ticks) < WARM_UP_STEPS + steps:
            outputs = core.tick()
            loop.call_soon_threadsafe(len, outputs)
            recorder.end("deliver")
            for deltas in outputs.values() if churn else ():
                if deltas[-1].finish_reason is not None:
                    add()
            del outputs  # an engine's event loop frees them, outside of a tick
    load = "come and go" if churn else "decode"
    return {"sequences": num_sequences, "load": load, **_summary(recorder.ticks[-steps:])}


async def _measure_served(num_sequences: int, steps: int) -> Report:
    """Measure in an engine thread while the event loop reads all streams; a step takes 10 ms.

    The host's caches are cold after the pause, and the interpreter lock is shared.
    """
    parts, device = _fake_parts(step_time_s=STEP_TIME_S)
    recorder = parts.core.phases = _Recorder(device)
    engine = Engine(parts)
    engine.start()
    rng = random.Random(0)
    stop = asyncio.Event()

    async def client(name: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            request = _request(rng, f"{name}-{turn}", None)
            stream = engine.submit(
                request.prompt_token_ids, request.params, request_id=request.request_id
            )
            async for _ in stream:
                if stop.is_set():
                    stream.abort()

    clients = [asyncio.create_task(client(name)) for name in range(num_sequences)]
    while len(recorder.ticks) < WARM_UP_STEPS + steps:
        await asyncio.sleep(0.05)
    ticks = recorder.ticks[WARM_UP_STEPS : WARM_UP_STEPS + steps]
    stop.set()
    await asyncio.gather(*clients)
    await engine.stop()
    return {"sequences": num_sequences, "load": "come and go, served", **_summary(ticks)}


def _request(rng: random.Random, name: str, max_tokens: int | None) -> Request:
    """Return a request of about 64 prompt tokens and, by default, about 128 output tokens."""
    return Request(
        request_id=name,
        prompt_token_ids=[rng.randrange(300) for _ in range(rng.randint(32, 96))],
        params=SamplingParams(
            max_tokens=max_tokens or rng.randint(64, 192), temperature=0.8, ignore_eos=True
        ),
        seed=rng.getrandbits(64),
    )


def _summary(ticks: list[dict[str, float]]) -> Report:
    whole = [tick for tick in ticks if set(HOST_PHASES) <= tick.keys()]
    totals = [sum(tick[name] for name in HOST_PHASES) for tick in whole]
    return {
        "ticks": len(whole),
        "host_us": _percentiles(totals),
        "phases_us": {name: _percentiles([tick[name] for tick in whole]) for name in HOST_PHASES},
    }


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Yield a loop that runs in a separate thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _fake_parts(*, step_time_s: float) -> tuple[EngineParts, _PackingDevice]:
    """Return a fake engine with room for all sequences, whose device packs its inputs."""
    config = EngineConfig.from_options(num_blocks=32_768, block_size=16)
    parts = assemble_fake(config, step_time_s=step_time_s, max_model_len=4096, check=False)
    fake = parts.core.device
    assert isinstance(fake, FakeDevice)
    device = _PackingDevice(fake, config, max_blocks=4096 // 16)
    parts.core.device = device
    return parts, device


# ---- the queue -----------------------------------------------------------------------------------


def queue(steps: int) -> list[Report]:
    """Measure schedule() and add() by policy, with an empty and with a long queue."""
    found = []
    policies: tuple[Policy, ...] = ("fcfs", "priority", "prefix")
    for policy in policies:
        for full in ("slots", "blocks"):
            for waiting in WAITING:
                reports.progress(f"queue: {policy}, {full} full, {waiting} waiting")
                found.append(_measure_queue(policy, full, waiting, steps))
    return found


def _measure_queue(policy: Policy, full: str, waiting: int, steps: int) -> Report:
    """Measure with 256 running sequences and no room for more, for lack of slots or of blocks.

    For lack of blocks: some are free, but the first request in the queue needs more than those.
    """
    running, block_size, prompt_len, steps = 256, 16, 64, min(steps, 500)
    per_sequence = -(-(prompt_len + steps + WARM_UP_STEPS) // block_size) + 1
    pool = BlockPool(running * per_sequence, block_size)
    config = SchedulerConfig(
        max_num_seqs=running if full == "slots" else 2 * running,
        max_num_batched_tokens=2048,
        max_rows=1024,
        max_model_len=pool.num_blocks * block_size,
        policy=policy,
        aging_s=1e9,
    )
    scheduler = Scheduler(config, pool, clock=time.monotonic, rng=random.Random(0))
    device = FakeDevice(
        num_blocks=pool.num_blocks,
        block_size=block_size,
        max_num_seqs=config.max_num_seqs,
        check=False,
    )
    rng = random.Random(0)

    def request(name: str, prompt_len: int, priority: int) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=[rng.randrange(200) for _ in range(prompt_len)],
            params=SamplingParams(max_tokens=steps + 2 * WARM_UP_STEPS),
            seed=0,
            priority=priority,
        )

    for i in range(running):
        scheduler.add(request(f"running-{i}", prompt_len, 0))
    schedule_s: list[float] = []

    def tick() -> None:
        start = time.perf_counter()
        plan = scheduler.schedule()
        schedule_s.append(time.perf_counter() - start)
        assert plan is not None
        scheduler.commit(plan, device.read(device.dispatch(plan)))

    for _ in range(WARM_UP_STEPS // 2):
        tick()
    assert scheduler.num_running == running
    first_len = prompt_len
    if full == "blocks":
        first_len = config.max_model_len - steps - 2 * WARM_UP_STEPS
    adding = [request("first", first_len, 1)]
    adding += [request(f"next-{i}", prompt_len, rng.randint(2, 5)) for i in range(waiting + 49)]
    for waiting_request in adding[:waiting]:
        scheduler.add(waiting_request)
    for _ in range(WARM_UP_STEPS // 2):
        tick()
    schedule_s.clear()
    with _no_collections():
        for _ in range(steps):
            tick()
    assert scheduler.num_waiting == waiting and scheduler.num_running == running
    add_s = []
    for late in adding[waiting:]:
        start = time.perf_counter()
        scheduler.add(late)
        add_s.append(time.perf_counter() - start)
    return {
        "policy": policy,
        "full": full,
        "waiting": waiting,
        "schedule_us": _percentiles(schedule_s),
        "add_us": _percentiles(add_s),
    }


# ---- the real step -------------------------------------------------------------------------------


def real_step(steps: int) -> list[Report]:
    """Measure the parts of the dispatch and the read of the bundled model's decode step."""
    from forge_jax.engine.builder import assemble

    reports.progress("loading forge-tiny")
    parts = assemble(EngineConfig.from_options(max_num_seqs=64, backend="cpu"))
    parts.finish_compiling()
    return [_measure_step(parts, num_sequences, steps) for num_sequences in (16, 64)]


def _measure_step(parts: EngineParts, num_sequences: int, steps: int) -> Report:
    reports.progress(f"decode of {num_sequences} sequences on forge-tiny")
    core, steps = parts.core, min(steps, 300)
    runner: Any = core.device
    for i in range(num_sequences):
        params = SamplingParams(max_tokens=steps + 120, temperature=0.8, ignore_eos=True)
        core.add(
            Request(
                request_id=f"{num_sequences}-{i}", prompt_token_ids=[5] * 16, params=params, seed=i
            )
        )
    times: dict[str, list[float]] = {}
    with parts.guard(), _timed_runner(runner, times):
        for tick in range(steps + 40):
            if tick == 40:
                for values in times.values():
                    values.clear()
            core.tick()
    core.drain()
    return {
        "sequences": num_sequences,
        "us": {name: _percentiles(values) for name, values in times.items()},
    }


@contextmanager
def _timed_runner(runner: Any, times: dict[str, list[float]]) -> Iterator[None]:
    """Time the parts of the runner's `dispatch` and `read`."""

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        values = times.setdefault(name, [])

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            values.append(time.perf_counter() - start)
            return result

        return call

    state = runner.state
    read = timed("read the result", runner.read)
    wait = timed("wait for the device", lambda pending: pending.out.packed.block_until_ready())

    def wait_and_read(pending: Any) -> StepResult:
        wait(pending)
        return read(pending)

    runner.dispatch = timed("dispatch in all", runner.dispatch)
    state.run = timed("upload and call", state.run)
    runner.read = wait_and_read
    try:
        yield
    finally:
        del runner.dispatch, state.run, runner.read


# ---- the process ---------------------------------------------------------------------------------


def process_cpu(steps: int) -> list[Report]:
    """Measure a server's CPU in percent of a core: idle, and with streams at 10 ms per step."""
    found = []
    for name, arguments in (
        ("fake device", ["--fake", "--fake-step-time-ms", f"{1e3 * STEP_TIME_S:.0f}"]),
        ("forge-tiny", ["forge-tiny"]),
    ):
        reports.progress(f"CPU of a server with {name}")
        with serving([*arguments, "--no-request-log"]) as (url, _):
            (process,) = psutil.Process().children()
            time.sleep(2.0)
            report = {"server": name, "idle_percent": _cpu_percent(process, IDLE_S)}
            if name == "fake device":
                report |= asyncio.run(_busy(url, process))
            found.append(report)
    return found


def _cpu_percent(process: psutil.Process, seconds: float) -> float:
    """Return percent of one core over the next `seconds`."""
    before, start = sum(process.cpu_times()[:2]), time.perf_counter()
    time.sleep(seconds)
    return 100 * (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - start)


async def _busy(url: str, process: psutil.Process) -> Report:
    """Measure while 64 clients read streams."""
    body = {"prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True, "stream": True}

    async def client(session: aiohttp.ClientSession) -> None:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for _ in response.content.iter_any():
                pass

    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        clients = [asyncio.create_task(client(session)) for _ in range(STREAMS)]
        await asyncio.sleep(2.0)
        before = _stats(url)
        percent = await asyncio.to_thread(_cpu_percent, process, BUSY_S)
        after = await asyncio.to_thread(_stats, url)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    steps = after["steps"] - before["steps"]
    return {
        "streams": STREAMS,
        "busy_percent": percent,
        "steps_per_s": steps / BUSY_S,
        "tokens_per_s": (after["generation_tokens"] - before["generation_tokens"]) / BUSY_S,
        "mean_phase_us": {
            phase: 1e6 * (totals["total_s"] - before["step_phases"][phase]["total_s"]) / steps
            for phase, totals in after["step_phases"].items()
        },
    }


def _stats(url: str) -> Any:
    with urllib.request.urlopen(f"{url}/stats", timeout=10) as response:
        return json.load(response)


# ---- the report ----------------------------------------------------------------------------------


SECTIONS: dict[str, Callable[[int], list[Report]]] = {
    "phases": phases,
    "queue": queue,
    "step": real_step,
    "process": process_cpu,
}


def tables(report: Report) -> str:
    pair, parts = reports.pair, [reports.heading(report)]
    if "phases" in report:
        rows = [
            (r["sequences"], r["load"], pair(r["host_us"]), *map(pair, r["phases_us"].values()))
            for r in report["phases"]
        ]
        parts.append(reports.table(("sequences", "load", "host, µs", *HOST_PHASES), rows))
    if "queue" in report:
        rows = [
            (r["policy"], r["full"], r["waiting"], pair(r["schedule_us"]), pair(r["add_us"]))
            for r in report["queue"]
        ]
        parts.append(reports.table(("policy", "full", "waiting", "schedule, µs", "add, µs"), rows))
    if "step" in report:
        names = [f"{name}, µs" for name in report["step"][0]["us"]]
        rows = [(r["sequences"], *map(pair, r["us"].values())) for r in report["step"]]
        parts.append(reports.table(("sequences", *names), rows))
    if "process" in report:
        rows = []
        for r in report["process"]:
            rows.append((r["server"], 0, f"{r['idle_percent']:.2f}", 0))
            if "streams" in r:
                busy = f"{r['busy_percent']:.1f}"
                rows.append((r["server"], r["streams"], busy, f"{r['steps_per_s']:.0f}"))
        parts.append(reports.table(("server", "streams", "CPU, % of a core", "steps/s"), rows))
    return "\n\n".join([*parts, "Pairs are p50 / p99."])


def _percentiles(seconds: list[float]) -> dict[str, float]:
    """Return p50 and p99 in microseconds."""
    return {f"p{p}": round(1e6 * percentile(seconds, p), 1) for p in (50, 99)}


@contextmanager
def _no_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
