"""The log line of each request with all its fields, as text or as JSON."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from conftest import scripted_engine

from forge_jax.config import BatchConfig, EngineConfig, SpeculationConfig
from forge_jax.engine.thread import Engine
from forge_jax.sampling_params import SamplingParams
from forge_jax.telemetry.log import Event, JsonFormatter, configure
from forge_serve.config import ServerConfig
from forge_serve.telemetry.request_log import QUIET_PATHS

NAME = "forge_serve.requests"
LONG = {"prompt": "the same beginning " * 20, "max_tokens": 8, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def lines(caplog) -> Any:
    """Return the fields of the lines so far as in JSON, and clear them."""
    caplog.set_level(logging.INFO, NAME)
    form = JsonFormatter()

    def take() -> list[dict[str, Any]]:
        taken = [json.loads(form.format(r)) for r in caplog.records if r.name == NAME]
        caplog.clear()
        return taken

    return take


async def soon(lines: Any, number: int = 1) -> list[dict[str, Any]]:
    found = lines()
    async with asyncio.timeout(30):
        while len(found) < number:
            await asyncio.sleep(0.005)
            found += lines()
    return found


async def test_log_line_matches_the_answer(start, lines):
    server = await start(Engine.fake())
    for _ in range(2):
        _, answer = await server.post("/v1/completions", LONG)
    _, line = await soon(lines, 2)
    usage = answer["usage"]
    assert line["message"] == "request" and line["level"] == "INFO"
    assert line["response"] == answer["id"] == f"cmpl-{line['id']}"
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["model"] == server.model
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert line["output_tokens"] == usage["completion_tokens"] == 8
    assert line["finish"] == "length"
    assert line["stream"] is False
    assert not {"error", "tenant", "trace", "nearest"} & line.keys()
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["e2e_s"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3, "model": "forge-fake"}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16}),
        ("/generate", {"prompt": "a", "max_tokens": 3}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_every_generating_endpoint_has_a_log_line(server, lines, path, body, stream):
    async with server.http.post(server.url + path, json={**body, "stream": stream}) as response:
        assert response.status == 200
        await response.read()
    (line,) = await soon(lines)
    assert (line["path"], line["status"], line["stream"]) == (path, 200, stream)
    assert line["finish"] in ("stop", "length") and "error" not in line
    assert line["prompt_tokens"] > 0 and line["output_tokens"] > 0
    assert line["ttft_s"] is not None and line["queue_s"] is not None


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "tokens"),
    [
        ("POST", "/v1/embeddings", {"input": "Hello"}, 200, True),
        ("POST", "/tokenize", {"prompt": "Hello"}, 200, False),
        ("POST", "/v1/messages/count_tokens", {"messages": MESSAGES}, 200, False),
        ("GET", "/v1/models", None, 200, False),
        ("GET", "/v1/models/{name}", None, 404, False),
        ("DELETE", "/v1/completions", None, 405, False),
    ],
)
async def test_other_endpoints_have_log_lines(server, lines, method, path, body, status, tokens):
    url = server.url + path.replace("{name}", "unknown")
    async with server.http.request(method, url, json=body) as response:
        assert response.status == status
    (line,) = await soon(lines)
    assert (line["method"], line["status"]) == (method, status)
    assert line["path"] == path
    assert (line.get("prompt_tokens", 0) > 0) is tokens
    assert ("error" not in line) is (status == 200)


async def test_probes_and_scrapes_have_no_log_line(server, lines):
    for path in QUIET_PATHS:
        async with server.http.get(server.url + path) as response:
            assert response.status == 200, path
    await server.get("/version")
    (line,) = await soon(lines)
    assert line["path"] == "/version"


async def test_rejected_request_reports_the_reason(server, lines):
    await server.post("/v1/completions", {"prompt": "a", "top_p": 7})
    await server.post("/v1/completions", {"prompt": "a", "model": "another"})
    await server.post("/v1/completions", {"prompt": "a " * 5000})
    await server.post("/made/up", {})
    found = await soon(lines, 4)
    assert [(line["status"], line["error"]) for line in found] == [
        (400, "invalid_request_error"),
        (404, "model_not_found"),
        (400, "context_length_exceeded"),
        (404, "not_found"),
    ]
    assert not any("finish" in line for line in found)
    assert found[3]["path"] == "/*" and found[0]["path"] == "/v1/completions"


async def test_log_line_has_only_applicable_fields(server, lines):
    await server.get("/v1/models")
    await server.post("/v1/chat/completion", {})
    listed, unknown = await soon(lines, 2)
    about = {"time", "level", "logger", "message"}
    assert listed.keys() - about == {"method", "path", "status", "e2e_s", "id"}
    assert unknown.keys() - listed.keys() == {"error", "nearest"}
    assert unknown["path"] == "/v1/chat/*" and unknown["nearest"] == "/v1/chat/completions"


async def test_unknown_path_cannot_inject_log_text(server, lines, caplog):
    """Only the known path that it starts with or resembles is logged."""
    await server.post("/v1/evil%0aline?secret=1", {})
    (line,) = await soon(lines)
    assert line["path"] == "/v1/*" and "nearest" not in line
    assert "evil" not in caplog.text and "secret" not in caplog.text


async def test_text_log_line_starts_with_the_request_and_omits_zeros(server, caplog):
    caplog.set_level(logging.INFO, NAME)
    await server.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})
    await server.get("/v1/models")
    async with asyncio.timeout(30):
        while len(caplog.records) < 2:
            await asyncio.sleep(0.005)
    generated, listed = [record.getMessage() for record in caplog.records if record.name == NAME]
    assert re.fullmatch(r"GET /v1/models 200 \d+\.\d{3}s id=[0-9a-f]{32}", listed)
    assert re.match(r"POST /v1/completions 200 \d+\.\d{3}s id=", generated)
    assert " prompt_tokens=1 output_tokens=2 " in generated and "none" not in generated
    assert not re.search(r"draft|preempt|stream|error|cached", generated)


async def test_disconnected_client_has_a_line_with_its_tokens(start, lines):
    server = await start(Engine.fake(step_time_s=0.005))
    body = {**LONG, "max_tokens": 3000, "stream": True}
    response = await server.http.post(server.url + "/v1/completions", json=body)
    await response.content.readline()
    response.close()
    (line,) = await soon(lines)
    assert (line["status"], line["finish"]) == (499, "abort") and "error" not in line
    assert 0 < line["output_tokens"] < 3000
    assert line["queue_s"] is not None and line["ttft_s"] is not None


async def test_deadline_in_a_stream_is_logged_despite_status_200(start, lines):
    server = await start(Engine.fake(step_time_s=0.005))
    body = {**LONG, "max_tokens": 3000, "timeout": 0.1}
    status, _ = await server.post("/v1/completions", body)
    await server.events("/v1/completions", {**body, "stream": True})
    found = await soon(lines, 2)
    assert [line["status"] for line in found] == [status, 200] == [504, 200]
    assert {line["error"] for line in found} == {"deadline_exceeded"}
    assert {line["finish"] for line in found} == {"abort"}


async def test_request_that_timed_out_waiting_logs_no_steps_or_tokens(start, lines):
    config = EngineConfig(batch=BatchConfig(max_num_seqs=1))
    server = await start(Engine.fake(step_time_s=0.005, config=config))
    params = SamplingParams(max_tokens=4000, ignore_eos=True)
    stream = server.engine.submit([1], params, request_id="long")
    await anext(stream)
    await server.post("/v1/completions", {**LONG, "timeout": 0.05})
    stream.abort()
    (line,) = await soon(lines)
    assert not {"queue_s", "ttft_s"} & line.keys() and line["e2e_s"] > 0


async def test_distinct_finish_reasons_are_logged_once(start, lines):
    server = await start(scripted_engine("ab", "abcdefgh" * 10))
    body = {"prompt": "x", "n": 8, "max_tokens": 20, "seed": 1}
    await server.post("/v1/completions", body)
    (line,) = await soon(lines)
    assert sorted(line["finish"].split(",")) == ["length", "stop"]


async def test_drafts_are_counted(start, lines):
    config = EngineConfig(speculation=SpeculationConfig(speculation="suffix"))
    server = await start(Engine.fake(step_time_s=0.002, config=config))
    body = {"prompt": "Tell me about the river.", "max_tokens": 60, "temperature": 0}
    for _ in range(3):
        _, answer = await server.post("/v1/completions", body)
    line = (await soon(lines, 3))[-1]
    details = answer["usage"]["completion_tokens_details"]
    assert line["accepted_tokens"] == details["accepted_prediction_tokens"] > 0
    rejected = details["rejected_prediction_tokens"]
    assert line["draft_tokens"] == line["accepted_tokens"] + rejected


async def test_tenant_is_logged_and_no_key(start, lines, caplog):
    keys = ("first-secret-key", "second-secret-key")
    server = await start(Engine.fake(), ServerConfig(api_key=keys))
    for key in (*keys, keys[0], "wrong-secret-key"):
        headers = {"Authorization": f"Bearer {key}"}
        body = {**LONG, "cache_salt": "salty"}
        await server.http.post(server.url + "/v1/completions", json=body, headers=headers)
    written = caplog.text
    first, second, again, unknown = await soon(lines, 4)
    assert first["tenant"] == again["tenant"] != second["tenant"]
    assert len(first["tenant"]) == len(second["tenant"]) == 12
    assert "tenant" not in unknown and unknown["status"] == 401
    assert "secret" not in written and "salty" not in written and "beginning" not in written


async def test_background_response_is_logged_at_its_end(server, lines):
    body = {"input": "Hello", "background": True, "max_output_tokens": 16}
    _, answer = await server.post("/v1/responses", body)
    (line,) = [line for line in await soon(lines) if line["path"] == "/v1/responses"]
    assert line["response"] == answer["id"]
    assert line["output_tokens"] > 0 and line["finish"] in ("stop", "length")
    assert line["e2e_s"] >= line["ttft_s"]


async def test_request_lines_can_be_disabled(start, lines):
    server = await start(Engine.fake(), ServerConfig(request_log=False))
    await server.post("/v1/completions", LONG)
    await server.idle()
    assert lines() == []


def test_text_log_line_is_names_and_values():
    fields = {"id": "a/1", "tokens": 3, "queue_s": 0.12345, "error": None, "stream": True}
    assert str(Event("request", fields)) == (
        "request id=a/1 tokens=3 queue_s=0.123 error=none stream=true"
    )
    event = Event("request", fields, lead="GET /x 200", shown={"id": "a/1"})
    assert str(event) == "GET /x 200 id=a/1" and event.fields == fields


def test_json_log_line_has_message_and_origin():
    form = JsonFormatter("engine")
    try:
        raise ValueError("a\nb")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "%d things", (3,), sys.exc_info())
    line = form.format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["level"], found["logger"], found["process"]) == ("ERROR", "x", "engine")
    assert found["message"] == "3 things" and "ValueError: a\nb" in found["exception"]
    assert found["time"].endswith("+00:00") and len(found["time"]) == 29


def test_existing_logging_configuration_is_kept():
    root = logging.getLogger()
    before = list(root.handlers)
    mine = logging.StreamHandler(io.StringIO())
    root.addHandler(mine)
    try:
        configure("json")
        assert root.handlers == [*before, mine]
    finally:
        root.removeHandler(mine)


KEYS = ("--api-key", "a-long-key", "--api-key", "another-key")


@pytest.mark.parametrize("flags", [KEYS, (*KEYS, "--engine-process")])
def test_json_log_leaves_nothing_else_on_stderr(flags, tmp_path):
    errors = tmp_path / "stderr"
    with errors.open("wb") as stderr:
        command = [sys.executable, "-m", "forge_serve", "serve", "--fake", "--port", "0",
                   "--log-format", "json", *flags]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as server:
            try:
                assert server.stdout is not None
                url = next(word for word in server.stdout.readline().split() if "://" in word)
                body = json.dumps(LONG).encode()
                headers = {"Authorization": "Bearer another-key"}
                url = f"{url.rstrip(';')}/v1/completions"
                request = urllib.request.Request(url, body, headers)
                with urllib.request.urlopen(request) as response:
                    response.read()
            finally:
                server.terminate()
            assert server.wait(30) == 0
    found = [json.loads(line) for line in errors.read_text().splitlines()]
    (line,) = [each for each in found if each["message"] == "request"]
    assert line["output_tokens"] == 8
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["e2e_s"]
    assert f"API key 2 is tenant {line['tenant']} in the log" in {m["message"] for m in found}
    processes = {None, "engine"} if "--engine-process" in flags else {None}
    assert {each.get("process") for each in found} == processes
