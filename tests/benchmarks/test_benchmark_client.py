"""The client against a server whose answers a test defines, and the load that it makes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from benchmarks.workloads import PERSON
from forge_serve.bench.client import Server, parse_counters, run, run_all
from forge_serve.bench.errors import BenchmarkError
from forge_serve.bench.metrics import Measured
from forge_serve.bench.workload import ALL, Request, Workload
from forge_serve.http.client import ServerError

USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 4,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    },
}


def event(value: Any) -> bytes:
    data = value if isinstance(value, str) else json.dumps(value)
    return f"data: {data}\n\n".encode()


def text(piece: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]})


DONE = event("[DONE]")


class Script:
    """A server whose next answer is set by the test."""

    def __init__(self) -> None:
        self.url = ""
        self.parts: list[bytes] = []
        self.status = 200
        self.bodies: list[Any] = []
        self.headers: list[Any] = []
        self.models: Any = {"data": [{"id": "m", "max_model_len": 512}, {"id": "other"}]}

    async def answer(self, http: web.Request) -> web.StreamResponse:
        self.bodies.append(await http.json())
        self.headers.append(http.headers.copy())
        response = web.StreamResponse(status=self.status)
        await response.prepare(http)
        for part in self.parts:
            await response.write(part)
            await asyncio.sleep(0.005)  # so that each part arrives separately
        await response.write_eof()
        return response

    async def list_models(self, _: web.Request) -> web.Response:
        return web.json_response(self.models)


@pytest.fixture
async def script() -> AsyncIterator[Script]:
    script = Script()
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/completions", script.answer),
            web.post("/v1/chat/completions", script.answer),
            web.get("/v1/models", script.list_models),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    script.url = f"http://{host}:{port}"
    yield script
    await runner.cleanup()


async def ask(script: Script, *parts: bytes, status: int = 200, **options: Any) -> Measured:
    script.parts, script.status = list(parts), status
    request = Request(prompt=(1, 2, 3), max_tokens=5)
    async with Server.connect(script.url, **options) as server:
        return await server.submit(request)


async def test_tokens_come_from_usage_and_latencies_from_events(script):
    m = await ask(script, text("a"), text("bc d"), text("", "length"), event(USAGE) + DONE)
    assert m.error is None and m.tokens_known
    assert (m.events, m.completion_tokens, m.prompt_tokens, m.cached_tokens) == (2, 9, 4, 3)
    assert (m.text, m.finish_reason) == ("abc d", "length")
    assert m.ttft_s is not None and m.last_s is not None and len(m.gaps_s) == 1
    assert m.ttft_s + m.gaps_s[0] == pytest.approx(m.last_s)
    assert 0 < m.ttft_s < m.last_s < m.end_s


async def test_events_count_as_tokens_without_usage(script):
    m = await ask(script, text("a"), text("b", "stop"), DONE)
    assert (m.tokens_known, m.completion_tokens) == (False, 2)


async def test_event_split_across_reads_is_parsed(script):
    data = text("a") + text("é", "stop") + event(USAGE) + DONE
    m = await ask(script, *(data[i : i + 7] for i in range(0, len(data), 7)))
    assert (m.error, m.text, m.events) == (None, "aé", 2)


async def test_role_only_chunk_is_no_content_but_reasoning_is(script):
    def delta(**content: Any) -> bytes:
        return event({"choices": [{"index": 0, "delta": content}]})

    start = delta(role="assistant", content="")
    m = await ask(script, start, delta(reasoning="hm"), delta(content="yes"), event(USAGE), DONE)
    assert (m.events, m.text) == (2, "yes")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no such\nfield", "param": "x"}}, "HTTP 400: no such field"),
        ({"error": "plain"}, "HTTP 400: plain"),
        ({"object": "error", "message": "flat"}, "HTTP 400: flat"),
        ({"detail": "other"}, "HTTP 400: {'detail': 'other'}"),
    ],
)
async def test_rejected_request_reports_the_reason(script, body, message):
    m = await ask(script, json.dumps(body).encode(), status=400)
    assert (m.error, m.refused) == (message, True)


async def test_server_error_is_not_counted_as_a_refusal(script):
    m = await ask(script, b"<html>oops</html>", status=500)
    assert (m.error, m.refused) == ("HTTP 500: <html>oops</html>", False)


async def test_broken_streams_are_reported_as_errors(script):
    m = await ask(script, text("a"), event({"error": {"message": "gone"}}), DONE)
    assert m.error == "gone"
    m = await ask(script, text("a"))
    assert m.error == "the stream ended without [DONE]"
    m = await ask(script, b"data: {nothing\n\n", DONE)
    assert m.error is not None and "not JSON" in m.error
    m = await ask(script, event(USAGE | {"usage": {"completion_tokens": 0}}), DONE)
    assert m.error == "response without output"
    assert not m.refused


async def test_lost_server_is_an_error_of_its_requests():
    [m], _ = await run_all("http://127.0.0.1:9", [{"messages": []}])
    assert m.error is not None and m.error.startswith("ClientConnector") and not m.refused


async def test_request_bodies_match_the_protocols(script):
    parts = (text("a"), DONE)
    await ask(script, *parts)
    assert script.bodies[-1] == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    await ask(script, *parts, model="other", ignore_eos=False, api_key="key")
    assert script.bodies[-1]["model"] == "other" and "ignore_eos" not in script.bodies[-1]
    assert script.headers[-1]["Authorization"] == "Bearer key"
    with pytest.raises(BenchmarkError, match="--tokenizer"):
        await ask(script, *parts, endpoint="chat")


async def test_structured_requests_send_a_schema_in_a_chat(script):
    script.parts = [text("{}"), DONE]
    request = Request(text="who?", max_tokens=5, json_schema=PERSON)
    async with Server.connect(script.url) as server:
        await server.submit(request)
    body = script.bodies[-1]
    assert body["messages"] == [{"role": "user", "content": "who?"}]
    assert body["response_format"]["json_schema"]["schema"] == PERSON
    assert "ignore_eos" not in body and "prompt" not in body


async def test_context_length_comes_from_the_server(script):
    async with Server.connect(script.url + "/v1/") as server:
        assert (server.model, server.context) == ("m", 512)
    script.models = {"data": [{"id": "gguf", "meta": {"n_ctx_train": 2048}}]}
    async with Server.connect(script.url) as server:
        assert server.context == 2048


@pytest.mark.parametrize(
    ("models", "model", "message"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, "c", "no model 'c' at .*: it has 'a', 'b'"),
        ({"data": []}, None, "it has none"),
        ({"nothing": 1}, None, "did not return a list of models"),
        ({"data": [{"name": "a"}]}, None, "did not return a list of models"),
    ],
)
async def test_missing_model_fails_with_one_line(script, models, model, message):
    script.models = models
    with pytest.raises(ServerError, match=message):
        async with Server.connect(script.url, model=model):
            pass


def test_counters_are_parsed_from_prometheus_text():
    text = """
