"""GET /v1/responses: the same protocol over a WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestClient, TestServer
from openai.types.responses.responses_server_event import ResponseWsError
from prometheus_client.parser import text_string_to_metric_families

from forge_jax.engine.streams import QueueLimits
from forge_jax.engine.thread import Engine
from forge_jax.sampling_params import SamplingParams
from forge_jax.telemetry.log import JsonFormatter
from forge_jax.testing import core_of
from forge_serve.config import ServerConfig
from forge_serve.http.timeouts import Timeouts
from forge_serve.limits import Limits
from forge_serve.responses_api import websocket as responses_websocket
from forge_serve.responses_api.store import MAX_LOCAL
from forge_serve.responses_api.websocket import MAX_WAITING, text_frame
from forge_serve.server.process import drain
from tests.serve import families, open_responses
from tests.serve.conftest import Server, scripted_engine

PATH = "/v1/responses"
LAST = frozenset(("response.completed", "response.incomplete", "response.failed", "error"))
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
SMALL = ServerConfig(limits=Limits(body_bytes=4096))
Event = dict[str, Any]


class Socket:
    """A client that checks each event it gets."""

    def __init__(self, raw: aiohttp.ClientWebSocketResponse):
        self.raw = raw

    async def send(self, message: Any) -> None:
        await self.raw.send_str(message if isinstance(message, str) else json.dumps(message))

    async def event(self) -> Event:
        message = await self.raw.receive(timeout=30)
        assert message.type == WSMsgType.TEXT, message
        event = json.loads(message.data)
        open_responses.check_socket_event(event)
        return event

    async def events(self) -> list[Event]:
        """Return the events of one response, or the error instead."""
        found = [await self.event()]
        while found[-1]["type"] not in LAST:
            found.append(await self.event())
        if found[0]["type"] != "error":
            assert [event["sequence_number"] for event in found] == list(range(len(found)))
            assert [event["type"] for event in found[:2]] == [
                "response.created",
                "response.in_progress",
            ]
        return found

    async def ask(self, **more: Any) -> Event:
        """Return the last event of the answer to a message."""
        await self.send(create(**more))
        return (await self.events())[-1]

    async def response(self, **more: Any) -> dict[str, Any]:
        event = await self.ask(**more)
        assert event["type"] == "response.completed", event
        return event["response"]

    async def error(self, **more: Any) -> dict[str, Any]:
        event = await self.ask(**more)
        assert event["type"] == "error", event
        return {**event["error"], "status": event["status"]}

    async def closed(self) -> int | None:
        """Return the server's close code; no message may come before."""
        message = await self.raw.receive(timeout=30)
        assert message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED), message
        return self.raw.close_code


@contextlib.asynccontextmanager
async def connected(server: Server, **options: Any) -> AsyncIterator[Socket]:
    async with server.http.ws_connect(server.url + PATH, **options) as raw:
        yield Socket(raw)


async def forgotten(server: Server) -> None:
    """Wait until no connection is open and nothing is kept."""
    async with asyncio.timeout(10):
        while server.service.sockets or server.service.responses.num_bytes:
            await asyncio.sleep(0.001)


def create(**more: Any) -> dict[str, Any]:
    return {"type": "response.create", "model": "forge-fake", "input": "Hi", **more}


@pytest.fixture
async def server(start) -> Server:
    return await start(scripted_engine("It is sunny.", template=families.HERMES))


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


# ---- the tests of Open Responses
# -------------------------------------------------------------------


async def test_websocket_response_has_the_events_of_a_stream(server):
    async with connected(server) as socket:
        await socket.send(create(stream_id=None))
        events = await socket.events()
    data = {"model": server.model, "input": "Hi", "stream": True}
    async with server.http.post(server.url + PATH, json=data) as response:
        lines = (await response.text()).splitlines()
    streamed = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["type"] for event in events] == [event["type"] for event in streamed]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert "".join(deltas) == text_of(events[-1]["response"]) == "It is sunny."


async def test_responses_follow_each_other(server):
    async with connected(server) as socket:
        first = await socket.response(store=False, input="one")
        second = await socket.response(store=False, input="two")
    assert first["id"] != second["id"] and not first["store"]


