"""Measure the HTTP front end: requests/s and separate events/s on a fake device.

    python -m benchmarks.front_end [--seconds 5] [--only NAME] [--output FILE.json]

The fake device costs next to nothing, so the server is measured: HTTP, protocol, tokenizer,
scheduler, detokenizer, events and sockets. The load generator (`epoll_client`) runs on the same
machine, and its CPU time is reported.

A separate event is one `data: {...}` with one token of one choice. Events with several tokens are
reported as merged. A request with T tokens and E events has at most T - E of them, and this maximum
is reported.

Every hundredth answer is compared with the same request's unstreamed answer. If one differs, the
exit code is 1.
"""

from __future__ import annotations

import json
import os
import random
import string
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report as reports
from benchmarks.epoll_client import (
    Body,
    Tally,
    check_stream,
    check_whole,
    drive,
    http_request,
    text_and_tokens,
)
from benchmarks.report import number
from benchmarks.serving_process import serving

PROMPT_TOKENS = 32
CHAT_MARKS = 18  # tokens that the fake chat template adds around a user's message
NUM_BODIES = 64
WARM_UP_S = 1.0
SAMPLE_EVERY = 100
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    pid: int


@dataclass(frozen=True, kw_only=True)
class Scenario:
    path: str
    stream: bool
    concurrency: int
    tokens: int = 32
    step_ms: float = 0.0  # 0: the device returns at once

    @property
    def name(self) -> str:
        kind = "chat" if self.path == CHAT else "completions"
        pace = f" every {self.step_ms:g} ms" if self.step_ms else ""
        return f"{kind}, {'stream' if self.stream else 'whole'}, {self.concurrency} at once{pace}"


REQUESTS = [
    Scenario(path=path, stream=stream, concurrency=concurrency)
    for path in (CHAT, COMPLETIONS)
    for stream in (False, True)
    for concurrency in (16, 64, 256)
]
EVENTS = [
    Scenario(path=COMPLETIONS, stream=True, concurrency=128, tokens=256),
    Scenario(path=COMPLETIONS, stream=True, concurrency=256, tokens=256),
    Scenario(path=CHAT, stream=True, concurrency=256, tokens=256),
    Scenario(path=COMPLETIONS, stream=True, concurrency=128, tokens=256, step_ms=5),
    Scenario(path=COMPLETIONS, stream=True, concurrency=256, tokens=256, step_ms=5),
    Scenario(path=COMPLETIONS, stream=True, concurrency=256, tokens=256, step_ms=4),
    Scenario(path=CHAT, stream=True, concurrency=256, tokens=256, step_ms=4),
    Scenario(path=COMPLETIONS, stream=True, concurrency=256, tokens=256, step_ms=3),
]


def main() -> int:
    parser = reports.parser("front_end", "Measure the HTTP front end on a fake device.")
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="seconds of load per scenario (default 5)"
    )
    parser.add_argument("--only", default="", help="run only scenarios whose name contains NAME")
    args = parser.parse_args()

    scenarios = [s for s in REQUESTS + EVENTS if args.only in s.name]
    if not scenarios:
        parser.error(f"--only {args.only!r}: no scenario name contains this")
    return reports.publish("front_end", args, lambda: measure_all(scenarios, args.seconds), table)


def measure_all(scenarios: Sequence[Scenario], seconds: float) -> dict[str, Any]:
    rows = []
    for step_ms in dict.fromkeys(scenario.step_ms for scenario in scenarios):
        with fake_server(step_ms) as server:
            for scenario in scenarios:
                if scenario.step_ms == step_ms:
                    rows.append(measure(server, scenario, seconds))
                    reports.progress(progress(rows[-1]))
    return {"seconds_each": seconds, "scenarios": rows}


