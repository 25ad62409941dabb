"""Two servers behind the cache-aware router `smg`.

The flags are those of docs/operations.md.
"""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, START_S, Server, serving

from tests.server_process import running

SMG = Path(sys.executable).with_name("smg")
OPERATIONS = ROOT / "docs/operations.md"
TOPICS = [
    "dragons and the knights of the round table",
    "how to bake bread with little salt and much patience",
    "the history of the railways in the north",
    "a cat that slept on the window sill all day",
]


def flags_in_the_documents() -> list[str]:
    """Return the flags of `smg launch` in docs/operations.md, without workers and ports."""
    block = re.search(r"\n *(smg launch(?:[^\n]*\\\n)*[^\n]*)", OPERATIONS.read_text())
    assert block is not None
    words = shlex.split(block[1].replace("\\\n", " "))[2:]
    kept: list[str] = []
    for flag in ("--policy", "--health-check-interval-secs", "--health-failure-threshold"):
        at = words.index(flag)
        kept += words[at : at + 2]
    return [*kept, *(word for word in words if word.startswith("--disable"))]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def routing(*workers: Server) -> Iterator[Server]:
    port = free_port()
    command = [str(SMG), "launch", "--host", "127.0.0.1", "--port", str(port),
               "--prometheus-port", str(free_port()), "--log-level", "error",
               "--worker-urls", *(worker.url for worker in workers),
               *flags_in_the_documents()]  # fmt: skip
    router = Server(url=f"http://127.0.0.1:{port}", model=workers[0].model)
    with running(command, stderr=subprocess.DEVNULL):
        until(lambda: ready(router, len(workers)))
        yield router


def until(condition) -> None:
    end_s = time.monotonic() + START_S
    while not condition():
        assert time.monotonic() < end_s, "that never happens"
        time.sleep(0.1)


def ready(router: Server, number: int) -> bool:
    try:
        workers = router.get("/workers")["workers"]
    except (urllib.error.URLError, ConnectionError):
        return False
    return sum(worker["is_healthy"] for worker in workers) == number


def requests_of(server: Server) -> float:
    with urllib.request.urlopen(server.url + "/metrics") as response:
        text = response.read().decode()
    return sum(map(float, re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", text, re.M)))


def ask(router: Server, topic: str, question: int) -> dict:
    prompt = f"Tell me about {topic}. " * 12 + f"Question {question}."
    body = {"model": router.model, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    return router.post("/v1/completions", body)


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    with ExitStack() as stack:
        first, second = (stack.enter_context(serving(request, "--fake")) for _ in range(2))
        yield first, second


def test_router_sends_equal_prefixes_to_one_server(servers):
    went: dict[str, set[int]] = {topic: set() for topic in TOPICS}
    with routing(*servers) as router:
        for question in range(4):
            for topic in TOPICS:
                before = [requests_of(server) for server in servers]
                answer = ask(router, topic, question)
                after = [requests_of(server) for server in servers]
                (where,) = (i for i in range(2) if after[i] > before[i])
                went[topic].add(where)
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert (cached > answer["usage"]["prompt_tokens"] / 2) is (question > 0)
    assert all(len(places) == 1 for places in went.values())
    assert set.union(*went.values()) == {0, 1}, "both have something to do"


def test_router_moves_requests_away_from_a_dead_server(servers):
    with routing(*servers) as router:
        for topic in TOPICS:
            ask(router, topic, 0)
        assert all(requests_of(server) for server in servers)
        servers[0].process.send_signal(signal.SIGKILL)
        for topic in TOPICS:  # at once, before the router checks it again
            assert len(ask(router, topic, 1)["choices"]) == 1
        until(lambda: ready(router, 1))
        for topic in TOPICS:
            assert len(ask(router, topic, 2)["choices"]) == 1


def test_router_passes_streams_through(servers):
    with routing(*servers) as router:
        body = {"model": router.model, "prompt": "a", "max_tokens": 5, "stream": True}
        events = router.lines("/v1/completions", body)
        assert events[-1] == "data: [DONE]" and len(events) > 2