async def test_unstored_response_is_continued_on_its_connection(server):
    async with connected(server) as socket:
        first = await socket.response(store=False, input="My name is Alice.")
        second = await socket.response(store=False, previous_response_id=first["id"], input="Who?")
        third = await socket.response(store=False, previous_response_id=second["id"], input="And?")
        assert third["previous_response_id"] == second["id"]
        lengths = [response["usage"]["input_tokens"] for response in (first, second, third)]
        assert lengths == sorted(set(lengths)), "each has what came before it"
        branch = await socket.response(store=False, previous_response_id=first["id"], input="Who?")
        assert branch["usage"]["input_tokens"] == second["usage"]["input_tokens"]


async def test_unstored_response_is_neither_listed_nor_continued_elsewhere(server):
    async with connected(server) as socket, connected(server) as other:
        first = await socket.response(store=False)
        assert (await server.get(f"{PATH}/{first['id']}"))[0] == 404
        body = {"input": "?", "previous_response_id": first["id"]}
        assert (await server.post(PATH, body))[0] == 404
        error = await other.error(store=False, previous_response_id=first["id"])
        assert (error["status"], error["code"]) == (400, "previous_response_not_found")
        await socket.response(store=False, previous_response_id=first["id"])


async def test_only_stored_responses_are_continued_after_a_reconnect(server):
    async with connected(server) as socket:
        lost = await socket.response(store=False)
        kept = await socket.response()
    async with connected(server) as socket:
        error = await socket.error(store=False, previous_response_id=lost["id"])
        assert error["code"] == "previous_response_not_found"
        assert error["param"] == "previous_response_id"
        assert (await socket.response(input="recovered"))["previous_response_id"] is None
        await socket.response(store=False, previous_response_id=kept["id"])
    assert server.service.responses.num_responses == 2


async def test_unknown_response_is_not_continued(server):
    async with connected(server) as socket:
        error = await socket.error(store=False, previous_response_id="resp_missing")
        assert (error["status"], error["code"]) == (400, "previous_response_not_found")
        assert "send the whole input" in error["message"]


@pytest.mark.parametrize(
    "fault",
    [
        {"input": [{"type": "function_call_output", "call_id": "call_missing", "output": "x"}]},
        {"temperature": -1},
        {"temperature": "hot"},
        {"input": "x" * 10_000},
    ],
    ids=["no such call", "out of range", "wrong type", "too long"],
)
async def test_failed_continuation_drops_its_unstored_predecessor(server, fault):
    async with connected(server) as socket:
        first = await socket.response(store=False)
        error = await socket.error(store=False, previous_response_id=first["id"], **fault)
        assert error["status"] == 400 and error["code"] != "previous_response_not_found"
        error = await socket.error(store=False, previous_response_id=first["id"])
        assert error["code"] == "previous_response_not_found"
    assert server.service.responses.num_bytes == 0


async def test_stored_response_survives_a_failed_continuation(server):
    async with connected(server) as socket:
        first = await socket.response()
        await socket.error(previous_response_id=first["id"], temperature=-1)
        await socket.response(previous_response_id=first["id"])


