"""Fuzzing: no body causes an internal error or affects later requests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from bodies import ENDPOINTS, ODD, SENTINEL, Case, cases, dump, matrix

from forge_jax.engine.fake import TEMPLATE
from forge_jax.engine.thread import Engine
from forge_jax.text import ChatTemplate
from forge_serve.config import ServerConfig
from forge_serve.server.process import bind, make_runner
from forge_serve.server.routes import ROUTES
from forge_serve.server.service import Service
from forge_serve.server.weight_sync.endpoints import WeightSyncEndpoints

pytestmark = pytest.mark.long

MAY_BE = {200, 400, 404, 413}
ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # they generate nothing
CANARY = Case(
    "/v1/completions", b'{"prompt": "the dog", "max_tokens": 9, "seed": 5, "logprobs": 2}'
)
CANARY_EACH = 100  # cases
REQUEST_TIMEOUT_S = 20.0  # a request that takes longer counts as hanging
# A path, an address, a traceback, a class, a module.
LEAK = re.compile(
    rf'/|\\|0x|Traceback|File "|<|>|{SENTINEL}|\bforge_|msgspec|aiohttp|jinja|numpy|object at'
    r"|tokenizers\b|\bjson\.|Error\b|__",
    re.IGNORECASE,
)
ENDPOINT = re.compile(r"/v1/[a-z_/]+")  # a message may name the endpoint to use instead


@dataclass
class Fuzzed:
    """A server, and the statuses seen from it."""

    engine: Engine
    http: aiohttp.ClientSession
    url: str
    statuses: Counter[int]

    async def send(self, case: Case) -> tuple[int, str, bytes]:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            async with self.http.post(self.url + case.path, data=io.BytesIO(case.body)) as response:
                return response.status, response.content_type, await response.read()

    async def check(self, case: Case) -> None:
        status, content_type, answer = await self.send(case)
        self.statuses[status] += 1
        if case.path.startswith("/v1/messages"):
            check_message(status, content_type, answer)
            return
        if case.path.startswith("/v1/responses"):
            check_response(status, content_type, answer)
            return
        expires = b'"timeout"' in case.body  # its timeout may be shorter than any request
        if expires and (status == 504 or b'"timeout_error"' in answer):
            last = answer.decode().rstrip().rpartition("data: ")[2]
            check_error(json.loads(last), "timeout_error")
            return
        assert status in MAY_BE, answer
        if status != 200:
            check_error(json.loads(answer))
        elif content_type == "text/event-stream":
            check_events(answer)
        else:
            assert content_type == "application/json"
            assert "error" not in json.loads(answer)

    async def canary(self) -> Any:
        status, _, answer = await self.send(CANARY)
        assert status == 200
        return json.loads(answer)["choices"]


def check_message(status: int, content_type: str, answer: bytes) -> None:
    """Check the error format of /v1/messages."""
    if content_type == "text/event-stream":
        *events, end = answer.decode().split("\n\n")
        assert not end and events[-1].startswith(("event: message_stop\n", "event: error\n"))
        return
    reply = json.loads(answer)
    assert (status == 200) == (reply.get("type") != "error")
    if status == 504:
        assert reply["error"]["type"] == "timeout_error"
    elif status != 200:
        assert status in MAY_BE, answer
        check_error({"error": {**reply["error"], "param": None, "code": None}}, None)


def check_response(status: int, content_type: str, answer: bytes) -> None:
    """Check the error format of /v1/responses."""
    if content_type == "text/event-stream":
        *events, end = answer.decode().split("\n\n")
        assert not end and events[-1].startswith("event: response.")
        return
    reply = json.loads(answer)
    if status == 200:
        assert reply["object"].startswith("response")
    else:
        assert status in MAY_BE | {504}, answer
        check_error(reply, "timeout_error" if status == 504 else "invalid_request_error")


def check_error(answer: Any, kind: str | None = "invalid_request_error") -> None:
    assert set(answer) == {"error"}
    error = answer["error"]
    assert set(error) - {"details"} == {"message", "type", "param", "code"}
    assert kind is None or error["type"] == kind
    assert isinstance(error["message"], str) and 0 < len(error["message"]) <= 500
    for text in (error["message"], error["param"] or "", error["code"] or ""):
        assert not LEAK.search(ENDPOINT.sub("", text)), text
    assert error["param"] is None or re.fullmatch(r"[a-z_]+[a-z_0-9.\[\]]*", error["param"])


def check_events(answer: bytes) -> None:
    *events, done, end = answer.decode().split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    for event in events:
        assert "error" not in json.loads(event.removeprefix("data: "))


@contextlib.asynccontextmanager
async def fuzzed() -> AsyncIterator[Fuzzed]:
    service = Service(ServerConfig(request_log=False, served_model_name="m"))
    service.engine = engine = Engine.fake(max_model_len=160)
    engine.chat_template = ChatTemplate(TEMPLATE + "{% if tools %}<tool_call>{% endif %}")
    engine.start()
    runner, sock = make_runner(service, last_bytes_s=0.1), bind("127.0.0.1", 0)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    try:
        async with aiohttp.ClientSession() as http:
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            yield Fuzzed(engine, http, url, Counter())
    finally:
        await runner.cleanup()
        await engine.stop()


async def run(seed: int, number: int) -> Counter[int]:
    """Send this many cases one after the other; return the number of answers by status."""
    async with fuzzed() as server:
        first = await server.canary()
        steps = server.engine.stats().steps
        for i, case in enumerate(cases(seed, number)):
            try:
                await server.check(case)
            except Exception as error:
                error.add_note(f"case {i} of seed {seed}: POST {case.path} {case.body[:2000]!r}")
                raise
            if i % CANARY_EACH == 0:
                assert await server.canary() == first, f"since case {i} of seed {seed}"
                before, steps = steps, server.engine.stats().steps
                assert steps > before, "the engine steps no more"
        async with asyncio.timeout(10):
            while (stats := server.engine.stats()).num_used_blocks or stats.num_waiting:
                await asyncio.sleep(0.01)
        assert stats.healthy and stats.num_running == 0
        return server.statuses


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_bodies_of_all_kinds_are_served_or_rejected():
    statuses = await run(seed=1, number=1_500)
    assert statuses[200] > 150 and statuses[400] > 800, "it has tried both"


@pytest.mark.fuzz
async def test_many_more_bodies_are_served_or_rejected(request):
    number, seed = (request.config.getoption(f"--fuzz-{name}") for name in ("cases", "seed"))
    number = max(number, 2 * len(matrix()))  # every field is tried with every value
    statuses = await run(seed, number)
    print(f"\n{number} bodies of seed {seed}; statuses: {dict(statuses)}")
    assert statuses[200] > number / 20 and statuses[400] > number / 3, "it has tried both"


def test_every_endpoint_with_a_body_is_fuzzed():
    tried = {*ENDPOINTS, *ADAPTERS}
    assert tried <= {path for route in ROUTES for path in route.paths}
    without = {"cancel_response", "start_profile", "stop_profile", "ping"}
    without |= {route.handler for route in WeightSyncEndpoints.ROUTES}  # off; see test_weight_sync
    others = {"invocations"}  # their bodies are those of other endpoints
    for route in ROUTES:
        if route.method == "POST" and route.handler not in without | others:
            assert tried & set(route.paths), route.handler


async def test_malformed_adapter_requests_are_rejected():
    bodies = ["", "[]", "null", "{", '{"lora_name": "a"}', "é" * 9]
    for odd in ODD:
        bodies += [
            dump({"lora_name": odd, "lora_path": "a"}),
            dump({"lora_name": "a", "lora_path": odd}),
            dump({"lora_name": "a", "lora_path": "b", "load_inplace": odd, "lora_int_id": odd}),
        ]
    async with fuzzed() as server:
        first = await server.canary()
        for path in ADAPTERS:
            for body in bodies:
                status, _, answer = await server.send(Case(path, body.encode()))
                assert status in MAY_BE - {200}, (path, body)
                check_error(json.loads(answer), kind=None)
        assert await server.canary() == first


@pytest.mark.parametrize(
    "message",
    [
        "cannot open /etc/passwd", f"no {SENTINEL}", "<class 'int'>", "at 0x7f00", "KeyError: 'a'",
        "forge_jax.engine.core", "msgspec.ValidationError", "Traceback (most recent call last)",
    ],
)  # fmt: skip
def test_error_checker_detects_leaked_internals(message):
    good = {"message": "n must be 1", "type": "invalid_request_error", "param": "n", "code": None}
    check_error({"error": good})
    with pytest.raises(AssertionError):
        check_error({"error": {**good, "message": message}})