# HELP vllm:prefix_cache_hits_total x
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 20.0
vllm:prefix_cache_hits_total{engine="0",model_name="a b"} 3e1
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
vllm:num_preemptions_total 2
forge:compilations_after_ready_total{model_name="m"} 0
llamacpp:tokens_predicted_total 7
vllm:spec_decode_num_drafts_total{engine="0"} 4
vllm:spec_decode_num_draft_tokens_total{engine="0"} 12
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 9
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4
other_total 5
"""
    assert parse_counters(text) == {
        "prefix_cache_queries": 120.0,
        "prefix_cache_hits": 30.0,
        "preemptions": 2.0,
        "compilations_after_ready": 0.0,
        "generation_tokens": 7.0,
        "drafts": 4.0,
        "draft_tokens": 12.0,
        "accepted_draft_tokens": 9.0,
    }
    assert parse_counters("") == {}


class Recorder:
    """An endpoint that answers after a while; records the order and the concurrency."""

    def __init__(self, takes_s: float = 0.01):
        self.takes_s = takes_s
        self.started: list[int] = []
        self.ended: list[int] = []
        self.at_once: dict[str, int] = {}
        self.most: dict[str, int] = {}

    async def submit(self, request: Request) -> Measured:
        self.started.append(request.max_tokens)
        for group in (request.group, "in all"):
            self.at_once[group] = self.at_once.get(group, 0) + 1
            self.most[group] = max(self.most.get(group, 0), self.at_once[group])
        await asyncio.sleep(self.takes_s)
        for group in (request.group, "in all"):
            self.at_once[group] -= 1
        self.ended.append(request.max_tokens)
        return Measured(completion_tokens=1)


def numbered(count: int, **fields: Any) -> tuple[Request, ...]:
    return tuple(Request(max_tokens=i, **fields) for i in range(count))


async def test_closed_loop_keeps_its_concurrency_and_order():
    recorder = Recorder()
    done = await run(
        recorder.submit, Workload(name="x", requests=numbered(9), concurrency={ALL: 3})
    )
    assert recorder.most["in all"] == 3
    assert recorder.started == list(range(9))
    assert [m.asked_tokens for m in done.measured] == list(range(9))
    assert done.wall_s >= 3 * recorder.takes_s


async def test_requests_run_at_once_without_a_limit():
    recorder = Recorder()
    await run(recorder.submit, Workload(name="x", requests=numbered(9)))
    assert recorder.most["in all"] == 9


async def test_groups_have_their_own_limits():
    recorder = Recorder()
    requests = numbered(6, group="a") + numbered(6, group="b") + numbered(6, group="c")
    limits = {"a": 2, ALL: 3}
    await run(recorder.submit, Workload(name="x", requests=requests, concurrency=limits))
    assert recorder.most["a"] == 2
    assert recorder.most["in all"] == 5  # b and c share the limit of three for all other groups


async def test_request_waits_for_its_predecessor():
    recorder = Recorder()
    requests = (
        Request(max_tokens=0),
        Request(max_tokens=1, after=0),
        Request(max_tokens=2, after=1),
    )
    done = await run(recorder.submit, Workload(name="x", requests=requests))
    assert recorder.most["in all"] == 1 and recorder.ended == [0, 1, 2]
    sent = [m.sent_s for m in done.measured]
    assert sent[1] >= recorder.takes_s and sent[2] >= 2 * recorder.takes_s
    assert max(m.late_s for m in done.measured) < sent[1]


async def test_requests_are_sent_at_their_arrival_times():
    recorder = Recorder(0.0)
    requests = (Request(max_tokens=0, arrival_s=0.08), Request(max_tokens=1, arrival_s=0.02))
    done = await run(recorder.submit, Workload(name="x", requests=requests))
    assert recorder.started == [1, 0]
    for request, m in zip(requests, done.measured, strict=True):
        assert m.sent_s >= request.arrival_s
        assert m.late_s == pytest.approx(m.sent_s - request.arrival_s)


async def test_benchmark_errors_are_raised():
    async def broken(_: Request) -> Measured:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        await run(broken, Workload(name="x", requests=numbered(2)))
    assert caught.group_contains(ZeroDivisionError)