async def test_tools_are_called_and_answered(start):
    server = await start(scripted_engine(CALL, template=families.HERMES))
    async with connected(server) as socket:
        first = await socket.response(store=False, tools=[TOOL])
        [call] = first["output"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        more = {"previous_response_id": first["id"], "input": [output], "tools": [TOOL]}
        await socket.response(store=False, **more)


async def test_compaction_starts_a_new_chain(server):
    body = {"model": server.model, "input": [{"role": "user", "content": "The word is slate."}]}
    status, made = await server.post(f"{PATH}/compact", body)
    assert status == 200
    async with connected(server) as socket:
        last = {"type": "message", "role": "user", "content": "Continue from here."}
        response = await socket.response(store=False, input=[*made["output"], last], tools=[])
        assert response["previous_response_id"] is None


# ---- the rest of the protocol --------------------------------------------------------------------


async def test_warm_up_has_no_output_and_can_be_continued(server):
    async with connected(server) as socket:
        await socket.send(create(generate=False, store=False, input="A long beginning. " * 5))
        events = await socket.events()
        warm = events[-1]["response"]
        assert [event["type"] for event in events] == [
            "response.created", "response.in_progress", "response.completed",
        ]  # fmt: skip
        assert warm["output"] == [] and warm["usage"]["output_tokens"] == 0
        more = await socket.response(store=False, previous_response_id=warm["id"], input="Go on")
        assert text_of(more) == "It is sunny."
        assert more["usage"]["input_tokens_details"]["cached_tokens"] > 0


async def test_events_repeat_the_stream_id_in_order(server):
    """One response runs at a time, so streams of other names are answered one after the other."""
    async with connected(server) as socket:
        for name in ("planner", "research"):
            await socket.send(create(stream_id=name))
        for name in ("planner", "research"):
            assert {event["stream_id"] for event in await socket.events()} == {name}
        await socket.send(create(stream_id="critic", temperature=-1))
        assert (await socket.event())["stream_id"] == "critic"
        for name in ("", "a b", "x" * 257):
            event = await socket.ask(stream_id=name)
            assert event["error"]["code"] == "invalid_stream_id" and "stream_id" not in event
            assert event["error"]["param"] == "stream_id"


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ("not JSON", None, "not valid JSON"),
        ("", None, "not valid JSON"),
        ('"text"', None, "object"),
        ("[]", None, "object"),
        ('{"type": "response.create", "input": ' + "[" * 500, None, "nested"),
        ("{}", "type", "response.create"),
        ({"type": "response.steer", "input": {"text": "x"}}, "type", "response.create"),
        ({"type": ["response.create"]}, "type", ""),
        (create(stream=False), "stream", "omit it"),
        (create(background=True), "background", "omit it"),
        (create(input=None), "input", "required"),
        (create(model="other"), "model", "forge-fake"),
        (create(temperature=-1), "temperature", ""),
        (create(conversation="c"), "conversation", "previous_response_id"),
        ('{"type": "response.create", "input": "a", "input": "b"}', "input", "twice"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
async def test_bad_message_gets_an_error_and_the_connection_survives(server, message, param, says):
    async with connected(server) as socket:
        await socket.send(message)
        event = await socket.event()
        assert event["type"] == "error" and event["status"] in (400, 404)
        assert event["error"]["param"] == param
        assert says in event["error"]["message"]
        await socket.response()


async def test_binary_message_gets_an_error_and_the_connection_survives(server):
    async with connected(server) as socket:
        await socket.raw.send_bytes(json.dumps(create()).encode())
        event = await socket.event()
        assert event["status"] == 400 and "text frames" in event["error"]["message"]
        await socket.response()


async def test_codex_stream_field_is_accepted(server):
    async with connected(server) as socket:
        await socket.response(stream=True, background=False)


async def test_message_over_the_limit_gets_an_error_and_closes_the_connection(start):
    server = await start(Engine.fake(), SMALL)
    async with connected(server) as socket:
        await socket.ask(input="x" * 3900, max_output_tokens=1)
        await socket.send(create(input="x" * 5000))
        event = await socket.event()
        assert (event["status"], event["error"]["code"]) == (413, "request_too_large")
        assert await socket.closed() == aiohttp.WSCloseCode.MESSAGE_TOO_BIG


async def test_waiting_messages_are_bounded(start):
    server = await start(
        Engine.fake(step_time_s=0.05), ServerConfig(limits=Limits(body_bytes=4096))
    )
    async with connected(server) as socket:
        await socket.send(create(max_output_tokens=1000))
        assert (await socket.event())["type"] == "response.created"
        for number in range(MAX_WAITING + 1):
            await socket.send(create(input=str(number)))
        events = []
        while (message := await socket.raw.receive()).type == WSMsgType.TEXT:
            events.append(json.loads(message.data))
        assert (
            events[-1]["type"] == "error"
            and "messages are queued" in events[-1]["error"]["message"]
        )
        assert socket.raw.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION
    await server.idle()


async def test_bytes_of_waiting_messages_are_bounded(start):
    server = await start(
        Engine.fake(step_time_s=0.01), ServerConfig(limits=Limits(body_bytes=4096))
    )
    async with connected(server) as socket:
        await socket.send(create(max_output_tokens=20))
        assert (await socket.event())["type"] == "response.created"
        for _ in range(3):
            await socket.send(create(input="x" * 1500, max_output_tokens=1))
        while (await socket.event())["type"] not in LAST:
            pass
        kinds = [(await socket.events())[-1] for _ in range(3)]
        assert "bytes of messages are queued" in kinds[2]["error"]["message"]
        assert (await socket.ask(max_output_tokens=1))["type"] == "response.incomplete"


async def test_connection_has_no_total_byte_limit(start):
    """Bytes are limited per body, not per WebSocket."""
    server = await start(Engine.fake(), ServerConfig(limits=Limits(body_bytes=1024)))
    async with connected(server) as socket:
        for _ in range(120):
            error = await socket.error(metadata={"a": "x" * 800})
            assert error["param"] == "metadata"


# ---- protections ---------------------------------------------------------------------------------


async def refused(server: Server, **options: Any) -> int:
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        async with connected(server, **options):
            pass
    return caught.value.status


async def test_key_is_required_before_the_upgrade(start):
    server = await start(Engine.fake(), ServerConfig(api_key=("sk-1", "sk-2")))
    assert await refused(server) == 401
    assert await refused(server, headers={"Authorization": "Bearer wrong"}) == 401
    for headers in ({"Authorization": "Bearer sk-1"}, {"X-Api-Key": "sk-1"}):
        async with connected(server, headers=headers) as socket:
            stored = (await socket.ask(max_output_tokens=1))["response"]
    async with connected(server, headers={"Authorization": "Bearer sk-2"}) as socket:
        error = await socket.error(previous_response_id=stored["id"])
        assert error["code"] == "previous_response_not_found", "each tenant has its own"


async def test_cross_site_page_cannot_open_a_websocket(start):
    server = await start(Engine.fake())
    port = server.url.rpartition(":")[2]
    for headers in (
        {"Origin": "https://page.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "rebound.example"},
    ):
        assert await refused(server, headers=headers) == 403, headers
    async with connected(server, headers={"Origin": f"http://127.0.0.1:{port}"}) as socket:
        await socket.ask()
    server = await start(Engine.fake(), ServerConfig(cors_origin=("https://page.example",)))
    async with connected(server, headers={"Origin": "https://page.example"}) as socket:
        await socket.ask()
    assert await refused(server, headers={"Origin": "https://other.example"}) == 403


async def test_plain_get_explains_how_to_open_a_websocket(server):
    for method, headers in (
        ("GET", {}),
        ("GET", {"Upgrade": "websocket", "Connection": "Upgrade"}),
        ("GET", {"Upgrade": "h2c", "Connection": "Upgrade"}),
    ):
        url = server.url + PATH
        async with server.http.request(method, url, headers=headers) as response:
            assert response.status == 426 and response.headers["Upgrade"] == "websocket"
            assert (await response.json())["error"]["code"] == "upgrade_required"
    async with server.http.head(server.url + PATH) as response:
        assert response.status == 426


async def test_overloaded_server_sends_an_error_event(start):
    engine = Engine.fake(step_time_s=0.02, queue_limits=QueueLimits(prompt_tokens=10))
    server = await start(engine)
    async with connected(server) as socket:
        stream = engine.submit([1] * 50, SamplingParams(max_tokens=2), request_id="w")
        error = await socket.error(max_output_tokens=1)
        assert (error["status"], error["code"]) == (503, "overloaded")
        assert int(error["headers"]["Retry-After"]) > 0
        _ = [deltas async for deltas in stream]
        assert (await socket.ask(max_output_tokens=1))["type"] == "response.incomplete"
        server.service.memory._in_use = lambda: 1.0
        server.service.memory.check()
        assert (await socket.error())["code"] == "overloaded"


async def test_mid_stream_failure_ends_only_the_response(start, monkeypatch):
    server = await start(Engine.fake())
    async with connected(server) as socket:
        first = (await socket.ask(store=False, max_output_tokens=2))["response"]
        device = core_of(server.engine).device
        with monkeypatch.context() as patched:
            patched.setattr(device, "_fault", lambda scheduled: scheduled.num_output == 5)
            await socket.send(create(store=False, previous_response_id=first["id"]))
            events = await socket.events()
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        assert "error" not in {event["type"] for event in events}
        for response in (first, events[-1]["response"]):
            error = await socket.error(store=False, previous_response_id=response["id"])
            assert error["code"] == "previous_response_not_found"
        assert (await socket.ask(max_output_tokens=2))["type"] == "response.incomplete"


async def test_stalled_reader_times_out(start):
    engine = Engine.fake(max_model_len=8192, step_time_s=0.002)
    server = await start(engine, timeouts=Timeouts(write_stall_s=0.2), send_buffer=4096)
    with socket.socket() as raw:
        raw.setblocking(False)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await upgraded(server, raw)
        message = json.dumps(create(store=False, max_output_tokens=8000, top_logprobs=20))
        await asyncio.get_running_loop().sock_sendall(raw, masked(message.encode()))
        async with asyncio.timeout(60):
            while not server.engine.stats().generation_tokens:
                await asyncio.sleep(0.01)
            while server.service.sockets:
                await asyncio.sleep(0.01)
    await server.idle()
    assert server.engine.stats().generation_tokens < 8000
    assert await counted(server, "WEBSOCKET") == {"499": 1}


async def upgraded(server: Server, raw: socket.socket) -> None:
    """Open a WebSocket by hand."""
    loop = asyncio.get_running_loop()
    host, port = server.url.removeprefix("http://").split(":")
    await loop.sock_connect(raw, (host, int(port)))
    head = (
        f"GET {PATH} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
    )
    await loop.sock_sendall(raw, head.encode())
    assert b"101 Switching Protocols" in await loop.sock_recv(raw, 4096)


def masked(payload: bytes) -> bytes:
    assert 125 < len(payload) < 65536
    return b"\x81\xfe" + len(payload).to_bytes(2, "big") + bytes(4) + payload


async def counted(server: Server, method: str) -> dict[str, float]:
    """Return the counted requests of the method, by status."""
    async with server.http.get(server.url + "/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    return {
        sample.labels["code"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "http_requests_total" and sample.labels["method"] == method
    }


async def test_each_response_is_counted_and_logged(server, caplog):
    caplog.set_level(logging.INFO, "forge_serve.requests")
    async with connected(server, headers={"X-Request-Id": "mine"}) as socket:
        response = await socket.response()
        await socket.error(temperature=-1)
        await socket.error(previous_response_id="resp_missing")
    async with asyncio.timeout(10):
        while server.service.sockets or not await counted(server, "GET"):
            await asyncio.sleep(0.001)
    assert await counted(server, "WEBSOCKET") == {"200": 1, "400": 2}
    assert (await counted(server, "GET"))["101"] == 1
    lines = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    lines = [line for line in lines if line["path"] == PATH]
    assert [(line["method"], line["status"], line["id"]) for line in lines] == [
        ("WEBSOCKET", 200, "mine-1"),
        ("WEBSOCKET", 400, "mine-2"),
        ("WEBSOCKET", 400, "mine-3"),
        ("GET", 101, "mine"),
    ]
    assert lines[0]["response"] == response["id"] and lines[0]["stream"]
    assert lines[0]["output_tokens"] == response["usage"]["output_tokens"]
    assert lines[2]["error"] == "previous_response_not_found"
    assert "output_tokens" not in lines[3]


async def test_client_disconnect_ends_its_response(start):
    server = await start(Engine.fake(step_time_s=0.01))
    for how in ("close", "abort"):
        async with connected(server) as socket:
            await socket.send(create(store=False, max_output_tokens=1000))
            assert (await socket.event())["type"] == "response.created"
            if how == "close":
                await socket.raw.close()
            else:
                connection = socket.raw._response.connection
                assert connection is not None and connection.transport is not None
                connection.transport.abort()
        await server.idle()
        await forgotten(server)


async def test_shutdown_finishes_the_response_and_closes(start):
    server = await start(Engine.fake(step_time_s=0.01))
    async with connected(server) as busy, connected(server) as idle:
        await busy.send(create(max_output_tokens=5))
        assert (await busy.event())["type"] == "response.created"
        draining = asyncio.create_task(drain(server.service, 30.0))
        assert await idle.closed() == aiohttp.WSCloseCode.SERVICE_RESTART
        await busy.send(create(input="one more"))
        while (event := await busy.event())["type"] not in LAST:
            pass
        assert event["type"] == "response.incomplete", "it has its five tokens"
        event = await busy.event()
        assert (event["status"], event["error"]["code"]) == (503, "not_ready")
        assert await busy.closed() == aiohttp.WSCloseCode.SERVICE_RESTART
        await draining
        assert await refused(server) == 503


async def test_connection_has_a_maximum_age(server, monkeypatch):
    monkeypatch.setattr(responses_websocket, "CONNECTION_S", 0.0)
    async with connected(server) as socket:
        event = await socket.event()
        assert event["status"] == 400
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        assert await socket.closed() == aiohttp.WSCloseCode.GOING_AWAY


async def test_idle_client_is_pinged_and_closed_without_an_answer(server, monkeypatch):
    monkeypatch.setattr(responses_websocket, "PING_S", 0.01)
    async with connected(server, autoping=False) as socket:
        for _ in range(3):
            message = await socket.raw.receive()
            assert message.type == WSMsgType.PING
            await socket.raw.pong(message.data)
        while (message := await socket.raw.receive()).type == WSMsgType.PING:
            pass  # unanswered
        assert message.type in (WSMsgType.CLOSED, WSMsgType.ERROR, WSMsgType.CLOSING)
    async with asyncio.timeout(10):
        while server.service.sockets:
            await asyncio.sleep(0.001)


async def test_client_ping_is_answered(server):
    async with connected(server, autoping=False) as socket:
        await socket.raw.ping(b"are you there")
        message = await socket.raw.receive()
        assert (message.type, message.data) == (WSMsgType.PONG, b"are you there")


@pytest.mark.parametrize("size", [0, 125, 126, 65535, 65536])
async def test_frames_of_all_lengths_are_read(size):
    async def send(http: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse()
        await response.prepare(http)
        assert http.transport is not None
        http.transport.write(text_frame(b"x" * size))
        await response.receive()
        return response

    app = web.Application()
    app.router.add_get("/", send)
    async with TestServer(app) as server, TestClient(server) as client:
        raw = await client.ws_connect("/")
        assert await raw.receive_str() == "x" * size
        await raw.close()


# ---- local responses -----------------------------------------------------------------------------


async def test_connection_keeps_only_its_last_responses(server):
    async with connected(server) as socket:
        ids = [(await socket.response(store=False))["id"] for _ in range(MAX_LOCAL + 1)]
        error = await socket.error(store=False, previous_response_id=ids[0])
        assert error["code"] == "previous_response_not_found"
        await socket.response(store=False, previous_response_id=ids[1])
        await socket.response(store=False, previous_response_id=ids[-1])
    await forgotten(server)


async def test_connection_keeps_responses_without_a_store(start):
    config = ServerConfig(max_stored_responses=0)
    server = await start(scripted_engine("Sunny.", template=families.HERMES), config)
    async with connected(server) as socket:
        first = await socket.response()
        assert not first["store"]
        await socket.response(previous_response_id=first["id"])
        assert (await socket.error(store=True))["param"] == "store"


# ---- OpenAI's client -----------------------------------------------------------------------------


async def test_openai_client_connects_and_continues(server):
    async with server.openai.responses.connect() as connection:
        previous = None
        for _ in range(2):
            await connection.response.create(
                model=server.model, input="Hi", store=False, previous_response_id=previous,
                stream_id="main",
            )  # fmt: skip
            async for event in connection:
                assert event.stream_id == "main"
                if event.type == "response.completed":
                    break
            assert event.response.output_text == "It is sunny."
            previous = event.response.id
        await connection.response.create(
            model=server.model, input="Hi", previous_response_id="resp_missing"
        )
        event = await connection.recv()
        assert isinstance(event, ResponseWsError) and event.status == 400
        assert event.error.code == "previous_response_not_found"
