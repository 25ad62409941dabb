"""Request spans in OpenTelemetry's terms, and their requirements."""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from forge_jax.engine.thread import Engine
from forge_jax.errors import ConfigError
from forge_serve.config import ServerConfig
from forge_serve.telemetry.tracing import Tracing

PATH = "/v1/completions"
BODY = {"prompt": "Hello, my name is", "max_tokens": 5, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hello"}]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans(server) -> Any:
    """Wait for this many spans of the server; return them by name, in the order of their ends."""
    exporter = InMemorySpanExporter()
    server.service.tracing = Tracing(SimpleSpanProcessor(exporter))

    async def wait(number: int) -> dict[str, ReadableSpan]:
        async with asyncio.timeout(30):
            while len(found := exporter.get_finished_spans()) < number:
                await asyncio.sleep(0.005)
        exporter.clear()
        return {span.name: span for span in found}

    return wait


def ids(span: ReadableSpan) -> tuple[str, str]:
    context = span.get_span_context()
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


async def test_request_span_follows_the_conventions(server, spans):
    body = {**BODY, "temperature": 0.5, "top_k": 3, "seed": 7, "frequency_penalty": 0.25}
    _, answer = await server.post(PATH, body)
    _, answer = await server.post(PATH, body)
    span = (await spans(8))[f"text_completion {server.model}"]
    assert span.kind is SpanKind.SERVER and span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    has, usage = dict(span.attributes), answer["usage"]
    times = {name: has.pop(name) for name in list(has) if name.startswith("gen_ai.latency.")}
    assert has == {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "forge-jax",
        "gen_ai.request.model": server.model,
        "gen_ai.response.model": server.model,
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.id": answer["id"].removeprefix("cmpl-"),
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.request.frequency_penalty": 0.25,
        "forge.draft_tokens": 0,
        "forge.accepted_tokens": 0,
        "forge.preemptions": 0,
    }
    names = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode",
             "time_in_model_inference", "time_to_first_token", "e2e")  # fmt: skip
    assert set(times) == {f"gen_ai.latency.{name}" for name in names}
    queue, prefill, decode, inference, first, e2e = (times[f"gen_ai.latency.{n}"] for n in names)
    assert queue + prefill <= first <= e2e
    assert inference == pytest.approx(prefill + decode)
    assert span.resource.attributes["service.name"] == "forge-jax"


async def test_stages_are_consecutive_child_spans(server, spans):
    await server.post(PATH, BODY)
    found = await spans(4)
    whole = found.pop(f"text_completion {server.model}")
    queue, prefill, decode = (found[name] for name in ("queue", "prefill", "decode"))
    for stage in (queue, prefill, decode):
        assert stage.parent.span_id == whole.context.span_id
        assert whole.start_time <= stage.start_time <= stage.end_time <= whole.end_time
    assert queue.end_time <= prefill.end_time == decode.start_time


async def test_request_joins_its_clients_trace(server, spans):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    async with server.http.post(server.url + PATH, json=BODY, headers=headers) as response:
        assert response.status == 200
    found = await spans(4)
    assert {ids(span)[0] for span in found.values()} == {TRACE}
    whole = found[f"text_completion {server.model}"]
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.context.trace_state["vendor"] == "1"


async def test_unsampled_trace_is_not_sent(server, spans, caplog):
    caplog.set_level(logging.INFO, "forge_serve.requests")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    await server.http.post(server.url + PATH, json=BODY, headers=headers)
    assert "trace=" not in caplog.text
    await server.post("/tokenize", {"prompt": "a"})
    assert set(await spans(1)) == {"POST /tokenize"}


async def test_invalid_traceparent_starts_a_new_trace(server, spans):
    headers = {"traceparent": "00-nonsense"}
    await server.http.post(server.url + PATH, json=BODY, headers=headers)
    span = (await spans(4))[f"text_completion {server.model}"]
    assert span.parent is None


async def test_log_line_names_the_trace(server, spans, caplog):
    caplog.set_level(logging.INFO, "forge_serve.requests")
    await server.post(PATH, BODY)
    span = (await spans(4))[f"text_completion {server.model}"]
    assert f"trace={ids(span)[0]}" in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}, "chat"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2}, "chat"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}, "chat"),
        ("/generate", {"prompt": "a", "max_tokens": 2}, "text_completion"),
    ],
)
async def test_each_protocol_has_its_operation(server, spans, path, body, name):
    async with server.http.post(server.url + path, json={**body, "stream": True}) as response:
        await response.read()
        assert response.status == 200
    span = (await spans(4))[f"{name} {server.model}"]
    assert span.attributes["gen_ai.operation.name"] == name
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.response.time_to_first_chunk"] > 0


