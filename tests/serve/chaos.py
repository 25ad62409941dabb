"""A chaos test: kills a real server's engine at random moments and compares every streamed byte.

One task per request sends it again and again, and compares each answer with that of the undisturbed
server. Another task polls /health and compares it with the existing processes. A seed determines
the killer's plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

STREAMS = 32
WAIT_S = 240.0  # after which a missing event is a failure
POLL_S = 0.02
SERVES = ("serving", "ready")
STATES = {*SERVES, "recovering", "stalled"}
MAX_BIRTHS = 3  # consecutive deaths; the server gives up at the fifth
TOKENS = 300  # a new engine's tokens, after which each request has had some and is no suspect

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["dog", "cat", "bird"]},
        "words": {"type": "array", "items": {"enum": ["a", "bc", "def"]}, "maxItems": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["animal", "words", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "note"}}


def request(i: int, max_tokens: int, *, tools: bool) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of one of the streams.

    Args:
      tools: False if the chat template does not support tools.
    """
    story = f"Once upon a time, number {i}, " * (1 + i % 5)
    body: dict[str, Any] = {
        "max_tokens": max_tokens + 3 * i,
        "temperature": 0.0 if i % 3 == 0 else 0.9,
        "seed": i,
        "ignore_eos": True,
        "stream": i % 4 != 3,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    completion, chat = {"prompt": story}, {"messages": [{"role": "user", "content": story}]}
    more: list[tuple[str, dict[str, Any]]] = [
        ("completions", completion),
        ("chat/completions", {**chat, "logprobs": True, "top_logprobs": 2}),
        ("completions", {**completion, "n": 2, "temperature": 1.0, "logprobs": 2}),
        (
            "chat/completions",
            {**chat, "structured_outputs": {"regex": "([a-z]{3,5} ){9}"}},
        ),
        (
            "chat/completions",
            {
                **chat,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "note", "schema": SCHEMA},
                },
                "ignore_eos": False,
            },
        ),
        ("completions", {**completion, "stop": ["zq", "the dog"], "logprobs": 0}),
        ("chat/completions", {**chat, "n": 2, "top_p": 0.9, "frequency_penalty": 0.5}),
        ("completions", {**completion, "echo": True, "logprobs": 1, "top_k": 20, "min_tokens": 9}),
    ]
    if tools:
        offer = {"tools": [TOOL], "tool_choice": NAMED, "ignore_eos": False}
        more.append(("chat/completions", {**chat, **offer}))
    path, special = more[(i // 4 + i) % len(more)]
    return f"/v1/{path}", {**body, **special}


def told(data: bytes, *, stream: bool) -> dict[str, Any]:
    """Return the content of an answer for any split into events, without ids, times and hits."""
    if not stream:
        parts = [json.loads(data)]
    else:
        events = data.decode().removesuffix("\n\n").split("\n\n")
        events = [event for event in events if not event.startswith(":")]  # no keep-alives
        assert events[-1] == "data: [DONE]", events[-1]
        parts = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    said: dict[str, Any] = {}
    for part in parts:
        assert "error" not in part, part
        if part.get("usage") is not None:
            usage = part["usage"]
            said["usage"] = {name: usage[name] for name in ("prompt_tokens", "completion_tokens")}
        said["system_fingerprint"] = part.get("system_fingerprint")
        for choice in part["choices"]:
            _add(said.setdefault(f"choice {choice['index']}", {}), choice)
    return said


def _add(said: dict[str, Any], choice: dict[str, Any]) -> None:
    message = choice.get("delta") or choice.get("message") or {}
    texts = [choice.get("text"), message.get("content"), message.get("reasoning_content")]
    for name, text in zip(("text", "content", "reasoning"), texts, strict=True):
        if text is not None:
            said[name] = said.get(name, "") + text
    for position, call in enumerate(message.get("tool_calls") or ()):
        function, name = call["function"], f"call {call.get('index', position)}"
        told_before = said.setdefault(name, {"name": "", "arguments": ""})
        told_before["name"] += function.get("name") or ""
        told_before["arguments"] += function.get("arguments") or ""
    for name, values in (choice.get("logprobs") or {}).items():
        if name != "text_offset":
            said.setdefault(f"logprobs {name}", []).extend(values or [])
    for name in ("finish_reason", "stop_reason"):
        if choice.get(name) is not None:
            said[name] = choice[name]


@dataclass
class Report:
    """The results of a run."""

    seed: int
    deaths: Counter[str] = field(default_factory=Counter)  # by the moment
    compared: int = 0  # answers
    polls: Counter[str] = field(default_factory=Counter)  # polls of /health, by state
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"seed {self.seed} (--chaos-seed): {self.compared} answers compared over "
            f"{self.deaths.total()} deaths {dict(self.deaths)}, /health {dict(self.polls)}; "
            f"faults: {self.faults[:5] or 'none'}"
        )


class Chaos:
    """One run on a running server.

    Args:
      plan: The deaths by their moment: "decode", "prefill", "birth", "loading", "compiling", and
        "frozen" or "frozen birth" for processes that are stopped instead of killed.
      cache: The server's folder of executables, which is emptied before "compiling".
      loading_s: The longest time from the start of a process to its death for "loading".
      tools: True if some requests offer tools.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        pid: int,
        *,
        seed: int,
        plan: Sequence[str],
        max_tokens: int = 60,
        cache: Path | None = None,
        loading_s: float = 1.0,
        tools: bool = False,
    ):
        self.report = Report(seed)
        self._http, self._url = http, url
        self._server = psutil.Process(pid)
        self._known: set[int] = set()  # engine processes
        self._rng = random.Random(seed)
        self._plan = list(plan)
        self._rng.shuffle(self._plan)
        self._requests = [request(i, max_tokens, tools=tools) for i in range(STREAMS)]
        self._cache, self._loading_s = cache, loading_s
        self._num_executables = len(self._compiled())
        assert self._num_executables > 1 or "compiling" not in plan
        self._answered: set[int] = set()  # requests, since the last death
        self._over = False

    async def run(self) -> Report:
        expected = await asyncio.gather(*(self._ask(i) for i in range(STREAMS)))
        for (_, body), said in zip(self._requests, expected, strict=True):
            assert len(str(said)) > 100 and ("tools" not in body or "'name': 'note'" in str(said))
        async with asyncio.TaskGroup() as tasks:
            for i, said in enumerate(expected):
                tasks.create_task(self._compare(i, said))
            tasks.create_task(self._watch_health())
            try:
                await self._kill_all()
            finally:
                self._over = True
        if (await self._health())[0] != 200:
            self.report.faults.append("/health is not 200 at the end")
        return self.report

    # ---- streams -------------------------------------------------------------------------------

    async def _ask(self, i: int) -> dict[str, Any]:
        path, body = self._requests[i]
        async with self._http.post(self._url + path, json=body) as response:
            data = await response.read()
            assert response.status == 200, data
        return told(data, stream=body["stream"])

    async def _compare(self, i: int, expected: dict[str, Any]) -> None:
        while not self._over:
            try:
                said = await self._ask(i)
            except (AssertionError, aiohttp.ClientError, ValueError, KeyError) as error:
                self.report.faults.append(f"request {i} failed: {error!r}")
                await asyncio.sleep(POLL_S)
                continue
            self.report.compared += 1
            self._answered.add(i)
            if said != expected:
                parts = [f"{k}: {said.get(k)} not {v}" for k, v in expected.items()]
                self.report.faults.append(f"request {i} differs: {parts}"[:600])

    # ---- health --------------------------------------------------------------------------------

    async def _health(self) -> tuple[int, str]:
        async with self._http.get(self._url + "/health") as response:
            return response.status, (await response.json())["status"]

    async def _watch_health(self) -> None:
        lies = 0
        while not self._over:
            before = self._workers()
            status, state = await self._health()
            self.report.polls[state] += 1
            if state not in STATES or (status == 200) != (state in SERVES):
                self.report.faults.append(f"/health says {status} {state}")
            # At the moment of a death the server may not have noticed it.
            serves_by_nobody = state in SERVES and not before and not self._workers()
            lies = lies + 1 if serves_by_nobody else 0
            if lies == 2:
                self.report.faults.append(f"/health says {state}, and there is no engine process")
            await asyncio.sleep(POLL_S)

    # ---- deaths --------------------------------------------------------------------------------

    def _workers(self) -> list[int]:
        """Return the server's engine processes that are alive or frozen.

        A killed process lives until its last thread has ended. The connection stays open until
        then. On a busy machine this may outlast the command line of the process.
        """
        found = []
        for child in self._server.children():
            with contextlib.suppress(psutil.Error):  # it just ended
                if "forge_jax.engine.process.worker" in child.cmdline():
                    self._known.add(child.pid)
            if child.pid in self._known and _has_threads(child.pid):
                found.append(child.pid)
        return found

    async def _kill_all(self) -> None:
        births = [moment for moment in self._plan if moment in BIRTHS]
        serving = [moment for moment in self._plan if moment not in BIRTHS]
        while serving or births:
            await self._until(self._serves, "a server that serves")
            first = serving.pop() if serving else "decode"
            victims = births[:MAX_BIRTHS] if not serving else births[: self._rng.randint(0, 2)]
            del births[: len(victims)]
            pid = None
            for moment, successor in itertools.zip_longest([first, *victims], victims):
                pid = await self._victim(moment, pid)
                if successor == "compiling":
                    _signal(pid, signal.SIGSTOP)  # so that it writes no more entries
                    for path in [*self._compiled(), *self._saved()]:
                        path.unlink()
                if moment == "compiling" and len(self._compiled()) == self._num_executables:
                    births.append(moment)  # it was faster: try once more
                    moment = "loading"
                await self._end(pid, moment)
        await self._until(self._serves, "a server that serves at the end")
        self._answered.clear()
        await self._until(lambda: len(self._answered) == STREAMS, "an answer to each request")

    async def _victim(self, moment: str, last: int | None) -> int:
        """Wait for the moment and return the process to kill, which differs from the last one."""
        if moment not in BIRTHS:
            if moment != "prefill":
                await self._until(self._has_tokens, "tokens of each request")
            await asyncio.sleep(self._rng.uniform(0.0, 0.3))
        found: list[int] = []

        def living() -> bool:
            found[:] = [pid for pid in self._workers() if pid != last]
            return bool(found)

        await self._until(living, "an engine process")
        if moment == "compiling":
            count = self._rng.randrange(1, self._num_executables)
            await self._until(lambda: len(self._compiled()) >= count, "executables")
        elif moment in BIRTHS:
            longest_s = 0.2 if moment == "birth" else self._loading_s
            await asyncio.sleep(self._rng.uniform(0.0, longest_s))
        return found[0]

    async def _end(self, pid: int, moment: str) -> None:
        if moment in ("frozen", "frozen birth"):
            await self._freeze(pid)
        else:
            _signal(pid, signal.SIGKILL)
        self.report.deaths[moment] += 1
        await self._until(self._recovers, "recovering")

    def _compiled(self) -> list[Path]:
        return [] if self._cache is None else list(self._cache.glob("*-cache"))

    def _saved(self) -> list[Path]:
        return [] if self._cache is None else list(self._cache.glob("saved/*/*"))

    async def _freeze(self, pid: int) -> None:
        """Stop a process; the server kills it."""
        serves = self._serves
        was_serving = await serves()
        _signal(pid, signal.SIGSTOP)
        if was_serving:
            await self._until(lambda: self._says("stalled"), "stalled")
        await self._until(lambda: pid not in self._workers(), "the end of what is frozen")

    async def _serves(self) -> bool:
        return (await self._health())[0] == 200

    async def _recovers(self) -> bool:
        return await self._says("recovering")

    async def _says(self, state: str) -> bool:
        return (await self._health())[1] == state

    async def _has_tokens(self) -> bool:
        async with self._http.get(self._url + "/stats") as response:
            stats = await response.json()
        return stats["state"] in SERVES and stats["generation_tokens"] > TOKENS

    async def _until(self, condition: Callable[[], Any], what: str) -> None:
        end_s = time.monotonic() + WAIT_S
        while True:
            holds = condition()
            if await holds if asyncio.iscoroutine(holds) else holds:
                return
            assert time.monotonic() < end_s, f"never: {what}; {self.report}"
            await asyncio.sleep(POLL_S)


BIRTHS = ("birth", "loading", "compiling", "frozen birth")


def _has_threads(pid: int) -> bool:
    """Return True if any thread of a process has not ended."""
    states = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                states.append(stat.read_text().rpartition(")")[2].split()[0])
    return any(state not in "ZX" for state in states)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


async def chaos(url: str, server: subprocess.Popen[str], **options: Any) -> Report:
    """Run `Chaos` on the server that `tests.server_process` has started."""
    timeout = aiohttp.ClientTimeout()  # no timeout, because a busy machine's delay is no fault
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        return await Chaos(http, url, server.pid, **options).run()