@contextmanager
def fake_server(step_ms: float) -> Iterator[Server]:
    flags = ["--fake", "--fake-step-time-ms", str(step_ms), "--max-num-seqs", "256"]
    with serving([*flags, "--no-request-log"]) as (url, _):
        (pid,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        yield Server(url=url, pid=int(pid))


def measure(server: Server, scenario: Scenario, seconds: float) -> dict[str, Any]:
    bodies = make_bodies(server.url, scenario)
    url = urllib.parse.urlsplit(server.url)
    assert url.hostname is not None and url.port is not None
    cpu: list[CpuTimes] = []
    tally = drive(
        (url.hostname, url.port),
        bodies,
        streams=scenario.stream,
        concurrency=scenario.concurrency,
        warm_up_s=WARM_UP_S,
        load_s=seconds,
        sample_every=SAMPLE_EVERY,
        on_window=lambda: cpu.append(CpuTimes.now(server.pid)),
    )
    check = check_stream if scenario.stream else check_whole
    for body, answer in tally.samples:
        check(body, answer)
    wait_until_idle(server.url)
    begin, end = cpu
    return {**figures(scenario, tally), **cpu_figures(server.pid, begin, end, tally)}


def make_bodies(url: str, scenario: Scenario) -> list[Body]:
    """Return seeded requests with 32 prompt tokens, each with its expected text."""
    rng = random.Random(0)
    asked = []
    for seed in range(NUM_BODIES):
        chat = scenario.path == CHAT
        letters = PROMPT_TOKENS - CHAT_MARKS * chat  # one token each to the fake tokenizer
        text = "".join(rng.choices(string.ascii_lowercase + " ", k=letters))
        prompt = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
        limits = {"max_tokens": scenario.tokens, "ignore_eos": True}
        asked.append({**prompt, **limits, "seed": seed})
    with ThreadPoolExecutor(NUM_BODIES) as pool:
        answers = list(pool.map(lambda body: _post(url + scenario.path, body), asked))
    bodies = []
    for body, answer in zip(asked, answers, strict=True):
        text, tokens = text_and_tokens(answer)
        assert answer["usage"]["prompt_tokens"] == PROMPT_TOKENS, answer["usage"]
        assert tokens == scenario.tokens, answer["usage"]
        request = http_request(scenario.path, {**body, "stream": scenario.stream})
        bodies.append(Body(request=request, text=text, tokens=tokens))
    return bodies


def figures(scenario: Scenario, tally: Tally) -> dict[str, Any]:
    wall_s, complete = tally.wall_s, len(tally.latencies_s)
    extra = 1 if scenario.path == CHAT and scenario.stream else 0  # the event with the role
    events = tally.events - extra * tally.begun
    merged = 0
    if scenario.stream:
        merged = tally.complete_tokens - (tally.complete_events - extra * complete)
    ms = [1e3 * latency_s for latency_s in tally.latencies_s]
    return {
        "name": scenario.name,
        "path": scenario.path,
        "stream": scenario.stream,
        "concurrency": scenario.concurrency,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": scenario.tokens,
        "step_ms": scenario.step_ms,
        "requests_per_s": complete / wall_s,
        "separate_events_per_s": (events - merged) / wall_s,
        "merged_events_per_s": merged / wall_s,
        "events_per_read": events / tally.reads if events else 0.0,
        "latency_ms": {p: float(np.percentile(ms, p)) for p in (50, 99)} if ms else {},
        "checked_answers": len(tally.samples),
        "wall_s": wall_s,
        "client_cpu_s": tally.cpu_s,
        "requests": complete,
        "events": events,
    }


def cpu_figures(pid: int, begin: CpuTimes, end: CpuTimes, tally: Tally) -> dict[str, Any]:
    """Return the CPU seconds of the server's threads.

    The event loop is the main thread, and the engine the busiest other one. Threads that start or
    end meanwhile are not counted; none does under load.
    """
    spent = {
        thread: tuple(b - a for a, b in zip(begin.threads_s[thread], times, strict=True))
        for thread, times in end.threads_s.items()
        if thread in begin.threads_s
    }
    total_s = sum(sum(times) for times in spent.values())
    loop_user_s, loop_system_s = spent.pop(pid)
    return {
        "server_cpu_s": total_s,
        "loop_user_cpu_s": loop_user_s,
        "loop_system_cpu_s": loop_system_s,
        "engine_cpu_s": max((sum(times) for times in spent.values()), default=0.0),
        "other_processes_cpu_s": max(0.0, end.machine_s - begin.machine_s - total_s - tally.cpu_s),
        "server_us_per_request": 1e6 * total_s / max(len(tally.latencies_s), 1),
        "client_us_per_request": 1e6 * tally.cpu_s / max(len(tally.latencies_s), 1),
        "server_us_per_event": 1e6 * total_s / tally.events if tally.events else None,
        "client_us_per_event": 1e6 * tally.cpu_s / tally.events if tally.events else None,
    }


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    threads_s: dict[int, tuple[float, float]]  # (user, system) of each thread of the server
    machine_s: float  # busy time of all cores of the machine

    @classmethod
    def now(cls, pid: int) -> CpuTimes:
        threads_s = {}
        for task in Path(f"/proc/{pid}/task").iterdir():
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            times_s = int(fields[11]) / TICKS_PER_S, int(fields[12]) / TICKS_PER_S
            threads_s[int(task.name)] = times_s
        user, nice, system, _, _, irq, soft_irq = map(
            int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
        )
        machine_s = (user + nice + system + irq + soft_irq) / TICKS_PER_S
        return cls(threads_s=threads_s, machine_s=machine_s)


def wait_until_idle(url: str) -> None:
    """Wait until the requests left from the last scenario are aborted."""
    while True:
        with urllib.request.urlopen(f"{url}/stats", timeout=30) as response:
            stats = json.load(response)
        if not (stats["num_used_blocks"] or stats["num_waiting"]):
            return
        time.sleep(0.05)


def progress(row: dict[str, Any]) -> str:
    per_event = row["server_us_per_event"]
    return (
        f"{row['name']}: {row['requests_per_s']:,.0f} requests/s, "
        f"{row['separate_events_per_s']:,.0f} separate events/s "
        f"(+ {row['merged_events_per_s']:,.0f} merged), {row['events_per_read']:.2f} per read, "
        f"server {row['server_cpu_s'] / row['wall_s']:.2f} cores "
        f"(loop {row['loop_user_cpu_s'] / row['wall_s']:.2f} user "
        f"{row['loop_system_cpu_s'] / row['wall_s']:.2f} system, "
        f"engine {row['engine_cpu_s'] / row['wall_s']:.2f}), "
        f"client {row['client_cpu_s'] / row['wall_s']:.2f}, "
        f"others {row['other_processes_cpu_s'] / row['wall_s']:.2f}, "
        f"server {row['server_us_per_request']:.0f} us per request"
        + (f", {per_event:.1f} us per event" if per_event else "")
    )


def table(report: dict[str, Any]) -> str:
    header = (
        "load", "tokens out", "requests/s", "separate events/s", "merged/s", "events per read",
        "latency p50 / p99, ms", "server us per request", "us per event", "client us per request",
        "us per event", "cores: server / client / others",
    )  # fmt: skip
    rows = []
    for row in report["scenarios"]:

        def events(name: str, digits: int, row: dict[str, Any] = row) -> str:
            return number(row[name] if row["stream"] else None, digits)

        rows.append(
            (
                row["name"],
                row["output_tokens"],
                number(row["requests_per_s"]),
                events("separate_events_per_s", 0),
                events("merged_events_per_s", 0),
                events("events_per_read", 2),
                " / ".join(map(number, row["latency_ms"].values())) or "-",
                number(row["server_us_per_request"]),
                events("server_us_per_event", 1),
                number(row["client_us_per_request"]),
                events("client_us_per_event", 1),
                " / ".join(
                    number(row[f"{who}_cpu_s"] / row["wall_s"], 2)
                    for who in ("server", "client", "other_processes")
                ),
            )
        )
    return (
        f"{report['date']}, {reports.cpu(report)}, {report['cores']} cores shared with the load "
        f"generator, Python {report['python']}, {PROMPT_TOKENS} tokens in\n\n"
        f"{reports.table(header, rows)}"
    )


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