async def test_embeddings_have_no_output(server, spans):
    await server.post("/v1/embeddings", {"input": "Hello"})
    has = (await spans(2))[f"embeddings {server.model}"].attributes
    assert has["gen_ai.operation.name"] == "embeddings" and has["gen_ai.usage.input_tokens"] > 0
    assert "gen_ai.usage.output_tokens" not in has and "gen_ai.request.temperature" not in has


async def test_seed_too_large_for_an_attribute_is_omitted(server, spans):
    await server.post(PATH, {**BODY, "seed": 2**64 - 1})
    span = (await spans(4))[f"text_completion {server.model}"]
    assert "gen_ai.request.seed" not in span.attributes


async def test_rejection_is_a_client_error_and_failure_a_server_error(server, spans):
    await server.post(PATH, {**BODY, "top_p": 7})
    refused = (await spans(1))[f"POST {PATH}"]
    assert refused.attributes["error.type"] == "invalid_request_error"
    assert refused.attributes["http.response.status_code"] == 400
    assert refused.status.status_code is StatusCode.UNSET
    server.service.stopping = True
    await server.post(PATH, BODY)
    failed = (await spans(1))[f"POST {PATH}"]
    assert failed.attributes["error.type"] == "not_ready"
    assert failed.status.status_code is StatusCode.ERROR


async def test_interrupted_stream_is_an_error_despite_its_start(start):
    server = await start(Engine.fake(step_time_s=0.005))
    exporter = InMemorySpanExporter()
    server.service.tracing = Tracing(SimpleSpanProcessor(exporter))
    body = {**BODY, "max_tokens": 3000, "timeout": 0.1, "stream": True}
    await server.events(PATH, body)
    async with asyncio.timeout(30):
        while len(exporter.get_finished_spans()) < 4:
            await asyncio.sleep(0.005)
    (span,) = [s for s in exporter.get_finished_spans() if s.parent is None]
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["error.type"] == "deadline_exceeded"
    assert span.status.status_code is StatusCode.ERROR


async def test_spans_arrive_at_a_collector(aiohttp_collector):
    url, received = aiohttp_collector
    tracing = Tracing.of(ServerConfig(otlp_traces_endpoint=url))
    assert tracing is not None
    tracing._tracer.start_span("a").end()
    await asyncio.to_thread(tracing.close)
    request = ExportTraceServiceRequest.FromString(received[0])
    (resource,) = request.resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "forge-jax"
    assert [span.name for span in resource.scope_spans[0].spans] == ["a"]


async def test_stopping_server_sends_its_last_spans(aiohttp_collector):
    url, received = aiohttp_collector
    command = [sys.executable, "-m", "forge_serve", "serve", "--fake", "--port", "0",
               "--no-request-log", "--otlp-traces-endpoint", url]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        line = (await process.stdout.readline()).decode()
        server = re.search(r"http://[^;]+", line)[0]
        async with aiohttp.request("POST", server + PATH, json=BODY) as response:
            assert response.status == 200
    finally:
        process.terminate()
        assert await process.wait() == 0
    spans = [span.name for body in received
             for resource in ExportTraceServiceRequest.FromString(body).resource_spans
             for scope in resource.scope_spans for span in scope.spans]  # fmt: skip
    assert "text_completion forge-fake" in spans


@pytest.fixture
async def aiohttp_collector() -> Any:
    import gzip
    import socket

    from aiohttp import web

    received = []

    async def take(http: web.Request) -> web.Response:
        body = await http.read()
        received.append(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.add_routes([web.post("/v1/traces", take)])
    runner = web.AppRunner(app)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        await web.SockSite(runner, sock).start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/v1/traces", received
        await runner.cleanup()


def test_service_name_comes_from_the_opentelemetry_variable(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracing = Tracing(SimpleSpanProcessor(InMemorySpanExporter()))
    assert tracing._provider.resource.attributes["service.name"] == "mine"


def test_tracing_imports_nothing_without_the_flag():
    code = (
        "import sys; from forge_serve.server.service import Service;"
        "from forge_serve.config import ServerConfig;"
        "assert Service(ServerConfig()).tracing is None;"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flag_without_the_extra_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"-e '.\[otel\]'"):
        Tracing.of(ServerConfig(otlp_traces_endpoint="http://localhost:4318/v1/traces"))


@pytest.mark.parametrize("endpoint", ["localhost:4318", "", "grpc://x", "http:///v1"])
def test_endpoint_must_be_a_url(endpoint):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be a URL"):
        ServerConfig(otlp_traces_endpoint=endpoint)
